"""How fast is attention, forward and backward, with Triton kernels and with each PyTorch backend?

All implementations get the same tensors and are timed in turn. The outputs and the gradients of the timed calls are compared with
float64, and the profiler confirms which implementation ran in each pass.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result, Table
from hyperion.chapter.rows import all_samples, gemm_limit, out_of_memory_reason, sample_frame, speedup_row, timed_row
from hyperion.experiments.kernels.attention_implementations import (
    IMPLEMENTATIONS,
    TRITON,
    RefusedError,
    attend,
    make_inputs,
    what_ran,
    why_absent,
)
from hyperion.experiments.kernels.timed_outputs import Outputs, time_and_keep
from hyperion.kernels.attention_float64 import ExactAttention, attention_tolerance, exact_attention
from hyperion.kernels.operations import attention_flops
from hyperion.measure import FORMATS, Timing, Verification, largest_error, matmul_precision
from hyperion.results import Row

METRIC, PASSES = "attention_tflops", ("forward", "backward")
# A backward pass without atomic additions computes seven matrix products. The FLOP formula counts only five.
_RECOMPUTED = 7 / 5
# Exponentials per clock cycle. The special function units of an NVIDIA SM and the quarter-rate unit of an AMD CU compute 16.
# Source: CUDA C++ Programming Guide, throughput of native arithmetic instructions; AMD CDNA 2 ISA, transcendental instructions.
_EXPONENTIALS = 16


class AttentionShape(Table):
    """Shape of an attention computation.

    Args:
        batch: number of sequences.
        heads: number of query heads.
        key_heads: number of key-value heads.
        length: sequence length.
        features: number of features of a head.
        causal: if True, a position attends only to itself and to earlier positions.
        without: implementations that are skipped, for example because the matrix of scores would not fit into memory.
    """

    batch: int
    heads: int
    key_heads: int
    length: int
    features: int
    causal: bool = True
    without: tuple[str, ...] = ()

    @property
    def params(self) -> dict:
        """The shape as params for a row."""
        return self.model_dump(exclude={"without"})

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """The argument `sizes` of `make_inputs`."""
        return self.batch, self.heads, self.key_heads, self.length, self.features

    def flops(self) -> dict[str, float]:
        """Return the FLOPs of the forward and the backward pass."""
        return attention_flops(self.batch, self.heads, self.length, self.features, self.causal)


class AttentionSpeedOptions(Options):
    """Options for the `attention_speed` experiment.

    Args:
        dtype: number format of all tensors.
        shapes: shapes to measure.
        time_limit_s: seconds of timing per implementation, for each pass of each shape.
    """

    dtype: str
    shapes: tuple[AttentionShape, ...]
    time_limit_s: float


def forecast(context: Context) -> list[Forecast]:
    """Predict the rates of the Triton kernels from the measured rate of matrix products and the peak rate of exponentials.

    The prediction adds both times, as if matrix units and exponential units never worked at the same time. Where the Triton
    kernels cannot run, it is made for a PyTorch backend.
    """
    options = AttentionSpeedOptions.of(context)
    name = IMPLEMENTATIONS[1] if why_absent(TRITON, context.device) else TRITON
    name = "flash" if context.device.kind == "cpu" else name
    return [_forecast(context, options.dtype, name, shape, one) for shape in options.shapes for one in PASSES]


def _forecast(context: Context, dtype: str, name: str, shape: AttentionShape, which: str) -> Forecast:
    params = shape.params | {"pass": which, "cache": "cold"}
    device, gemm = context.device, context.best_gemm(dtype)
    ceiling, source = gemm_limit(device, dtype)
    if device.kind == "cpu" or gemm is None or not gemm.value or not device.max_clock_mhz or not device.compute_units:
        return Forecast(
            name, METRIC, None, f"no estimate: no measured products or no clock; {source}", dtype, params, ceiling=ceiling
        )
    flops, times = shape.flops()[which], 1.0 if which == "forward" else _RECOMPUTED
    # The forward pass has 4 FLOPs per feature for each query-key pair: two products with one multiply-add each.
    pairs = shape.flops()["forward"] / (4 * shape.features)
    exponentials_s = (
        pairs * (1 if which == "forward" else 2) / (device.compute_units * _EXPONENTIALS * device.max_clock_mhz * 1e6)
    )
    products_s = times * flops / (gemm.value * 1e12)
    basis = (
        f"{products_s * 1e3:.3g} ms of products at the measured {gemm.value:.4g} TFLOPS, plus {exponentials_s * 1e3:.3g} ms of "
        f"exponentials at {_EXPONENTIALS} per cycle of {device.compute_units} units"
    )
    return Forecast(name, METRIC, flops / (products_s + exponentials_s) / 1e12, basis, dtype, params, ceiling=ceiling)


def run(context: Context, report: Report) -> Result:
    """Time and verify every implementation for every shape. If an implementation cannot run, its row contains the reason."""
    options = AttentionSpeedOptions.of(context)
    rows, frames = [], []
    for done, shape in enumerate(options.shapes):
        report(done, len(options.shapes), f"{shape.length} positions, {shape.features} features")
        with matmul_precision(FORMATS[options.dtype]):
            new_rows, new_frames = _measure(context, options, shape)
        rows += new_rows
        frames += new_frames
    report(len(options.shapes), len(options.shapes), "done")
    return Result(rows, all_samples(frames))


EXPERIMENT = Experiment(forecast, run, options=AttentionSpeedOptions, forecast_reads=("gemm",))


@dataclass(frozen=True)
class _Contender:
    """An implementation that can run.

    Args:
        calls: function that runs the pass, by name of the pass.
        seen: implementation and longest kernel that the profiler recorded, by name of the pass.
    """

    calls: dict[str, Callable[[], Outputs]]
    seen: dict[str, tuple[str, str]]


def _measure(context: Context, options: AttentionSpeedOptions, shape: AttentionShape) -> tuple[list[Row], list[pd.DataFrame]]:
    dtype, device = options.dtype, context.device
    tensors = make_inputs(device, FORMATS[dtype].storage, shape.sizes, context.seed)
    # Computed in float64 only once, because all implementations share the same tensors.
    exact = _exact(tensors, shape.causal)
    contenders: dict[str, _Contender] = {}
    rows: list[Row] = []
    for name in IMPLEMENTATIONS:
        reason = why_absent(name, device) or (
            "left out: the profile leaves it out at this length" if name in shape.without else ""
        )
        try:
            if not reason:
                contenders[name] = _contender(context, name, tensors, shape.causal)
                continue
        except RefusedError as error:
            reason = f"refused: {error}"
        except torch.OutOfMemoryError as error:
            reason = out_of_memory_reason(error)
        for which in PASSES:
            params = shape.params | {"pass": which, "cache": "cold"}
            rows.append(context.absent_row(name, METRIC, reason, dtype=dtype, params=params))
    frames: list[pd.DataFrame] = []
    for which in PASSES:
        params = shape.params | {"pass": which, "cache": "cold"}
        calls = {name: one.calls[which] for name, one in contenders.items()}
        # Verify the outputs of timed calls, so that a call that skips work during the timing fails the check.
        timings, outputs_by_name = time_and_keep(calls, device, options.time_limit_s * len(calls))
        checks = {name: _verification(outputs, exact, dtype, which) for name, outputs in outputs_by_name.items()}
        for name, timing in timings.items():
            seen = dict(zip(("ran", "kernel"), contenders[name].seen[which], strict=True))
            rows.append(_rate_row(context, name, timing, checks[name], dtype, params | seen, shape.flops()[which]))
            frames.append(sample_frame(timing, name, dtype, params))
        rows += _speedups(context, timings, checks, dtype, params)
    return rows, frames


def _rate_row(context: Context, name: str, timing: Timing, check: Verification, dtype: str, params: dict, flops: float) -> Row:
    rate = timing.estimate.map(lambda seconds: flops / seconds / 1e12)
    limit = gemm_limit(context.device, dtype)
    return timed_row(context, name, METRIC, rate, timing, check, limit, dtype=dtype, params=params)


def _verification(outputs: Outputs, exact: dict[tuple[int, int], ExactAttention], dtype: str, which: str) -> Verification:
    """Compare the output or the gradients of one timed call with float64, for the sequences and heads in `exact`.

    All elements must be finite. The outputs were filled with NaN before the call, so that an element that it does not write is
    found.
    """
    name = "float64, first and last head of keys; all finite"
    tolerance = attention_tolerance(FORMATS[dtype].storage, which == "backward")
    if not all(bool(output.isfinite().all()) for output in outputs):
        return Verification(name, math.nan, tolerance)
    errors = []
    for (sequence, head), one in exact.items():
        # Grouped-query attention: `group` consecutive query heads share one key-value head.
        group = len(one.output)
        queries = slice(head * group, (head + 1) * group)
        if which == "forward":
            errors.append(one.output_error(outputs[0][sequence, queries], tolerance))
        else:
            of_q, of_k, of_v = (gradient[sequence] for gradient in outputs)
            errors.append(one.gradient_error(of_q[queries], of_k[head], of_v[head], tolerance))
    return Verification(name, largest_error(errors), tolerance)


def _speedups(
    context: Context, timings: dict[str, Timing], checks: dict[str, Verification], dtype: str, params: dict
) -> list[Row]:
    """Return the speed-up of the Triton kernels over each of the other implementations."""
    if TRITON not in timings:
        return []
    why, columns = "no limit: two implementations of attention", {"dtype": dtype, "params": params}
    rows = []
    for name, timing in timings.items():
        if name != TRITON:
            check = checks[TRITON].worse(checks[name])
            rows.append(speedup_row(context, f"triton over {name}", timings[TRITON], timing, why, check, **columns))
    return rows


def _contender(context: Context, name: str, tensors: tuple[Tensor, ...], causal: bool) -> _Contender:
    """Run an implementation once, forward and backward, and return its functions for timing."""
    q, k, v, grad = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    # The backward pass is timed alone: the forward pass runs once, and `retain_graph` keeps its saved tensors for repeated
    # backward passes.
    output = attend(name, *leaves, causal=causal)
    calls: dict[str, Callable[[], Outputs]] = {
        "forward": lambda: (attend(name, q, k, v, causal),),
        "backward": lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True),
    }
    try:
        calls["backward"]()
    # These errors are subclasses of RuntimeError, but they do not mean that the backend refused the call. So they are not
    # converted to RefusedError below.
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:  # some backends accept the forward pass and refuse the backward pass
        if name == TRITON:
            raise
        raise RefusedError(f"in the backward pass: {str(error).splitlines()[0]}") from error
    return _Contender(calls, {which: what_ran(call, context.device) for which, call in calls.items()})


def _exact(tensors: tuple[Tensor, ...], causal: bool) -> dict[tuple[int, int], ExactAttention]:
    """Return the float64 results for the first head of the first sequence and the last head of the last one.

    The keys are (sequence, key-value head).
    """
    sequences, heads = tensors[1].shape[:2]
    group = tensors[0].shape[1] // heads
    results = {}
    # Two heads limit the cost of the float64 reference.
    for sequence, head in {(0, 0), (sequences - 1, heads - 1)}:
        q, k, v, grad = (tensor[sequence] for tensor in tensors)
        own = slice(head * group, (head + 1) * group)
        results[sequence, head] = exact_attention(q[own], k[head], v[head], grad[own], causal)
    return results
