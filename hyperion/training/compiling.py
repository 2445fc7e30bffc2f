"""How the models of whole training steps are compiled."""

from hyperion.hardware import Device


def compile_options(device: Device) -> dict | None:
    """Options of torch.compile: on a GPU small kernels that do not wait for each other, such as copies of weights in 16 bits or
    a norm's count of its batches, become one kernel. Replayed as a graph, each costs a microsecond more than its work."""
    return None if device.kind == "cpu" else {"combo_kernels": True}
