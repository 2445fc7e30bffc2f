"""Experiments on kernels: Triton kernels and PyTorch's own, their rates, their memory, and what a compiler makes of them."""
