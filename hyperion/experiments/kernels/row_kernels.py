"""Do kernels that read each element once reach the bandwidth of a copy?

Vector addition, softmax, and layer norm forward and backward compute little per byte, so their best possible time is that of
their memory traffic. Each Triton kernel is timed in turn with PyTorch's own kernel and with a copy of the same number of bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.efficiency import expected_stream
from hyperion.chapter.rows import all_samples, bandwidth_limit, out_of_memory_reason, sample_frame, speedup_row, timed_row
from hyperion.experiments.kernels.timed_outputs import time_and_keep
from hyperion.kernels import operations
from hyperion.kernels.availability import why_no_kernels
from hyperion.measure import FORMATS, Verification, error_of_rows, largest_error
from hyperion.results import Row, ratio_estimate

# Layer norm also reads row statistics and parameters, which are negligible compared with the arrays.
OPERATIONS = {"vector_add": 3, "softmax": 2, "layer_norm": 2, "layer_norm_backward": 3}  # arrays that are read or written
TRITON, TORCH, COPY = "triton", "torch", "copy"
_EPS = 1e-5


class RowKernelsOptions(Options):
    """Options for the `row_kernels` experiment.

    Args:
        dtype: number format of the arrays.
        elements: number of elements of an array.
        width: number of elements of a row.
        time_limit_s: seconds of timing for each operation.
    """

    dtype: str
    elements: int
    width: int
    time_limit_s: float


def forecast(context: Context) -> list[Forecast]:
    """Predict that each operation reaches the bandwidth of a stream with the same number of arrays."""
    options = RowKernelsOptions.of(context)
    variants = (TORCH,) if why_no_kernels(context.device) else (TRITON, TORCH)
    forecasts = []
    for operation, arrays in OPERATIONS.items():
        expected = expected_stream(context, "add" if arrays == 3 else "copy", options.dtype, _traffic(options, operation))
        params = _params(options, operation)
        forecasts += [expected.forecast(one, "bandwidth_gb_s", options.dtype, params) for one in variants]
    return forecasts


def run(context: Context, report: Report) -> Result:
    """For each operation, time in turn Triton, PyTorch and a copy of the same number of bytes, and verify the timed outputs."""
    options = RowKernelsOptions.of(context)
    rows, frames = [], []
    for done, operation in enumerate(OPERATIONS):
        report(done, len(OPERATIONS), operation)
        try:
            new_rows, new_frames = _measure(context, options, operation)
        except torch.OutOfMemoryError as error:
            columns: dict = {"dtype": options.dtype, "params": _params(options, operation)}
            reason = out_of_memory_reason(error)
            new_rows = [context.absent_row(name, "bandwidth_gb_s", reason, **columns) for name in (TRITON, TORCH)]
            new_frames = []
        rows += new_rows
        frames += new_frames
    report(len(OPERATIONS), len(OPERATIONS), "done")
    return Result(rows, all_samples(frames))


EXPERIMENT = Experiment(forecast, run, options=RowKernelsOptions, forecast_reads=("bandwidth",))


@dataclass(frozen=True)
class _Work:
    """An operation: its implementations as functions that return their outputs, and its exact outputs in float64."""

    calls: dict[str, Callable[[], tuple[Tensor, ...]]]
    exact: tuple[Tensor, ...]


def _params(options: RowKernelsOptions, operation: str) -> dict:
    return {"operation": operation, "elements": options.elements, "width": options.width, "cache": "cold"}


def _traffic(options: RowKernelsOptions, operation: str) -> int:
    return OPERATIONS[operation] * options.elements * FORMATS[options.dtype].bytes


def _measure(context: Context, options: RowKernelsOptions, operation: str) -> tuple[list[Row], list[pd.DataFrame]]:
    device, params, dtype = context.device, _params(options, operation), options.dtype
    work, traffic_bytes = _work(context, options, operation), _traffic(options, operation)
    rows: list[Row] = []
    if reason := why_no_kernels(device):
        rows.append(context.absent_row(TRITON, "bandwidth_gb_s", reason, dtype=dtype, params=params))
        del work.calls[TRITON]
    tolerance = torch.finfo(FORMATS[dtype].storage).eps / 2 + 1e-5  # rounding of the output, and the float32 sums before it
    # A copy of n float32 numbers moves 8n bytes: 4n are read and 4n are written.
    source = torch.randn(traffic_bytes // 8, device=device.torch_device)
    target = torch.empty_like(source)
    calls = work.calls | {COPY: lambda: (target.copy_(source),)}
    timings, outputs_by_name = time_and_keep(calls, device, options.time_limit_s)
    limit = bandwidth_limit(device, traffic_bytes)
    columns: dict = {"dtype": dtype, "params": params}
    checks: dict[str, Verification] = {}
    for name in work.calls:
        error = largest_error(error_of_rows(*pair, tolerance) for pair in zip(outputs_by_name.pop(name), work.exact, strict=True))
        checks[name] = Verification("float64", error, tolerance)
        timing = timings[name]
        rate = timing.estimate.map(lambda seconds: traffic_bytes / seconds / 1e9)
        rows.append(timed_row(context, name, "bandwidth_gb_s", rate, timing, checks[name], limit, **columns))
        ratio = ratio_estimate(timing.samples_s, timings[COPY].samples_s)
        no_limit = None, "no limit: a ratio of two rates that were timed in turn"
        rows.append(timed_row(context, f"{name} over copy", "rate_ratio", ratio, timing, checks[name], no_limit, **columns))
    if TRITON in timings:
        why = "no limit: two implementations of the same operation"
        check = checks[TRITON].worse(checks[TORCH])
        rows.append(speedup_row(context, "triton over torch", timings[TRITON], timings[TORCH], why, check, **columns))
    frames = [sample_frame(timing, name, dtype, params) for name, timing in timings.items()]
    return rows, frames


def _work(context: Context, options: RowKernelsOptions, operation: str) -> _Work:
    generator = torch.Generator(context.device.torch_device).manual_seed(context.seed)
    dtype, shape = FORMATS[options.dtype].storage, (options.elements // options.width, options.width)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=context.device.torch_device, generator=generator).to(dtype)

    x_MD = random(*shape)
    if operation == "vector_add":
        y_MD = random(*shape)
        calls = {TRITON: lambda: (operations.vector_add(x_MD, y_MD),), TORCH: lambda: (x_MD + y_MD,)}
        return _Work(calls, (x_MD.double() + y_MD.double(),))
    if operation == "softmax":
        calls = {TRITON: lambda: (operations.softmax(x_MD),), TORCH: lambda: (torch.softmax(x_MD, 1),)}
        return _Work(calls, (torch.softmax(x_MD.double(), 1),))
    weight_D, bias_D = random(options.width), random(options.width)
    functions: dict[str, Callable[..., Tensor]] = {
        TRITON: lambda x, w, b: operations.layer_norm(x, w, b, _EPS),
        TORCH: lambda x, w, b: F.layer_norm(x, (options.width,), w, b, _EPS),
    }
    if operation == "layer_norm":
        calls = {name: lambda function=function: (function(x_MD, weight_D, bias_D),) for name, function in functions.items()}
        exact = F.layer_norm(x_MD.double(), (options.width,), weight_D.double(), bias_D.double(), _EPS)
        return _Work(calls, (exact,))
    grad_MD = random(*shape)
    calls = {
        name: _backward(function, x_MD, weight_D, bias_D, grad_MD)
        for name, function in functions.items()
        if name == TORCH or not why_no_kernels(context.device)
    }
    calls.setdefault(TRITON, calls[TORCH])
    return _Work(calls, _backward(functions[TORCH], *(t.double() for t in (x_MD, weight_D, bias_D, grad_MD)))())


def _backward(function: Callable[..., Tensor], x: Tensor, w: Tensor, b: Tensor, grad: Tensor) -> Callable:
    """Return a function that computes the gradients of x, weight and bias. The forward pass runs once, outside this function."""
    leaves = tuple(tensor.detach().requires_grad_() for tensor in (x, w, b))
    output = function(*leaves)
    return lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True)
