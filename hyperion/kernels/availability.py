"""Find out whether Triton kernels can be compiled, interpreted and run on this machine."""

import platform

import torch

from hyperion.hardware import Device
from hyperion.kernels.token_loss import HAS_TRITON

# The Triton release that is tested with CPU builds of PyTorch, which do not themselves require a release.
TESTED = "3.7.1"


def why_no_triton() -> str:
    """Return the reason why Triton is not installed on this machine, and the next step. Return "" if Triton is installed."""
    if HAS_TRITON:
        return ""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"unavailable: Triton has no package for {platform.system()} on {platform.machine()}; use a Linux machine"
    if torch.version.cuda or torch.version.hip:
        return "unavailable: Triton is not installed; next step: install the Triton release that this PyTorch requires"
    return f"unavailable: Triton is not installed; next step: pip install --no-deps triton=={TESTED}"


def why_no_kernels(device: Device) -> str:
    """Return the reason why Triton kernels cannot run on this device, and the next step. Return "" if they can run."""
    if device.kind != "cpu":
        return why_no_triton()
    return "unavailable: Triton kernels run on a GPU; next step: run this chapter on a machine with a GPU"


def triton_version() -> str:
    """Return the version of Triton. Triton must be installed.

    The version is read from the imported module and not from the metadata of the package, because the package that PyTorch
    requires on AMD GPUs has another name.
    """
    import triton  # pyright: ignore[reportMissingImports] - only PyTorch's GPU builds contain it

    return triton.__version__
