"""How far each precision may be from float64 in the cases, and on which architectures further.

Unit roundoffs are 2^-24 (fp32), 2^-11 (fp16; tf32, whose units may cut off instead of rounding: 2^-10) and 2^-8 (bf16). The
tolerances are four to ten times what a sound machine shows, in which a wrong mask, weight or activation in float32 does not
fit (tested). A ResNet's gradients allow more than a Transformer's: a rounding that moves a unit over the kink of ReLU changes
the gradient by as much as the unit contributes, so that their error falls with the square root of the unit roundoff only.
"""

from hyperion.hardware import Device

QUANTITIES = ("logits", "gradients", "losses")
_TOLERANCES = {
    ("language", "fp32"): (5e-6, 2e-5, 1e-5),
    ("language", "tf32"): (8e-3, 2e-2, 2e-3),
    ("language", "fp16"): (4e-3, 1e-2, 1e-3),
    ("language", "bf16"): (4e-2, 1e-1, 5e-3),
    ("resnet18", "fp32"): (2e-5, 1e-4, 1e-3),
    ("resnet18", "tf32"): (2e-2, 3e-1, 1e-2),
    ("resnet18", "fp16"): (1e-2, 2e-1, 5e-3),
    ("resnet18", "bf16"): (8e-2, 5e-1, 2e-2),
}
# MI200's matrix instructions flush subnormal fp16 and bf16 inputs and outputs to zero, for which MIOpen and rocBLAS make the
# products of a backward pass in fp16 from operands converted to bf16: wider range, bf16's accuracy. MI300 does neither.
# Source: AMD, MIOpen documentation, "MI200 MFMA behavior specifics".
_FLUSHING = ("gfx90a",)
_FLUSHED = 2


def tolerances(case: str, dtype: str, device: Device) -> dict[str, float]:
    """By quantity: the largest relative error that a sound device of this architecture may have."""
    numbers = _TOLERANCES[case, dtype]
    if device.arch in _FLUSHING and dtype in ("fp16", "bf16"):
        # An error of 1 is that of an output of zeros: no tolerance comes near it.
        numbers = [min(0.8, _FLUSHED * number) for number in _TOLERANCES[case, "bf16"]]
    return dict(zip(QUANTITIES, numbers, strict=True))


def note(device: Device) -> str:
    """What to know about this architecture, "" where there is nothing."""
    if device.arch not in _FLUSHING:
        return ""
    return (
        f"{device.arch} flushes subnormal fp16 and bf16 numbers to zero in its matrix units, and products of a backward pass "
        f"in fp16 are made from bf16 operands: both formats may be {_FLUSHED} times as far off as bf16 elsewhere"
    )
