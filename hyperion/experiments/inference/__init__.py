"""Experiments on inference: runtimes, quantised weights, decoding speed, QLoRA, and PyTorch's operators and architectures."""
