"""How fast does this machine multiply matrices, by dtype and size, and how near its peak is that?"""

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.product_rows import absent_product, roofline_tflops
from hyperion.chapter.rows import gemm_limit, out_of_memory_reason, sample_frame, timed_columns
from hyperion.measure import FORMATS, Gemm, Timing, Verification, format_of
from hyperion.results import Row, ratio_estimate

VARIANT = "torch.mm"


def forecast(context: Context) -> list[Forecast]:
    """The roofline's rate for each cell: datasheet peak and datasheet bandwidth, nothing else."""
    return [
        _forecast(context, dtype, size) for size in sorted(context.sizes["sizes"], reverse=True) for dtype in _dtypes(context)
    ]


def run(context: Context, report) -> Result:
    """Time every dtype and size with cold and warm caches, verify each, then hold the harness against a plain loop."""
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    cells = [(dtype, size) for dtype in context.sizes["dtypes"] for size in context.sizes["sizes"]]
    for done, (dtype, size) in enumerate(cells):
        report(done, len(cells), f"{dtype} {size}")
        cell_rows, cell_frames = _measure_cell(context, dtype, size)
        rows += cell_rows
        frames += cell_frames
    cross_rows, cross_frames = _cross_check(context, report)
    report(len(cells), len(cells), "done")
    return Result(rows + cross_rows, pd.concat(frames + cross_frames, ignore_index=True))


EXPERIMENT = Experiment(forecast, run)


def _dtypes(context: Context) -> list[str]:
    return [dtype for dtype in context.sizes["dtypes"] if context.device.supports(dtype)[0]]


def _params(size: int, cache: str = "cold") -> dict:
    return {"m": size, "n": size, "k": size, "cache": cache}


def _forecast(context: Context, dtype: str, size: int) -> Forecast:
    estimate, basis = roofline_tflops(context.device, dtype, size, size, size)
    name = format_of(dtype, context.device).name
    return Forecast(variant=VARIANT, metric="gemm_tflops", estimate=estimate, basis=basis, dtype=name, params=_params(size))


def _measure_cell(context: Context, dtype: str, size: int) -> tuple[list[Row], list[pd.DataFrame]]:
    """One product with cold and with warm caches, or a row that says why there is none."""
    supported, how = context.device.supports(dtype)
    if not supported:
        return [_absent(context, dtype, size, f"unsupported: {how}")], []
    rows, frames = [], []
    try:
        product = Gemm(size, size, size, dtype, context.device, seed=context.seed)
        for cache in ("cold", "hot"):
            timing, verification = product.measure(cold=cache == "cold", time_limit_s=context.sizes["time_limit_s"])
            name = product.format.name
            if name == "tf32" and verification.error < FORMATS["fp32"].gemm_tolerance:
                return [_absent(context, dtype, size, "TF32 was allowed, but the product has the accuracy of fp32")], []
            rows.append(_rate_row(context, product.function, product, _params(size, cache), timing, verification))
            frames.append(sample_frame(timing, product.function, name, _params(size, cache)))
    except torch.OutOfMemoryError as error:
        return [_absent(context, dtype, size, out_of_memory_reason(error))], []
    return rows, frames


def _rate_row(context: Context, variant: str, product: Gemm, params: dict, timing: Timing, verification: Verification) -> Row:
    rate = timing.estimate.map(lambda seconds: product.flops / seconds / 1e12)
    limit, limit_source = gemm_limit(context.device, product.format.name)
    return context.row(
        variant,
        "gemm_tflops",
        rate.value,
        dtype=product.format.name,
        params=params,
        limit=limit,
        limit_source=f"{limit_source}; by {product.backend}",
        **timed_columns(rate, timing, verification),
    )


def _absent(context: Context, dtype: str, size: int, reason: str) -> Row:
    return absent_product(context, VARIANT, dtype, _params(size), reason)


def _cross_check(context: Context, report) -> tuple[list[Row], list[pd.DataFrame]]:
    """The harness against the loop anybody would write, interleaved, over every size of one dtype."""
    dtype, calls = context.sizes["cross_check_dtype"], context.sizes["cross_check_calls"]
    rows, frames = [], []
    for done, size in enumerate(context.sizes["sizes"]):
        report(done, len(context.sizes["sizes"]), f"cross-check {dtype} {size}")
        product = Gemm(size, size, size, dtype, context.device, seed=context.seed + 1)
        harness, plain = product.compare_with_plain_loop(calls)
        ratio = ratio_estimate(harness.samples_s, plain.samples_s)
        params = _params(size, "hot") | {"plain_loop_calls": calls}
        rows.append(
            context.row(
                "harness over plain loop",
                "speedup",
                ratio.value,
                dtype=dtype,
                params=params,
                limit_source="no limit: the device's events and the host's clock on the same product",
                **timed_columns(ratio, harness),
            )
        )
        verification = product.verify()
        for name, timing in (("harness", harness), ("plain loop", plain)):
            rows.append(_rate_row(context, name, product, params, timing, verification))
            frames.append(sample_frame(timing, name, dtype, params))
    return rows, frames
