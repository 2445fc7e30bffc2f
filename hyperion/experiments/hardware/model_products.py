"""How fast are the matrix products of our own models, compared with the peak and with the fastest product of any shape?

Each number format has three rates. The peak is the data-sheet rate. The MAF is the rate of this run's fastest matrix product. The
TAF is the combined rate of all matrix products in one training step of a model. The experiment records the matrix products of the
forward and backward pass as PyTorch dispatches them, then times each product in isolation.
"""

from collections import defaultdict
from dataclasses import dataclass

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.efficiency import STEP_PRODUCTS, expected_share
from hyperion.chapter.rows import all_samples, gemm_limit, maf_row, product_row, sample_frame, timed_row
from hyperion.errors import not_none
from hyperion.measure import CapturedGemms, Product, TimedProduct, measure_products, nominal_peak, predict_step, taf
from hyperion.measure.products.taf import gemms_of
from hyperion.models import REFERENCE_MODELS
from hyperion.results import Estimate, Row
from hyperion.workloads.reference_steps import captured_step, step_ceilings

TAF_OF_MAF, MAF_OF_PEAK = "TAF / MAF", "MAF / peak"
COVERAGE = "FLOPs timed"  # label for the share of a step's FLOPs in matrix products that were timed
_TOP = 8  # number of product groups per step that get a row, in addition to the fastest


class ModelProductsOptions(Options):
    """Options for the `model_products` experiment.

    Args:
        models: names of reference models and of Transformer configurations.
        dtypes: number formats of the training step: any of fp32, bf16 and fp16.
        batch_size: samples per batch of a reference model.
        sequences: sequences per batch of a Transformer LM. Each has the model's context length.
        time_limit_s: total timing budget in seconds for all matrix products of a step.
    """

    models: tuple[str, ...]
    dtypes: tuple[str, ...]
    batch_size: int
    sequences: int
    time_limit_s: float

    @property
    def steps(self) -> list[tuple[str, str]]:
        """Pairs (model name, dtype) of all training steps whose matrix products are timed."""
        return [(name, dtype) for dtype in self.dtypes for name in self.models]

    def batch(self, name: str) -> int:
        """Return the batch size of the model in samples or sequences."""
        return self.batch_size if name in REFERENCE_MODELS else self.sequences


def forecast(context: Context) -> list[Forecast]:
    """Predict the TAF of every training step.

    The ceiling of a TAF is computed from this run's rates of square matrix products, scaled to the shape of each product. The
    prediction is this ceiling times the share of the ceiling that a reference machine reached.
    """
    options = ModelProductsOptions.of(context)
    supported = [(name, dtype) for name, dtype in options.steps if context.device.supports(dtype)[0]]
    return [_forecast(context, name, options.batch(name), dtype) for name, dtype in supported]


def run(context: Context, report: Report) -> Result:
    """Record the matrix products of every model's training step in every dtype, and time each product.

    The products with the most FLOPs are timed first.
    """
    options = ModelProductsOptions.of(context)
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    for done, (name, dtype) in enumerate(options.steps):
        report(done, len(options.steps), f"products of {name} in {dtype}")
        new_rows, new_frames = _measure_step(context, name, options.batch(name), dtype, options.time_limit_s)
        rows += new_rows
        frames += new_frames
    rows += [_maf_of_peak(context, dtype) for dtype in options.dtypes if context.device.supports(dtype)[0]]
    report(len(options.steps), len(options.steps), "done")
    return Result(rows, all_samples(frames))


EXPERIMENT = Experiment(
    forecast, run, options=ModelProductsOptions, reads=("gemm", "best_products"), forecast_reads=("bandwidth", "launch_cost")
)


def _forecast(context: Context, name: str, batch: int, dtype: str) -> Forecast:
    ceilings, basis = step_ceilings(context, dtype)
    if ceilings is None:
        return Forecast(name, "taf_tflops", None, basis, dtype=dtype, params={"batch": batch})
    calls = captured_step(name, batch, dtype)
    ceiling = gemms_of(list(calls)).flops / predict_step(calls, ceilings).products_s / 1e12
    basis = (
        "each product runs at the rate of this run's square products, scaled by K and by the share of the units "
        f"that its tiles fill, or at the {ceilings.memory.bandwidth_gb_s:.4g} GB/s of memory"
    )
    expected = expected_share(context.device, STEP_PRODUCTS, ceiling, basis)
    return expected.forecast(name, "taf_tflops", dtype, {"batch": batch})


