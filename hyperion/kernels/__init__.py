"""Operations that have a Triton kernel and a reference implementation in PyTorch.

Each function chooses its implementation by the device, the dtype and the state of autocast. So the code of a model does not have
to choose. Modules named `*_triton` import Triton, which only the GPU builds of PyTorch contain. Therefore import these modules
inside functions.
"""
