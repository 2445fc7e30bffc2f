"""How fast does this machine multiply square matrices at each size and in each number format, and how close is it to the peak?"""

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.efficiency import expected_product
from hyperion.chapter.rows import (
    absent_product,
    all_samples,
    out_of_memory_reason,
    rate_row,
    sample_frame,
    speedup_row,
    unused_tf32,
)
from hyperion.measure import Gemm, Timing, Verification, format_of
from hyperion.measure.clock.timing import MINIMUM_SAMPLES
from hyperion.results import Row

VARIANT = "torch.mm"


class GemmOptions(Options):
    """Options for the `gemm` experiment.

    Args:
        dtypes: number formats. Each is a name in `hyperion.measure.FORMATS`, or "fp8".
        sizes: values of M = N = K of the matrix products.
        time_limit_s: timing budget in seconds for each matrix product and cache state (cold, warm).
        cross_check_dtype: number format in which this library's timing is compared with a plain timing loop.
        cross_check_calls: number of calls in each timing of the plain loop.
        samples: minimum number of samples of each matrix product. More are taken while the timing budget lasts.
        span_s: minimum duration of the sampling of each matrix product and cache state, in seconds. It is long enough for the
            power control of a GPU to settle, so that a repeated measurement gives the same rate.
    """

    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    time_limit_s: float
    cross_check_dtype: str
    cross_check_calls: int
    samples: int = MINIMUM_SAMPLES
    span_s: float = 0.0


def forecast(context: Context) -> list[Forecast]:
    """Predict the rate of each matrix product from the data sheet and a reference machine's efficiency at this size."""
    options = GemmOptions.of(context)
    dtypes = [dtype for dtype in options.dtypes if context.device.supports(dtype)[0]]
    return [_forecast(context, dtype, size) for size in sorted(options.sizes, reverse=True) for dtype in dtypes]


def run(context: Context, report: Report) -> Result:
    """Time and verify the matrix product of each dtype and size, with cold and with warm caches.

    Then compare this library's timing with a plain timing loop.
    """
    options = GemmOptions.of(context)
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    cells = [(dtype, size) for dtype in options.dtypes for size in options.sizes]
    for done, (dtype, size) in enumerate(cells):
        report(done, len(cells), f"{dtype} {size}")
        cell_rows, cell_frames = _measure_cell(context, options, dtype, size)
        rows += cell_rows
        frames += cell_frames
    cross_rows, cross_frames = _cross_check(context, options, report)
    report(len(cells), len(cells), "done")
    return Result(rows + cross_rows, all_samples(frames + cross_frames))


EXPERIMENT = Experiment(forecast, run, options=GemmOptions)


def _forecast(context: Context, dtype: str, size: int) -> Forecast:
    name = format_of(dtype, context.device).name
    return expected_product(context, dtype, size, size, size).forecast(VARIANT, "gemm_tflops", name, _params(size))


def _params(size: int, cache: str = "cold") -> dict:
    return {"m": size, "n": size, "k": size, "cache": cache}


def _measure_cell(context: Context, options: GemmOptions, dtype: str, size: int) -> tuple[list[Row], list[pd.DataFrame]]:
    """Time one size of matrix product in one format, with cold and with warm caches.

    If the product cannot be measured, return one row with the reason.
    """
    supported, how = context.device.supports(dtype)
    if not supported:
        return [_absent(context, dtype, size, f"unsupported: {how}")], []
    rows, frames = [], []
    sampling: dict = {"minimum_samples": options.samples, "minimum_span_s": options.span_s, "time_limit_s": options.time_limit_s}
    try:
        product = Gemm(size, size, size, dtype, context.device, seed=context.seed)
        for cache in ("cold", "hot"):
            timing, verification = product.measure(cold=cache == "cold", **sampling)
            name = product.format.name
            if unused := unused_tf32(name, verification.error):
                return [_absent(context, dtype, size, unused)], []
            rows.append(_rate_row(context, product.function, product, _params(size, cache), timing, verification))
            frames.append(sample_frame(timing, product.function, name, _params(size, cache)))
    except torch.OutOfMemoryError as error:
        return [_absent(context, dtype, size, out_of_memory_reason(error))], []
    return rows, frames


def _rate_row(context: Context, variant: str, product: Gemm, params: dict, timing: Timing, verification: Verification) -> Row:
    rate = timing.estimate.map(lambda seconds: product.flops / seconds / 1e12)
    return rate_row(context, variant, product.format.name, params, rate, timing, verification, product.backend)


def _absent(context: Context, dtype: str, size: int, reason: str) -> Row:
    return absent_product(context, VARIANT, dtype, _params(size), reason)


def _cross_check(context: Context, options: GemmOptions, report: Report) -> tuple[list[Row], list[pd.DataFrame]]:
    """Time every size of one dtype with this library and in a plain loop of PyTorch calls. Return the ratios of the two rates.

    The two methods are timed in alternation.
    """
    dtype, calls = options.cross_check_dtype, options.cross_check_calls
    rows, frames = [], []
    for done, size in enumerate(options.sizes):
        report(done, len(options.sizes), f"cross-check {dtype} {size}")
        product = Gemm(size, size, size, dtype, context.device, seed=context.seed + 1)
        harness, plain = product.compare_with_plain_loop(calls)
        params = _params(size, "hot") | {"plain_loop_calls": calls}
        why = "no limit: the device's events and the host's clock on the same product"
        rows.append(speedup_row(context, "harness over plain loop", harness, plain, why, dtype=dtype, params=params))
        verification = product.verify()
        for name, timing in (("harness", harness), ("plain loop", plain)):
            rows.append(_rate_row(context, name, product, params, timing, verification))
            frames.append(sample_frame(timing, name, dtype, params))
    return rows, frames