def _measure_step(
    context: Context, name: str, batch: int, dtype: str, time_limit_s: float
) -> tuple[list[Row], list[pd.DataFrame]]:
    supported, how = context.device.supports(dtype)
    if not supported:
        return [_absent(context, name, batch, dtype, f"unsupported: {how}")], []
    captured = gemms_of(list(captured_step(name, batch, dtype)))
    measured = measure_products(captured, context.device, time_limit_s)
    timed = {product: found for product, found in measured.items() if isinstance(found, TimedProduct)}
    if not timed:
        return [_absent(context, name, batch, dtype, "; ".join(dict.fromkeys(map(str, measured.values()))))], []
    result = taf(captured, {product: found.tflops for product, found in timed.items()})
    params = {"batch": batch}
    rows = [
        _taf_row(context, name, dtype, params, result.tflops, list(timed.values())),
        context.row(name, "share", result.coverage, dtype=dtype, params=params | {"what": COVERAGE}),
        _taf_of_maf(context, name, batch, dtype, result.tflops),
    ]
    frames = []
    kernels = _kernels(captured, timed)
    fastest = max(kernels, key=lambda kernel: kernel.result.tflops.value)
    for kernel in kernels[:_TOP] + [fastest] * (fastest not in kernels[:_TOP]):
        found, params = kernel.result, kernel.params | {"batch": batch, "precision": dtype}
        measured_of = found.tflops, found.timing, found.verification, found.backend
        rows.append(product_row(context, name, kernel.dtype, params, *measured_of))
        frames.append(sample_frame(found.timing, name, kernel.dtype, params))
    return rows, frames


@dataclass(frozen=True)
class _Kernel:
    """Group of all matrix products of a step with the same dimensions. `result` is the timing of one of them."""

    dtype: str
    params: dict
    result: TimedProduct


def _kernels(captured: CapturedGemms, timed: dict[Product, TimedProduct]) -> list[_Kernel]:
    """Return the timed matrix products, grouped by dimensions. Groups with more FLOPs come first."""
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
    """Return the row with the TAF of one model in one number format.

    The clock and power in the row were measured during the longest matrix product. The row's check is the check of the product
    whose error is the largest relative to its tolerance.
    """
    limit, source = gemm_limit(context.device, dtype)
    longest = max(timed, key=lambda result: result.timing.estimate.value).timing
    worst = max((result.verification for result in timed), key=lambda check: check.error / (check.tolerance or 1.0))
    return timed_row(context, name, "taf_tflops", rate, longest, worst, limit=(limit, source), dtype=dtype, params=params)


def _absent(context: Context, name: str, batch: int, dtype: str, reason: str) -> Row:
    return context.absent_row(name, "taf_tflops", reason, dtype=dtype, params={"batch": batch})


def _taf_of_maf(context: Context, name: str, batch: int, dtype: str, rate: Estimate) -> Row:
    maf, params = maf_row(context.upstream, dtype), {"what": TAF_OF_MAF, "batch": batch}
    if maf is None:
        return _no_maf(context, name, dtype, params)
    # Dividing opposite ends of the two intervals gives an interval that contains the true ratio with at least the same
    # confidence.
    share = {"n": rate.n, "ci_low": rate.ci_low / not_none(maf.ci_high), "ci_high": rate.ci_high / not_none(maf.ci_low)}
    params |= {"maf": maf.experiment}
    return context.row(name, "share", rate.value / not_none(maf.value), dtype=dtype, params=params, **share)


def _maf_of_peak(context: Context, dtype: str) -> Row:
    """Return the row with the MAF divided by the data-sheet peak.

    The value can exceed 1, because the data sheet states the peak at a nominal clock.
    """
    maf, params = maf_row(context.upstream, dtype), {"what": MAF_OF_PEAK}
    if maf is None:
        return _no_maf(context, "MAF", dtype, params)
    params |= {"maf": maf.experiment}
    peak, reason = nominal_peak(context.device, dtype)
    if peak is None:
        return context.absent_row("MAF", "share", f"no peak: {reason}", dtype=dtype, params=params)
    return context.row(
        "MAF",
        "share",
        not_none(maf.value) / peak.tflops,
        dtype=dtype,
        params=params | {"peak_tflops": peak.tflops},
        limit_source=peak.source,
        n=maf.n,
        ci_low=not_none(maf.ci_low) / peak.tflops,
        ci_high=not_none(maf.ci_high) / peak.tflops,
    )


def _no_maf(context: Context, variant: str, dtype: str, params: dict) -> Row:
    reason = "this run has measured no product of the format (chapter 1.1)"
    return context.absent_row(variant, "share", reason, dtype=dtype, params=params)
