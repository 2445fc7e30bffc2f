"""Serving: a server with an OpenAI-compatible endpoint, measured under load, checked for correct answers and for faults."""
