"""What is the highest rate of a matrix product in each number format, and what rate do given shapes reach?

For each format, a search times matrix products of many shapes with a few samples each. The best shapes, called finalists, are
then timed thoroughly and verified. The rate of the fastest finalist is the MAF (maximum achievable FLOPS). It shows what share of
the data-sheet peak is attainable. The rates of given shapes, such as those of a Transformer layer, are compared with the MAF.
"""

from dataclasses import replace

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result, Table
from hyperion.chapter.efficiency import expected_product
from hyperion.chapter.rows import (
    absent_product,
    all_samples,
    maf_row,
    out_of_memory_reason,
    product_row,
    sample_frame,
    speedup_row,
)
from hyperion.measure import Finalist, Gemm, GemmSearch, RefusedProduct, format_of, search_gemm
from hyperion.measure.clock.timing import compare_with_plain_loop
from hyperion.measure.clock.verify import matmul_precision
from hyperion.results import Row

FINALIST, FASTEST, GIVEN, PLAIN_LOOP = "finalist", "fastest found", "given shape", "fastest over a plain loop"
_TAKEN = {"cache": "cold", "data": "normal"}  # all products are timed with cold caches and normally distributed data


class Shape(Table):
    """Shape of a matrix product.

    Args:
        name: name of the layer or operation with this shape.
        m, n, k: dimensions of the operands A[m, k] and B[k, n].
    """

    name: str
    m: int
    n: int
    k: int


class BestProductsOptions(Options):
    """Options for the `best_products` experiment.

    Args:
        dtypes: number formats to search for the fastest matrix product.
        largest: largest M, N and K in the search.
        step: spacing of the search grid in M, N and K.
        search_limit_s: search budget in seconds for each format.
        exhaustive: if True, time every shape of the grid. If False, start with a coarse grid and refine it near the best shapes.
        time_limit_s: timing budget in seconds for each given shape.
        plain_loop: number formats whose fastest matrix product is also timed in a plain loop of PyTorch calls.
        plain_loop_calls: number of calls in each timing of the plain loop.
        shapes: given shapes to compare with the fastest matrix product.
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
    """Predict the rate of the largest square matrix product and the rate of each given shape.

    The predictions use the rates of square matrix products measured in chapter 1.1.
    """
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
    """Search for the fastest shapes in each format, time the finalists in alternation, then time the given shapes.

    The fastest square matrix product of chapter 1.1 is also a finalist. The search heats the device and can lower its clock.
    Without this finalist, the result could therefore be a lower rate than that of chapter 1.1.
    """
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


EXPERIMENT = Experiment(forecast, run, options=BestProductsOptions, reads=("gemm",))


def _forecast(context: Context, variant: str, dtype: str, shape: tuple[int, int, int], params: dict) -> Forecast:
    name = format_of(dtype, context.device).name
    forecast = expected_product(context, dtype, *shape).forecast(variant, "gemm_tflops", name, params)
    if variant != FASTEST or forecast.estimate is None:
        return forecast
    note = f"for a square product of size {shape[0]}; the search may choose any shape up to this size"
    return replace(forecast, basis=f"{forecast.basis}, {note}")


def _measure_format(context: Context, options: BestProductsOptions, dtype: str) -> tuple[list[Row], list[pd.DataFrame]]:
    """Measure one number format. Return its rows and samples, or a row with the reason if the format cannot be measured."""
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
            also=_fastest_squares(context, options, dtype),
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


def _fastest_squares(context: Context, options: BestProductsOptions, dtype: str) -> list[tuple[int, int, int]]:
    """Return a list whose only item is the shape of the fastest square product of this format in chapter 1.1.

    The list is empty if this run has no such product or if the product exceeds the largest shape of the search.
    """
    square = maf_row(context.upstream, format_of(dtype, context.device).name)
    side = square.params["m"] if square else 0
    return [(side, side, side)] if 0 < side <= options.largest else []


def _search_rows(context: Context, search: GemmSearch) -> tuple[list[Row], list[pd.DataFrame]]:
    """Return the rows of the fastest matrix product and of each finalist, with their samples.

    The row of the fastest product comes first. It also gives the number of shapes that the search timed.
    """
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
    """Time the fastest matrix product with this library and in a plain loop of PyTorch calls. Return the ratio of the two rates.

    The two methods are timed in alternation, each with its own operands.
    """
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
