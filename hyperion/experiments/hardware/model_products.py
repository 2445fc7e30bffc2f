"""How fast are the matrix products of our own models, beside the peak and beside the fastest product of any shape?

Three rates of a number format: the data sheet's peak; MAF, the most that any product reached in this run; TAF, what the
products of one model's training step reach, weighed by their FLOPs. The products are captured from the step where PyTorch
dispatches them, forward and backward, and each is timed alone.
"""

from collections import defaultdict
from dataclasses import dataclass

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.product_rows import maf_row, product_row
from hyperion.chapter.rows import gemm_limit, sample_frame, timed_columns
from hyperion.measure import CapturedGemms, Product, TimedProduct, measure_products, nominal_peak, predict_step
from hyperion.measure.products.taf import gemms_of, taf
from hyperion.models import REFERENCE_MODELS
from hyperion.results import Estimate, Row
from hyperion.workloads.captured_steps import captured_step
from hyperion.workloads.step_forecasts import step_ceilings

TAF_OF_MAF, MAF_OF_PEAK = "TAF / MAF", "MAF / peak"
COVERAGE = "FLOPs timed"  # of the products that TAF knows, among all of the step's
_TOP = 8  # products of a step that get a row of their own, beside the fastest one


def forecast(context: Context) -> list[Forecast]:
    """TAF of every step, each product at the rate that the run's square products promise for its size."""
    return [_forecast(context, name, dtype) for name, dtype in _steps(context) if context.device.supports(dtype)[0]]


def run(context: Context, report) -> Result:
    """Capture every model's step in every dtype and time its products, those with most FLOPs first."""
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    steps = _steps(context)
    for done, (name, dtype) in enumerate(steps):
        report(done, len(steps), f"products of {name} in {dtype}")
        new_rows, new_frames = _measure_step(context, name, dtype)
        rows += new_rows
        frames += new_frames
    rows += [_maf_of_peak(context, dtype) for dtype in context.sizes["dtypes"] if context.device.supports(dtype)[0]]
    report(len(steps), len(steps), "done")
    return Result(rows, pd.concat(frames, ignore_index=True) if frames else pd.DataFrame())


EXPERIMENT = Experiment(forecast, run, reads=("gemm", "best_products"), forecast_reads=("bandwidth", "launch_cost"))


def _steps(context: Context) -> list[tuple[str, str]]:
    return [(name, dtype) for dtype in context.sizes["dtypes"] for name in context.sizes["models"]]


def _batch(context: Context, name: str) -> int:
    """A language model's sequence holds many positions, each as much work as a small image."""
    return context.sizes["batch_size" if name in REFERENCE_MODELS else "sequences"]


def _captured(context: Context, name: str, dtype: str) -> CapturedGemms:
    return gemms_of(list(captured_step(name, _batch(context, name), dtype)))


def _forecast(context: Context, name: str, dtype: str) -> Forecast:
    estimate = None
    ceilings, basis = step_ceilings(context, dtype)
    if ceilings is not None:
        products_s = predict_step(captured_step(name, _batch(context, name), dtype), ceilings).products_s
        estimate = _captured(context, name, dtype).flops / products_s / 1e12
        basis = (
            "each product at the rate of this run's square ones, scaled by the length of K and by the share of the units "
            f"that its tiles fill, or at the {ceilings.memory.bandwidth_gb_s:.4g} GB/s of memory"
        )
    params = {"batch": _batch(context, name)}
    return Forecast(variant=name, metric="taf_tflops", estimate=estimate, basis=basis, dtype=dtype, params=params)


def _measure_step(context: Context, name: str, dtype: str) -> tuple[list[Row], list[pd.DataFrame]]:
    supported, how = context.device.supports(dtype)
    if not supported:
        return [_absent(context, name, dtype, f"unsupported: {how}")], []
    captured = _captured(context, name, dtype)
    measured = measure_products(captured, context.device, context.sizes["time_limit_s"])
    timed = {product: found for product, found in measured.items() if isinstance(found, TimedProduct)}
    if not timed:
        return [_absent(context, name, dtype, "; ".join(dict.fromkeys(map(str, measured.values()))))], []
    found = taf(captured, {product: result.tflops for product, result in timed.items()})
    params = {"batch": _batch(context, name)}
    rows = [
        _taf_row(context, name, dtype, params, found.tflops, list(timed.values())),
        context.row(name, "share", found.coverage, dtype=dtype, params=params | {"what": COVERAGE}),
        _taf_of_maf(context, name, dtype, found.tflops),
    ]
    frames = []
    kernels = _kernels(captured, timed)
    fastest = max(kernels, key=lambda kernel: kernel.result.tflops.value)
    for kernel in kernels[:_TOP] + [fastest] * (fastest not in kernels[:_TOP]):
        result, params = kernel.result, kernel.params | {"batch": _batch(context, name), "precision": dtype}
        measured_of = result.tflops, result.timing, result.verification, result.backend
        rows.append(product_row(context, name, kernel.dtype, params, *measured_of))
        frames.append(sample_frame(result.timing, name, kernel.dtype, params))
    return rows, frames


