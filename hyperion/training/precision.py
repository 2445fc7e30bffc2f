"""The data type of a training run, chosen with a reason that is printed and stored."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """What matrix products and convolutions compute in; weights, optimizer state and losses are float32 in each case.

    Attributes:
        dtype: 'fp32' or 'bf16'.
        reason: why this one.
    """

    dtype: str
    reason: str

    def autocast(self, device: Device) -> AbstractContextManager:
        """The context in which the forward pass runs."""
        return torch.autocast(
            torch.device(device.torch_device).type, TORCH_DTYPES["bf16"], enabled=self.dtype == "bf16"
        )

    def __str__(self) -> str:
        return f"{self.dtype} ({self.reason})"


def choose_precision(device: Device, requested: str = "auto") -> Precision:
    """The precision to train in on this device.

    Args:
        requested: 'auto', 'fp32' or 'bf16'. 'auto' is bf16 on a GPU with matrix units for it, else fp32.

    Raises:
        HyperionError: another name, or a type that the device does not multiply.
    """
    if requested not in ("auto", *TORCH_DTYPES):
        raise HyperionError(
            f"no training precision is named {requested!r}", where="precision", next_step="choose auto, fp32 or bf16"
        )
    possible, how = device.supports("bf16")
    if requested == "fp32":
        return Precision("fp32", "as requested")
    if requested == "bf16":
        if not possible:
            raise HyperionError(
                f"{device.name} cannot train in bf16: {how}", where="precision", next_step="choose auto or fp32"
            )
        return Precision("bf16", f"as requested; {how}")
    if device.kind == "cpu":
        return Precision("fp32", "the reference precision of a CPU")
    if not possible or how.startswith(("without", "no ")):
        return Precision("fp32", f"bf16 would not be faster: {how}")
    return Precision("bf16", how)
