"""Compare the results of a function in a number format with float64. The tolerance is derived from the function and its inputs.

Rounding to a format with the unit roundoff u changes a number x to x·(1 + δ) with |δ| ≤ u. A stable algorithm returns what exact
arithmetic would return for inputs that are changed by a few u. Therefore the float64 reference is computed again for changed
inputs, and the tolerance follows from the changes of its outputs:

    tolerance of an element = MARGIN · (1 + √n · v/u) · (a + u · (b + c)) + underflow

- a is the largest change of the element when every input is changed at random by up to u. It is large where terms cancel. It also
  covers ties (two equal numbers, which a sort may return in either order) and discontinuities of the function.
- b is the largest element of the exact tensor. Intermediate results are about as large, and they are rounded, too.
- c describes the rounding error of the float64 kernel itself. All inputs are changed by up to 2⁻⁵³, the unit roundoff of float64.
  c is the largest change of an element, divided by 2⁻⁵³. It is large where a kernel computes a small number as the difference
  of two large numbers. In a smaller format, a kernel with the same formula has the same error in units of u.
- √n · v/u accounts for sums. n is the number of elements of the largest tensor, which bounds the number of terms. v is the unit
  roundoff of the accumulator: that of float32 for 16-bit formats. Rounding errors with random signs grow with √n (Higham and
  Mary, A new approach to probabilistic rounding error analysis, 2019).
- MARGIN allows for the roundings of intermediate results.

A gradient is checked in the same way, with the gradient of the output as an additional input.

False alarms: with 15 seeds on a CPU, there was none in 42,795 comparisons of the operators and layers in `operator_checks` that
have no known gap. Missed errors: the check does not detect errors below about 30 u times the largest element of a tensor. In
float32, this limit is √n times larger. The check detects TF32 in place of float32, and sums that are accumulated in 16 bits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

MARGIN = 8.0
# A gradient below this share of the gradient of the output is 0 or nearly 0 in exact arithmetic, because large terms cancel. An
# example is the gradient of the layer norm of a single number. No tolerance can be derived for such a gradient, so the check only
# requires that it is finite.
_VANISHING = 1e-5
_FLOAT64_UNIT = 2.0**-53
_FLOAT32_UNIT = 2.0**-24


@dataclass(frozen=True)
class Case:
    """A function call whose results are compared with float64.

    Args:
        function: the function, which returns a tensor or a structure of tensors.
        args, kwargs: its arguments. Tensors that require a gradient are the inputs of the backward pass.
        in_storage: if True, sums are accumulated in the dtype of the tensors instead of float32. This is the case where several
            threads of a GPU add to the same element in memory.
    """

    function: Callable
    args: tuple
    kwargs: dict
    in_storage: bool = False


Derivatives = tuple[list[Tensor], list[Tensor], list[Tensor]]


def forward_backward(function: Callable, leaves: list, structure: Any, cotangents: list[Tensor] | None, seed: int) -> Derivatives:
    """Call a function and differentiate its outputs. Return (outputs, gradients of the inputs, gradients of the outputs).

    Args:
        function: the function.
        leaves, structure: its arguments, as returned by `tree_flatten((args, kwargs))`.
        cotangents: gradients of the outputs, one for each differentiable output. If None, they are random numbers. If their
            shapes differ from those of the outputs, no gradients of the inputs are computed.
        seed: seed of the random gradients of the outputs.
    """
    args, kwargs = tree_unflatten(leaves, structure)
    tensors = [one for one in tree_flatten(function(*args, **kwargs))[0] if isinstance(one, Tensor)]
    outputs = [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in tensors]
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    differentiable = [output for output in outputs if output.requires_grad]
    if not inputs or not differentiable:
        return [one.detach() for one in outputs], [], []
    if cotangents is None:
        generator = torch.Generator().manual_seed(seed)
        cotangents = [torch.randn(one.shape, generator=generator).to(one.device, one.dtype) for one in differentiable]
    if [one.shape for one in cotangents] != [one.shape for one in differentiable]:
        return [one.detach() for one in outputs], [], []
    found = torch.autograd.grad(differentiable, inputs, cotangents, allow_unused=True)
    gradients = [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, inputs, strict=True)]
    return [one.detach() for one in outputs], gradients, cotangents


def errors_over_tolerance(
    case: Case, dtype: torch.dtype, seed: int, probes: int, compute: Callable[..., Derivatives] = forward_backward
) -> dict[str, float]:
    """Return the largest ratio of an element's error to its tolerance, for the outputs and for the gradients of a call.

    The reference is computed in float64 on the CPU from the same values. Integers and booleans must be equal to those of the
    reference, or to those of a reference with changed inputs. Exact values beyond the largest number of the format are not
    compared. If an output has such a value, no gradients are compared.

    Args:
        case: the call, with tensors of `dtype` on the device to be tested.
        dtype: number format that is tested.
        seed: seed of the gradients of the outputs and of the random changes of the inputs.
        probes: number of references with changed inputs. This number is computed twice: for changes of up to u, and for changes
            of up to 2⁻⁵³.
        compute: function that computes the tested result. It takes the arguments of `forward_backward`.

    Returns:
        {"forward": ratio, "backward": ratio}, without "backward" if no gradients are compared. A ratio of at most 1 passes. It is
        infinite for outputs of another shape.
    """
    leaves, structure = tree_flatten((case.args, case.kwargs))
    outputs, gradients, cotangents = compute(case.function, leaves, structure, None, seed)
    unit = torch.finfo(dtype).eps / 2
    generator = torch.Generator().manual_seed(seed)

    def reference(change: float) -> tuple[list[Tensor], list[Tensor]]:
        changed = [_in_float64(leaf, change, generator) for leaf in leaves]
        given = [_in_float64(one, change, generator) for one in cotangents]
        return forward_backward(case.function, changed, structure, given, seed)[:2]

    exact = reference(0.0)
    if [one.shape for one in outputs] != [one.shape for one in exact[0]]:
        return {"forward": math.inf}
    rounded, noisy = ([reference(change) for _ in range(probes)] for change in (unit, _FLOAT64_UNIT))
    sizes = [one.numel() for one in (*leaves, *outputs) if isinstance(one, Tensor)]
    accumulator = unit if case.in_storage else min(unit, _FLOAT32_UNIT)
    factor = MARGIN * (1 + math.sqrt(max(sizes, default=1)) * accumulator / unit)
    given = max((one.abs().max().item() for one in cotangents if one.numel()), default=0.0)
    # If an output is beyond the range of the format, its gradient cannot be compared.
    largest = torch.finfo(dtype).max
    overflows = any(_largest(one) > largest for one in exact[0] if one.is_floating_point())
    ratios = {}
    for which, (name, tested) in enumerate({"forward": outputs, "backward": gradients}.items()):
        if which and (not tested or overflows):
            continue
        columns = (zip(*(probe[which] for probe in probes_of), strict=True) for probes_of in (rounded, noisy))
        lines = zip(tested, exact[which], *columns, strict=True)
        vanishing = _VANISHING * given if which else 0.0
        ratios[name] = max((_worst(*line, unit=unit, factor=factor, vanishing=vanishing) for line in lines), default=0.0)
    return ratios


def gradient_error(case: Case, seed: int, compute: Callable[..., Derivatives] = forward_backward) -> float:
    """Return the relative Frobenius error of all gradients of a call against float64.

    Elements that are not finite count as zeros, so the error is 1 if no gradient is computed. Arguments are those of
    `errors_over_tolerance`.
    """
    leaves, structure = tree_flatten((case.args, case.kwargs))
    _, gradients, cotangents = compute(case.function, leaves, structure, None, seed)
    generator = torch.Generator()
    exact_leaves, given = ([_in_float64(one, 0.0, generator) for one in ones] for ones in (leaves, cotangents))
    exact = forward_backward(case.function, exact_leaves, structure, given, seed)[1]
    pairs = [(_finite(tested.cpu().double()), _finite(wanted)) for tested, wanted in zip(gradients, exact, strict=True)]
    size = math.hypot(*(wanted.norm().item() for _, wanted in pairs))
    return math.hypot(*((tested - wanted).norm().item() for tested, wanted in pairs)) / size if size else 0.0


def _finite(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isfinite(), tensor, 0.0)


def _in_float64(leaf: Any, change: float, generator: torch.Generator) -> Any:
    """Return the argument of the float64 reference that corresponds to `leaf`.

    Floating-point tensors are converted to float64 on the CPU and multiplied by random factors from 1 - `change` to 1 + `change`.
    """
    if isinstance(leaf, torch.dtype):
        return torch.float64 if leaf.is_floating_point else leaf
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    if not isinstance(leaf, Tensor):
        return leaf
    tensor = leaf.detach().cpu()
    if tensor.is_floating_point():
        tensor = tensor.double()
        if change:
            tensor = tensor * (1 + change * (2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 1))
    return tensor.requires_grad_(leaf.requires_grad)


def _worst(
    tested: Tensor,
    exact: Tensor,
    rounded: Sequence[Tensor],
    noisy: Sequence[Tensor],
    *,
    unit: float,
    factor: float,
    vanishing: float,
) -> float:
    """Return the largest ratio of an element's error to its tolerance, or infinity if an expected finite value is missing."""
    tested = tested.detach().cpu()
    if not tested.numel():
        return 0.0
    if not exact.is_floating_point():
        unequal = torch.stack([tested != one for one in (exact, *rounded)]).all(0)
        return math.inf if unequal.any() else 0.0
    result, info = tested.double(), torch.finfo(tested.dtype)
    if _largest(exact) < vanishing and exact.isfinite().all():
        return 0.0 if result.isfinite().all() else math.inf
    change = torch.stack([(one - exact).abs() for one in rounded]).amax(0)
    # If a changed input leaves the domain of the function, the result is NaN. Its change is then no bound on the error, so accept
    # any finite result.
    change = torch.where(change.isnan() & ~exact.isnan(), math.inf, change)
    noise = _largest(torch.stack([one - exact for one in noisy])) / _FLOAT64_UNIT
    size = min(_largest(exact), info.max)
    # Numbers below the smallest normal number lose digits. Devices may even replace them by 0, except in fp16.
    underflow = info.smallest_normal * (info.eps if tested.dtype == torch.float16 else 1.0)
    tolerance = factor * (change + unit * (size + noise)) + underflow
    beyond = (exact.abs() > info.max) & ~result.isfinite()
    same = (result == exact) | (result.isnan() & exact.isnan()) | beyond
    ratio = torch.where(same, 0.0, (result - exact).abs() / tolerance)
    return torch.where(ratio.isnan(), math.inf, ratio).max().item()


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value of the finite elements, or 0 if there are none."""
    finite = tensor[tensor.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0
