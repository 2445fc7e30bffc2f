"""Experiments on Triton and PyTorch kernels: correctness, speed, memory, and the resources of compiled kernels."""
