"""How close does a Triton matrix product come to the speed of the vendor's library?

The Triton kernel and `torch.mm` are timed in turn on the same operands. The settings of the Triton kernel are chosen by timing,
once for each shape. The time that this search takes has its own row.
"""

import time

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result, Table
from hyperion.chapter.efficiency import expected_product
from hyperion.chapter.rows import all_samples, rate_row, sample_frame, speedup_row
from hyperion.experiments.kernels.timed_outputs import time_and_keep
from hyperion.kernels import operations
from hyperion.kernels.availability import why_no_kernels
from hyperion.measure import FORMATS, blas_backend, matmul_precision, verify_product
from hyperion.results import Row

TRITON, TORCH = "triton", "torch.mm"


class ProductShape(Table):
    """Sizes of a matrix product A[m, k] · B[k, n]."""

    m: int
    n: int
    k: int


class MatmulKernelOptions(Options):
    """Options for the `matmul_kernel` experiment.

    Args:
        dtype: number format of the operands.
        shapes: shapes to measure.
        time_limit_s: seconds of timing for each shape.
    """

    dtype: str
    shapes: tuple[ProductShape, ...]
    time_limit_s: float


def forecast(context: Context) -> list[Forecast]:
    """Predict the rate of each shape. The Triton kernel is predicted to reach the rate of the vendor's library."""
    options = MatmulKernelOptions.of(context)
    variants = (TORCH,) if why_no_kernels(context.device) else (TRITON, TORCH)
    return [
        expected_product(context, options.dtype, shape.m, shape.n, shape.k).forecast(
            variant, "gemm_tflops", options.dtype, _params(shape)
        )
        for shape in options.shapes
        for variant in variants
    ]


def run(context: Context, report: Report) -> Result:
    """Time the Triton kernel and torch.mm in turn, and verify the products of the timed calls."""
    options = MatmulKernelOptions.of(context)
    rows, frames = [], []
    for done, shape in enumerate(options.shapes):
        report(done, len(options.shapes), f"{shape.m} x {shape.n} x {shape.k}")
        with matmul_precision(FORMATS[options.dtype]):
            new_rows, new_frames = _measure(context, options, shape)
        rows += new_rows
        frames += new_frames
    report(len(options.shapes), len(options.shapes), "done")
    return Result(rows, all_samples(frames))


EXPERIMENT = Experiment(forecast, run, options=MatmulKernelOptions, forecast_reads=("gemm",))


def _params(shape: ProductShape) -> dict:
    return {"m": shape.m, "n": shape.n, "k": shape.k, "cache": "cold"}


def _measure(context: Context, options: MatmulKernelOptions, shape: ProductShape) -> tuple[list[Row], list[pd.DataFrame]]:
    device, dtype, params = context.device, options.dtype, _params(shape)
    generator = torch.Generator(device.torch_device).manual_seed(context.seed)
    a_MK, b_KN = (
        torch.randn(*sizes, device=device.torch_device, generator=generator).to(FORMATS[dtype].storage)
        for sizes in ((shape.m, shape.k), (shape.k, shape.n))
    )
    calls = {TRITON: lambda: (operations.matmul(a_MK, b_KN),), TORCH: lambda: (torch.mm(a_MK, b_KN),)}
    backends = {TRITON: "Triton", TORCH: blas_backend(device, FORMATS[dtype])}
    rows: list[Row] = []
    if reason := why_no_kernels(device):
        rows.append(context.absent_row(TRITON, "gemm_tflops", reason, dtype=dtype, params=params))
        del calls[TRITON]
    else:
        rows.append(_search_row(context, a_MK, b_KN, dtype, params))
    timings, outputs_by_name = time_and_keep(calls, device, options.time_limit_s)
    tolerance = FORMATS[dtype].gemm_tolerance
    checks = {name: verify_product(a_MK, b_KN, outputs[0], tolerance) for name, outputs in outputs_by_name.items()}
    flops = 2 * shape.m * shape.n * shape.k
    for name, timing in timings.items():
        rate = timing.estimate.map(lambda seconds: flops / seconds / 1e12)
        rows.append(rate_row(context, name, dtype, params, rate, timing, checks[name], backends[name]))
    if TRITON in timings:
        why = "no limit: two implementations of the same product"
        check = checks[TRITON].worse(checks[TORCH])
        identity = {"dtype": dtype, "params": params}
        rows.append(speedup_row(context, "triton over torch.mm", timings[TRITON], timings[TORCH], why, check, **identity))
    return rows, [sample_frame(timing, name, dtype, params) for name, timing in timings.items()]


def _search_row(context: Context, a_MK: torch.Tensor, b_KN: torch.Tensor, dtype: str, params: dict) -> Row:
    """Call the Triton kernel for the first time, which compiles it and times its settings. Return a row with this time."""
    from hyperion.kernels.matmul_triton import run_matmul, tiles_for

    started = time.perf_counter()
    _, chosen = run_matmul(a_MK, b_KN, tiles_for(*operations.architecture_of(a_MK.device)))
    torch.cuda.synchronize(a_MK.device)
    seconds = time.perf_counter() - started
    settings = {"tile": f"{chosen.rows}x{chosen.columns}x{chosen.depth}", "stages": chosen.stages, "band": chosen.group}
    settings |= {"what": "search, and compilation of what Triton's cache on disk did not have"}
    return context.row(TRITON, "compile_time_s", seconds, dtype=dtype, params=params | settings)
