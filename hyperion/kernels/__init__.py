"""Operations that have a Triton kernel and a reference implementation in PyTorch.

Each function chooses its implementation by the device, the dtype and the state of autocast, so model code does not have to
choose. Modules named `*_triton` import Triton, which only the GPU builds of PyTorch contain. Import these modules inside
functions.
"""
