"""Experiment on inference: speed and accuracy of trained models in several runtimes."""
