"""What is the most that this machine makes of each number format, over all shapes of a product, and what do given shapes get?

A search finds the fastest product of each format, the maximum achievable rate (MAF): what is left of the data sheet's peak
when only the shape is chosen well. Beside it, in the same format, shapes that somebody needs: a Transformer layer's, say.
"""

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.product_rows import absent_product, product_row, roofline_tflops
from hyperion.chapter.rows import out_of_memory_reason, sample_frame, timed_columns
from hyperion.measure import Finalist, Gemm, GemmSearch, RefusedProduct, format_of, search_gemm
from hyperion.measure.clock.dtypes import matmul_precision
from hyperion.measure.clock.timing import compare_with_plain_loop
from hyperion.results import Row, ratio_estimate

FINALIST, FASTEST, GIVEN, BESIDE = "finalist", "fastest found", "given shape", "fastest over a plain loop"
_TAKEN = {"cache": "cold", "data": "normal"}


def forecast(context: Context) -> list[Forecast]:
    """The roofline's rate of the largest square for what a search will find, and of each given shape for itself."""
    largest = context.sizes["largest"]
    formats = [dtype for dtype in context.sizes["dtypes"] if context.device.supports(dtype)[0]]
    found = [_forecast(context, FASTEST, dtype, (largest,) * 3, _TAKEN) for dtype in formats]
    return found + [
        _forecast(context, GIVEN, dtype, (shape["m"], shape["n"], shape["k"]), _given_params(shape))
        for dtype in formats
        for shape in context.sizes["shapes"]
    ]


def run(context: Context, report) -> Result:
    """Search each format, time its leaders in turn, then the given shapes."""
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    for done, dtype in enumerate(context.sizes["dtypes"]):
        report(done, len(context.sizes["dtypes"]), f"fastest product in {dtype}")
        new_rows, new_frames = _measure_format(context, dtype)
        rows += new_rows
        frames += new_frames
    report(len(context.sizes["dtypes"]), len(context.sizes["dtypes"]), "done")
    return Result(rows, pd.concat(frames, ignore_index=True) if frames else pd.DataFrame())


EXPERIMENT = Experiment(forecast, run)


def _forecast(context: Context, variant: str, dtype: str, shape: tuple[int, int, int], params: dict) -> Forecast:
    estimate, basis = roofline_tflops(context.device, dtype, *shape)
    if variant == FASTEST and estimate is not None:
        basis += f", of a square of {shape[0]}: the search may take any shape up to it"
    name = format_of(dtype, context.device).name
    return Forecast(variant=variant, metric="gemm_tflops", estimate=estimate, basis=basis, dtype=name, params=params)


def _given_params(shape: dict) -> dict:
    return {"shape": shape["name"], "m": shape["m"], "n": shape["n"], "k": shape["k"]} | _TAKEN


def _measure_format(context: Context, dtype: str) -> tuple[list[Row], list[pd.DataFrame]]:
    """All rows of one format, or one that says why there is none."""
    supported, how = context.device.supports(dtype)
    if not supported:
        return [absent_product(context, FASTEST, dtype, _TAKEN, f"unsupported: {how}")], []
    try:
        search = _search(context, dtype)
        rows, frames = _searched(context, search)
        if dtype in context.sizes["plain_loop"]:
            row, frame = _beside_plain_loop(context, dtype, search.best.shape)
            rows, frames = [*rows, row], [*frames, frame]
    except (torch.OutOfMemoryError, RefusedProduct) as error:
        name = format_of(dtype, context.device).name
        rows, frames = [absent_product(context, FASTEST, name, _TAKEN, _refusal(error))], []
    for shape in context.sizes["shapes"]:
        new_rows, new_frames = _given(context, dtype, shape)
        rows += new_rows
        frames += new_frames
    return rows, frames


def _search(context: Context, dtype: str) -> GemmSearch:
    sizes = context.sizes
    return search_gemm(
        dtype,
        context.device,
        time_limit_s=sizes["search_limit_s"],
        largest=sizes["largest"],
        step=sizes["step"],
        seed=context.seed,
        data=_TAKEN["data"],
        exhaustive=sizes["exhaustive"],
    )


def _searched(context: Context, search: GemmSearch) -> tuple[list[Row], list[pd.DataFrame]]:
    """The fastest with what the search saw, then all finalists, the fastest among them once more."""
    best, told = search.best, {"seen": search.seen, "shapes": search.shapes, "stopped": search.stopped}
    rows = [_found_row(context, search, FASTEST, best, _shape_params(best.shape) | told)]
    frames = []
    for finalist in search.finalists:
        params = _shape_params(finalist.shape)
        rows.append(_found_row(context, search, FINALIST, finalist, params))
        frames.append(sample_frame(finalist.timing, FINALIST, search.dtype, params))
    return rows, frames


def _beside_plain_loop(context: Context, dtype: str, shape: tuple[int, int, int]) -> tuple[Row, pd.DataFrame]:
    """The fastest product in turn with PyTorch's own call in the loop anybody would write, on operands of its own."""
    ours, theirs = (Gemm(*shape, dtype, context.device, seed=context.seed + seed) for seed in (1, 2))
    calls = context.sizes["plain_loop_calls"]
    with matmul_precision(ours.format):
        own, plain = compare_with_plain_loop(ours, context.device, calls, plain=theirs.plain_call())
    ratio = ratio_estimate(own.samples_s, plain.samples_s)
    name, params = (ours.format.name, _shape_params(shape) | {"cache": "hot", "calls": calls, "plain_loop": ours.function})
    row = context.row(
        BESIDE,
        "speedup",
        ratio.value,
        dtype=name,
        params=params,
        **timed_columns(ratio, own, ours.verify()),
        limit_source="no limit: the same product, by the device's events and by the host's clock",
    )
    return row, sample_frame(own, BESIDE, name, params)


def _found_row(context: Context, search: GemmSearch, variant: str, found: Finalist, params: dict) -> Row:
    return product_row(context, variant, search.dtype, params, found.tflops, found.timing, found.verification, search.backend)


def _shape_params(shape: tuple[int, int, int]) -> dict:
    return dict(zip("mnk", shape, strict=True)) | _TAKEN


def _given(context: Context, dtype: str, shape: dict) -> tuple[list[Row], list[pd.DataFrame]]:
    name, params = format_of(dtype, context.device).name, _given_params(shape)
    try:
        product = Gemm(shape["m"], shape["n"], shape["k"], dtype, context.device, seed=context.seed, data=_TAKEN["data"])
        timing, verification = product.measure(time_limit_s=context.sizes["time_limit_s"])
    except (torch.OutOfMemoryError, RefusedProduct) as error:
        return [absent_product(context, GIVEN, name, params, _refusal(error))], []
    rate = timing.estimate.map(lambda seconds: product.flops / seconds / 1e12)
    row = product_row(context, GIVEN, name, params, rate, timing, verification, product.backend)
    return [row], [sample_frame(timing, GIVEN, name, params)]


def _refusal(error: Exception) -> str:
    return out_of_memory_reason(error) if isinstance(error, torch.OutOfMemoryError) else f"refused: {error.what}"
