"""Baselines: the training of a language model and of an image classifier, the speed of both, and recovery from faults."""
