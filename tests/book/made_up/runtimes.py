"""Rows of runtimes that no machine measured, valid by every rule of a row."""

import pandas as pd

from hyperion.chapter import experiment_named
from hyperion.results import Row

CHAPTER = "12_inference_and_quantization"
_MODELS = ("llama", "resnet18")
_NEEDS_LIMIT = ("samples_per_s",)


def runtime_chapters() -> list[tuple[str, str, list[Row], pd.DataFrame]]:
    """Chapter, experiment, rows and samples, as a made-up run records them."""
    experiment_named("runtimes")  # registers the metrics
    rows = []
    for model in _MODELS:
        for place, runtime in enumerate(("eager", "torch.compile", "ONNX Runtime CPU")):
            base = {"model": model}
            for factor, metric in ((1, "latency_p50_s"), (1.5, "latency_p95_s"), (2, "latency_p99_s")):
                rows.append(made_up_row(runtime, metric, factor * 2e-3 / (1 + place), base | {"batch": 1}))
            for role, batch, rate in (("search", 4, 900.0), ("search", 16, 1000.0), ("best batch", 16, 990.0 + place)):
                rows.append(made_up_row(runtime, "samples_per_s", rate, base | {"batch": batch, "role": role}))
            rows.append(made_up_row(runtime, "kernels_per_call", 60.0 / (1 + place), base | {"batch": 1}))
            rows.append(made_up_row(runtime, "perplexity_ratio", 1.0001, base))
            rows.append(made_up_row(runtime, "relative_difference", 1e-6, base | {"against": "float64"}))
        for metric in ("perplexity_ratio", "relative_difference", "samples_per_s", "latency_p50_s"):
            rows.append(made_up_row("AOTInductor", metric, None, {"model": model}))
    return [(CHAPTER, "runtimes", rows, pd.DataFrame({"x": [1]}))]


def made_up_row(variant: str, metric: str, value: float | None, params: dict, dtype: str = "fp32") -> Row:
    """Return a valid row of the experiment `runtimes`."""
    timed = {"n": 400, "ci_low": 0.99 * value, "ci_high": 1.01 * value} if value else {"value_reason": "SIGSEGV: made up"}
    checks = {"check": "float64", "check_error": 1e-6, "check_tolerance": 1e-4} if value else {}
    limits = {"limit_source": "no limit: made up"} if metric in _NEEDS_LIMIT else {}
    common = {"notebook": CHAPTER, "experiment": "runtimes", "dtype": dtype}
    return Row(variant=variant, metric=metric, value=value, params=params, **common | timed | checks | limits)
