"""Experiments on a server with an OpenAI-compatible endpoint: correct answers, speed under load, and behaviour under faults."""
