"""Experiments on coverage: which operators of PyTorch and architectures of transformers give correct results on a device."""
