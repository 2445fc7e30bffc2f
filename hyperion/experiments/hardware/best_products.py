"""What is the highest rate of each number format over all shapes of a product, and which rate do given shapes reach?

A search finds the fastest product of each format: the maximum achievable rate (MAF), which is what remains of the data
sheet's peak when only the shape is chosen well. Given shapes, such as those of a Transformer layer, are compared with it.
"""

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result, Table
from hyperion.chapter.rows import (
    absent_product,
    all_samples,
    out_of_memory_reason,
    product_row,
    roofline_tflops,
    sample_frame,
    speedup_row,
)
from hyperion.measure import Finalist, Gemm, GemmSearch, RefusedProduct, format_of, search_gemm
from hyperion.measure.clock.timing import compare_with_plain_loop
from hyperion.measure.clock.verify import matmul_precision
from hyperion.results import Row

FINALIST, FASTEST, GIVEN, PLAIN_LOOP = "finalist", "fastest found", "given shape", "fastest over a plain loop"
_TAKEN = {"cache": "cold", "data": "normal"}  # how the products of the search and the given shapes are timed


class Shape(Table):
    """A product's shape.

    Args:
        name: what it is the shape of.
        m, n, k: sizes of A[m, k] and B[k, n].
    """

    name: str
    m: int
    n: int
    k: int


class BestProductsOptions(Options):
    """Options of `best_products`.

    Args:
        dtypes: number formats to search.
        largest: largest M, N and K of the search.
        step: distance of the search's grid in M, N and K.
        search_limit_s: seconds of searching for each format.
        exhaustive: see every shape of the grid, instead of refining a coarse one.
        time_limit_s: seconds of timing for each given shape.
        plain_loop: formats whose fastest product is compared with PyTorch's own call in a plain loop.
        plain_loop_calls: calls in one timed block of that loop.
        shapes: the given shapes.
    """

    dtypes: tuple[str, ...]
    largest: int
    step: int
    search_limit_s: float
    exhaustive: bool
    time_limit_s: float
    plain_loop: tuple[str, ...]
    plain_loop_calls: int
    shapes: tuple[Shape, ...]


def forecast(context: Context) -> list[Forecast]:
    """Predict the roofline's rate: of the largest square for the search, and of each given shape."""
    options = BestProductsOptions.of(context)
    formats = [dtype for dtype in options.dtypes if context.device.supports(dtype)[0]]
    square = options.largest, options.largest, options.largest
    found = [_forecast(context, FASTEST, dtype, square, _TAKEN) for dtype in formats]
    return found + [
        _forecast(context, GIVEN, dtype, (shape.m, shape.n, shape.k), _given_params(shape))
        for dtype in formats
        for shape in options.shapes
    ]


def run(context: Context, report: Report) -> Result:
    """Search each format, time its finalists interleaved, then the given shapes."""
    options = BestProductsOptions.of(context)
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    for done, dtype in enumerate(options.dtypes):
        report(done, len(options.dtypes), f"fastest product in {dtype}")
        new_rows, new_frames = _measure_format(context, options, dtype)
        rows += new_rows
        frames += new_frames
    report(len(options.dtypes), len(options.dtypes), "done")
    return Result(rows, all_samples(frames))


EXPERIMENT = Experiment(forecast, run, options=BestProductsOptions)


def _forecast(context: Context, variant: str, dtype: str, shape: tuple[int, int, int], params: dict) -> Forecast:
    estimate, basis = roofline_tflops(context.device, dtype, *shape)
    if variant == FASTEST and estimate is not None:
        basis += f", of a square of {shape[0]}: the search may take any shape up to it"
    name = format_of(dtype, context.device).name
    return Forecast(variant, "gemm_tflops", estimate, basis, dtype=name, params=params)


