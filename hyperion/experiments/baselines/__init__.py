"""Trained baselines: language model, image classifier, their speed, and recovery from faults."""
