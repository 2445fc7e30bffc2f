"""How the models of whole training steps are compiled."""

from hyperion.hardware import Device


def compile_options(device: Device) -> dict | None:
    """Options of torch.compile: on an NVIDIA GPU small kernels that do not wait for each other, such as copies of weights in 16
    bits or a norm's count of its batches, become one. In a graph each costs a microsecond more than its work.

    Not on AMD's: there PyTorch 2.9 could store wrong scalars from such a kernel (pytorch/pytorch issue 168937).
    """
    return {"combo_kernels": True} if device.kind == "cuda" else None