@dataclass(frozen=True)
class _Kernel:
    """Products of a step that have the same sizes, and were timed as one."""

    dtype: str
    params: dict
    result: TimedProduct


def _kernels(captured: CapturedGemms, timed: dict[Product, TimedProduct]) -> list[_Kernel]:
    """Those with most FLOPs first."""
    alike: dict[tuple, list[Product]] = defaultdict(list)
    for product in timed:
        alike[product.kind, product.batch, product.m, product.n, product.k, product.dtype].append(product)
    kernels = []
    for (kind, products, m, n, k, dtype), same in alike.items():
        flops = sum(product.flops * captured.counts[product] for product in same)
        params = {
            "kind": kind,
            "products": products,
            "m": m,
            "n": n,
            "k": k,
            "count": sum(captured.counts[p] for p in same),
            "share": round(flops / captured.flops, 4),
            "intensity": round(same[0].intensity, 2),
            "cache": "cold",
        }
        kernels.append(_Kernel(dtype, params, timed[same[0]]))
    return sorted(kernels, key=lambda kernel: -kernel.params["share"])


def _taf_row(context: Context, name: str, dtype: str, params: dict, rate: Estimate, timed: list[TimedProduct]) -> Row:
    """The row; the device's state is that of the product timed longest, the check that of the least exact one."""
    limit, source = gemm_limit(context.device, dtype)
    longest = max(timed, key=lambda result: result.timing.estimate.value).timing
    worst = max((result.verification for result in timed), key=lambda check: check.error / (check.tolerance or 1.0))
    return context.row(
        name,
        "taf_tflops",
        rate.value,
        dtype=dtype,
        params=params,
        limit=limit,
        limit_source=source,
        **timed_columns(rate, longest, worst),
    )


def _absent(context: Context, name: str, dtype: str, reason: str) -> Row:
    params = {"batch": _batch(context, name)}
    return context.row(name, "taf_tflops", None, dtype=dtype, params=params, value_reason=reason)


def _taf_of_maf(context: Context, name: str, dtype: str, rate: Estimate) -> Row:
    maf, params = maf_row(context.upstream, dtype), {"what": TAF_OF_MAF, "batch": _batch(context, name)}
    if maf is None:
        return _no_maf(context, name, dtype, params)
    # Both ends at once: an interval that holds the ratio at least as often as the two hold their own values.
    share = {"n": rate.n, "ci_low": rate.ci_low / maf.ci_high, "ci_high": rate.ci_high / maf.ci_low}
    return context.row(name, "share", rate.value / maf.value, dtype=dtype, params=params | _origin(maf), **share)


def _maf_of_peak(context: Context, dtype: str) -> Row:
    """Against the data sheet's peak, made at the clock that it names: a device may run above it."""
    maf, params = maf_row(context.upstream, dtype), {"what": MAF_OF_PEAK}
    if maf is None:
        return _no_maf(context, "MAF", dtype, params)
    params |= _origin(maf)
    peak, reason = nominal_peak(context.device, dtype)
    if peak is None:
        return context.row("MAF", "share", None, dtype=dtype, params=params, value_reason=f"no peak: {reason}")
    interval = {"n": maf.n, "ci_low": maf.ci_low / peak.tflops, "ci_high": maf.ci_high / peak.tflops}
    params |= {"peak_tflops": peak.tflops}
    return context.row("MAF", "share", maf.value / peak.tflops, dtype=dtype, params=params, limit_source=peak.source, **interval)


def _origin(maf: Row) -> dict:
    """Where a MAF comes from, for the params of what is held against it."""
    return {"maf": maf.experiment}


def _no_maf(context: Context, variant: str, dtype: str, params: dict) -> Row:
    reason = "this run has measured no product of the format (chapter 1.1)"
    return context.row(variant, "share", None, dtype=dtype, params=params, value_reason=reason)