def _measure_format(context: Context, options: BestProductsOptions, dtype: str) -> tuple[list[Row], list[pd.DataFrame]]:
    """Return all rows of one format, or one row with the reason why there are none."""
    supported, how = context.device.supports(dtype)
    if not supported:
        return [absent_product(context, FASTEST, dtype, _TAKEN, f"unsupported: {how}")], []
    try:
        search = search_gemm(
            dtype,
            context.device,
            time_limit_s=options.search_limit_s,
            largest=options.largest,
            step=options.step,
            seed=context.seed,
            data=_TAKEN["data"],
            exhaustive=options.exhaustive,
        )
        rows, frames = _search_rows(context, search)
        if dtype in options.plain_loop:
            row, frame = _compared_with_plain_loop(context, options, dtype, search.best.shape)
            rows, frames = [*rows, row], [*frames, frame]
    except (torch.OutOfMemoryError, RefusedProduct) as error:
        name = format_of(dtype, context.device).name
        rows, frames = [absent_product(context, FASTEST, name, _TAKEN, _refusal(error))], []
    for shape in options.shapes:
        new_rows, new_frames = _measure_given(context, options, dtype, shape)
        rows += new_rows
        frames += new_frames
    return rows, frames


def _search_rows(context: Context, search: GemmSearch) -> tuple[list[Row], list[pd.DataFrame]]:
    """Return a row of the fastest product with the extent of the search, then a row of each finalist."""
    extent = {"seen": search.seen, "shapes": search.shapes, "stopped": search.stopped}
    rows = [_finalist_row(context, search, FASTEST, search.best, _shape_params(search.best.shape) | extent)]
    frames = []
    for finalist in search.finalists:
        params = _shape_params(finalist.shape)
        rows.append(_finalist_row(context, search, FINALIST, finalist, params))
        frames.append(sample_frame(finalist.timing, FINALIST, search.dtype, params))
    return rows, frames


def _finalist_row(context: Context, search: GemmSearch, variant: str, finalist: Finalist, params: dict) -> Row:
    measured = finalist.tflops, finalist.timing, finalist.verification
    return product_row(context, variant, search.dtype, params, *measured, search.backend)


def _shape_params(shape: tuple[int, int, int]) -> dict:
    return dict(zip("mnk", shape, strict=True)) | _TAKEN


def _compared_with_plain_loop(
    context: Context, options: BestProductsOptions, dtype: str, shape: tuple[int, int, int]
) -> tuple[Row, pd.DataFrame]:
    """Time the fastest product and PyTorch's own call in a plain loop, interleaved; each has its own operands."""
    ours, theirs = (Gemm(*shape, dtype, context.device, seed=context.seed + seed) for seed in (1, 2))
    calls = options.plain_loop_calls
    with matmul_precision(ours.format):
        own, plain = compare_with_plain_loop(ours, context.device, calls, plain=theirs.plain_call())
    name, params = ours.format.name, _shape_params(shape) | {"cache": "hot", "calls": calls, "plain_loop": ours.function}
    why = "no limit: the same product, by the device's events and by the host's clock"
    row = speedup_row(context, PLAIN_LOOP, own, plain, why, ours.verify(), dtype=name, params=params)
    return row, sample_frame(own, PLAIN_LOOP, name, params)


def _given_params(shape: Shape) -> dict:
    return {"shape": shape.name, "m": shape.m, "n": shape.n, "k": shape.k} | _TAKEN


def _measure_given(
    context: Context, options: BestProductsOptions, dtype: str, shape: Shape
) -> tuple[list[Row], list[pd.DataFrame]]:
    name, params = format_of(dtype, context.device).name, _given_params(shape)
    try:
        product = Gemm(shape.m, shape.n, shape.k, dtype, context.device, seed=context.seed, data=_TAKEN["data"])
        timing, verification = product.measure(time_limit_s=options.time_limit_s)
    except (torch.OutOfMemoryError, RefusedProduct) as error:
        return [absent_product(context, GIVEN, name, params, _refusal(error))], []
    rate = timing.estimate.map(lambda seconds: product.flops / seconds / 1e12)
    row = product_row(context, GIVEN, name, params, rate, timing, verification, product.backend)
    return [row], [sample_frame(timing, GIVEN, name, params)]


def _refusal(error: torch.OutOfMemoryError | RefusedProduct) -> str:
    return f"refused: {error.what}" if isinstance(error, RefusedProduct) else out_of_memory_reason(error)
