"""Experiments on inference: runtimes, quantised weights, decoding speed, and training with few bits."""
