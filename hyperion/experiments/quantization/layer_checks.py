"""Checks of quantised layers: bytes of the stored tensors, errors against float64 relative to a bound, and the kernel that ran.

Shape suffixes: N outputs, K inputs, M rows of the input.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.experiments.quantization.quantized_linears import (
    LARGEST_INT8,
    Fp8Linear,
    Int4Linear,
    Int8Linear,
    Scheme,
    unpack_int4,
)
from hyperion.hardware import Device
from hyperion.measure import bytes_of
from hyperion.measure.steps.profiled import profiled

# The relative error of a float32 scale is 2^-24, so a value of 127 steps has an error of 2^-16 half steps.
_SCALE_ROUNDING = 2.0**-15


def stored_tensors(layer: nn.Module) -> list[Tensor]:
    """Return the tensors that a quantised layer stores for its weight: codes, scales, and tables."""
    weight: Any = getattr(layer, "weight", None)
    state: Any = getattr(weight, "quant_state", None)
    if state is not None:
        nested = [state.state2.absmax, state.state2.code, state.offset] if state.nested else []
        return [weight.data, state.absmax, state.code, *nested]
    if hasattr(weight, "SCB"):
        return [weight.data, _row_scales(layer)]
    return [*layer.parameters(), *layer.buffers()]


def weight_bytes_of(layers: Iterable[nn.Module]) -> int:
    """Return the bytes of the stored weights of quantised layers."""
    return sum(bytes_of(stored_tensors(layer)) for layer in layers)


def represented_weight(layer: nn.Module) -> Tensor:
    """Return the weights [N, K] that the stored values of a quantised layer represent, in float64.

    The stored bytes of bitsandbytes are decoded here, without its kernels, so that the result can verify these kernels.
    """
    module: Any = layer
    if isinstance(layer, Int8Linear | Int4Linear | Fp8Linear):
        return layer.weight()
    state: Any = getattr(module.weight, "quant_state", None)
    if state is None:
        return module.weight.data.double() * _row_scales(layer).double()[:, None] / LARGEST_INT8
    absmax = state.absmax
    if state.nested:
        scales = state.state2.absmax.double().repeat_interleave(state.state2.blocksize)[: len(absmax)]
        absmax = state.state2.code.double()[absmax.long()] * scales + state.offset.double()
    codes = (unpack_int4(module.weight.data.view(1, -1)).flatten() + 8).long()
    values = state.code.double()[codes].unflatten(0, (-1, state.blocksize)) * absmax.double()[:, None]
    return values.flatten().view(*state.shape)


def _row_scales(layer: Any) -> Tensor:
    """Return the scales of an LLM.int8() layer. The first call of the layer moves them from its weight to its state."""
    return layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB


def output_bound(
    product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, dx: Tensor, dw: Tensor, roundoff: float
) -> Tensor:
    """Return a bound on the error of each element of y = product(x, weight), where `product` is linear in both arguments.

    The bound is |y' - y| <= |x| dw + dx |w| + dx dw + roundoff (|x| + dx) (|w| + dw), computed in float64.

    Args:
        product: the layer as a function of input and weight, such as `torch.nn.functional.linear`.
        x, weight: input and weight.
        dx, dw: bounds on the errors of the input and of the weight.
        roundoff: bound on the rounding errors of the product, relative to the sum of the magnitudes of its terms.
    """
    x, weight = x.double().abs(), weight.double().abs()
    exact, disturbed = product(x, weight), product(x + dx, weight + dw)
    return disturbed - exact + roundoff * disturbed


def output_error(scheme: Scheme, weight_NK: Tensor, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Compare the output of a quantised layer with that of a float64 layer that has the original weights.

    Args:
        scheme: scheme of the layer.
        weight_NK: the original weights.
        x, y: input and output of the layer.

    Returns:
        (relative Frobenius error, largest ratio of an element's error to its bound).
    """
    x_MK, y_MN = x.flatten(0, -2), y.flatten(0, -2).double()
    exact = F.linear(x_MK.double(), weight_NK.double())
    dx, dw = scheme.input_error(x_MK), scheme.weight_error(weight_NK)
    bound = output_bound(F.linear, x_MK, weight_NK, dx, dw, scheme.roundoff(weight_NK.shape[1], x.dtype))
    return _relative_error(y_MN, exact, bound)


def stored_error(scheme: Scheme, weight_NK: Tensor, layer: nn.Module) -> tuple[float, float]:
    """Compare the stored weights of a quantised layer with the original weights. Return the same values as `output_error`."""
    return _relative_error(represented_weight(layer), weight_NK.double(), scheme.weight_error(weight_NK))


def _relative_error(tested: Tensor, exact: Tensor, bound: Tensor) -> tuple[float, float]:
    """Return the relative Frobenius error, and the largest ratio of an element's error to its bound.

    The ratio is NaN if an error is NaN. It is 0 if error and bound are 0.
    """
    error = (tested - exact).abs()
    ratios = error / (bound * (1 + _SCALE_ROUNDING)).clamp_min(torch.finfo(torch.float64).tiny)
    return (error.norm() / exact.norm()).item(), ratios.max().item()


def what_ran(call: Callable[[], object], device: Device) -> str:
    """Call a function once under the profiler. Return the name of its longest kernel, or on a CPU of its longest operator.

    On a CPU, operators of bitsandbytes take precedence over all others, even if a PyTorch operator takes longer.
    """
    events: list[Any] = list(profiled(call, device).key_averages())
    if device.kind != "cpu":
        return max(events, key=lambda event: event.self_device_time_total).key
    own = [event for event in events if event.key.startswith(("bitsandbytes::", "MatMul8bit", "MatMul4Bit"))]
    return max(own or events, key=lambda event: event.self_cpu_time_total).key
