"""Baselines: train a language model and an image classifier, measure the training speed, and test recovery from faults."""
