"""Experiments on inference: runtimes, quantised weights, decode speed, QLoRA, and PyTorch's operators and architectures."""
