"""Rows of products of our own models, and of the gap from peak to measured, that no machine measured: test data."""

from math import prod

import pandas as pd

from hyperion.results import Row
from tests.book.made_up.hardware import timed

LIMITS = "04_limits_explained"

MODELS = {"resnet50": 0.55, "vit_b_16": 0.8, "encoder_d512_h8_l6": 0.3, "gpt2_124m": 0.75}
MAF = 0.84  # of the data sheet
SHAPES = (
    ("matmul", 1, 6304, 3072, 768, 24, 600.0, 0.45),
    ("convolution", 1, 25088, 256, 1152, 6, 240.0, 0.3),
    ("attention", 384, 197, 197, 64, 12, 30.0, 0.08),
)
CHECK = {"check": "slice against float64", "check_error": 2e-4, "check_tolerance": 1e-3}


def kernel_chapters(random, peaks):
    """(notebook, experiment, rows, samples) of both experiments; without any peak the gap is that of a CPU known for fp32."""
    trained = {dtype: peak for dtype, peak in peaks.items() if dtype in ("fp32", "bf16")}
    known = peaks if any(peaks.values()) else peaks | {"fp32": 0.5}
    frame = pd.DataFrame({"x": [1]})
    return [(LIMITS, "model_products", model_products_rows(random, trained), frame), (LIMITS, "gemm_gap", gap_rows(known), frame)]


def model_products_rows(random, peaks):
    rows = []
    for dtype, peak in peaks.items():
        for model, part in MODELS.items():
            rate = part * MAF * (peak or 0.4)
            params = {"batch": 32}
            rows.append(_timed(random, model, "taf_tflops", rate, peak, dtype=dtype, params=params, **CHECK))
            share, params = (rows[-1].value / (MAF * (peak or 0.4)), {"what": "TAF / MAF", "batch": 32, "maf": "best_products"})
            rows.append(_row("model_products", model, share, dtype=dtype, params=params))
            rows.append(_row("model_products", model, 0.96, dtype=dtype, params={"what": "FLOPs timed", "batch": 32}))
            for kind, products, m, n, k, count, intensity, share in SHAPES:
                params = {
                    "kind": kind,
                    "products": products,
                    "m": m,
                    "n": n,
                    "k": k,
                    "count": count,
                    "share": share,
                    "intensity": intensity,
                    "cache": "cold",
                    "batch": 32,
                    "precision": dtype,
                }
                speed = min(rate, 4.2 * intensity) * (0.4 + share)
                rows.append(_timed(random, model, "gemm_tflops", speed, peak, dtype=dtype, params=params, **CHECK))
        params = {"what": "MAF / peak", "maf": "best_products"}
        if peak:
            rows.append(_row("model_products", "MAF", MAF, dtype=dtype, params=params | {"peak_tflops": peak}))
        else:
            rows.append(_row("model_products", "MAF", None, dtype=dtype, params=params, value_reason="no peak: unknown CPU"))
    absent = {"value": None, "value_reason": "unsupported: no units for it", "params": {"batch": 32}}
    return [*rows, _row("model_products", "resnet50", metric="taf_tflops", dtype="fp8", **absent)]


def gap_rows(peaks):
    rows = []
    for dtype, peak in peaks.items():
        for of, whole in (("gemm", 0.7), ("best_products", 0.8)):
            params = {"of": of, "m": 8192, "n": 4096, "k": 8192}
            if peak is None:
                reason = "no peak: no data sheet entry"
                rows.append(_row("gemm_gap", "measured / peak", None, dtype=dtype, params=params, value_reason=reason))
                continue
            known = {"clock": 0.93, "tiles": 0.97, "memory": 1.0}
            factors = {**known, "launch": None, "unexplained": whole / prod(known.values())}
            first = params | {"step": 0, "peak_tflops": peak}
            rows.append(_row("gemm_gap", "measured / peak", whole, dtype=dtype, params=first, limit_source="a data sheet"))
            for place, (name, factor) in enumerate(factors.items(), 1):
                why = {"value_reason": "no launch time given"} if factor is None else {"limit_source": f"why {name}"}
                rows.append(_row("gemm_gap", name, factor, dtype=dtype, params=params | {"step": place}, **why))
    reason = "unsupported: torch.mm takes no fp8"
    return [*rows, _row("gemm_gap", "measured / peak", None, dtype="fp8", params={"of": "gemm"}, value_reason=reason)]


def _timed(random, model, metric, rate, limit, **columns):
    return timed(random, LIMITS, "model_products", model, metric, rate, limit, **columns)


def _row(experiment, variant, value, metric="share", **columns):
    return Row(notebook=LIMITS, experiment=experiment, variant=variant, metric=metric, value=value, **columns)
