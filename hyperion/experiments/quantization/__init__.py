"""Experiments on quantised weights: size, quality, decoding speed, and training with few bits."""
