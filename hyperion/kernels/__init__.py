"""Operations with a Triton kernel, each with its PyTorch reference.

Each function chooses its implementation by device, dtype and autocast, so that the models that call it know none of them.
Modules named `*_triton` import Triton, which only PyTorch's GPU builds contain; import them inside functions.
"""
