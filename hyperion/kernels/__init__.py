"""Operations that have a Triton kernel and a reference implementation in PyTorch.

Each function selects its implementation from the device, the dtype and the state of autocast, so the calling model does not need
to know the implementations. Modules named `*_triton` import Triton, which only the GPU builds of PyTorch contain. Therefore
import these modules inside functions.
"""
