"""Experiments on inference: runtimes, quantisation, and the operators and architectures that must work on each device."""
