"""The ways in which chapter 1.2 does the same training step: number format, layout of images, and compiled or eager."""

from collections.abc import Iterator
from dataclasses import dataclass

from hyperion.hardware import Device
from hyperion.models import ReferenceModel, reference_model
from hyperion.models.reference import ResNet50
from hyperion.workloads.workloads import SIXTEEN_BIT

EAGER, COMPILED = "eager", "compiled"
CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels_last"
_ONE_LAYOUT = "no variant: it works on sequences, which have no channels to put last; only a network of convolutions has"
_LEFT_OUT = "left out by this profile, for time"
_TWO_SWITCHES = (
    "left out: Inductor on a GPU reads PyTorch's older switch of TF32, and refuses a process that is kept to fp32 by the newer"
)


@dataclass(frozen=True)
class StepVariant:
    """One way to do the step.

    Args:
        dtype: fp32, tf32, bf16 or fp16: see `hyperion.training.Precision`.
        channels_last: images and kernels lie with their channels last; else PyTorch's default, row after row.
        compiled: forward and backward of each block of the model are compiled by Inductor.
    """

    dtype: str
    channels_last: bool = False
    compiled: bool = False

    @property
    def params(self) -> dict:
        """What tells its rows from those of the other variants in the same dtype."""
        layout = CHANNELS_LAST if self.channels_last else CONTIGUOUS
        return {"layout": layout, "mode": COMPILED if self.compiled else EAGER}

    def __str__(self) -> str:
        words = [self.dtype, CHANNELS_LAST if self.channels_last else "", COMPILED if self.compiled else ""]
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Cell:
    """A variant of a model, and why it is not measured here ("" where it is)."""

    model: ReferenceModel
    variant: StepVariant
    absent: str


def has_layout(model: ReferenceModel) -> bool:
    """Whether the model is one of convolutions, whose images may lie channels-last. A Vision Transformer works on sequences
    after its one convolution of patches."""
    return isinstance(model, ResNet50)


def cells_of(sizes: dict, device: Device) -> Iterator[Cell]:
    """Every variant of every model of a profile, in its order.

    Args:
        sizes: `models`, names; `variants`, tables of dtype and, where they differ from False, channels_last and compiled. A
            compiled variant asks for channels-last of those models alone that have it. `models` in it names those that it
            is measured of, where the profile leaves out others.
    """
    for name in sizes["models"]:
        model = reference_model(name)
        for asked in sizes["variants"]:
            last, compiled = asked.get("channels_last", False), asked.get("compiled", False)
            variant = StepVariant(asked["dtype"], last and (has_layout(model) or not compiled), compiled)
            reason = _LEFT_OUT if name not in asked.get("models", [name]) else _why_not(model, variant, device)
            yield Cell(model, variant, reason)


def _why_not(model: ReferenceModel, variant: StepVariant, device: Device) -> str:
    supported, how = device.supports(variant.dtype)
    if not supported:
        return f"unsupported: {how}"
    if how.startswith("emulated"):
        return f"not timed, because it says nothing of the format: {how}"
    if variant.channels_last and not has_layout(model):
        return _ONE_LAYOUT
    # Which it reads while it looks for the kernels of a convolution: PyTorch 2.11 and 2.13.
    return _TWO_SWITCHES if variant.compiled and device.kind != "cpu" and variant.dtype not in SIXTEEN_BIT else ""
