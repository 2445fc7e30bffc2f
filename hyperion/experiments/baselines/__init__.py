"""Baselines: train a language model and an image classifier, measure training speed, and test recovery from faults."""
