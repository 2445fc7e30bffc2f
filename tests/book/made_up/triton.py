"""Rows of the chapter on Triton kernels that no machine measured: test data, valid by every rule of a row."""

import pandas as pd

from hyperion.results import Row

CHAPTER = "09_kernels"
SHAPE = {"heads": 16, "key_heads": 4, "length": 8192, "features": 128, "causal": True}


def triton_chapters() -> list[tuple[str, str, list[Row], pd.DataFrame]]:
    """Chapter, experiment, rows and samples of the experiments that have figures, as a made-up run records them."""
    rows = {
        "row_kernels": [
            _row("row_kernels", name, "bandwidth_gb_s", value, {"operation": operation})
            for name, value in (("triton", 380.0), ("torch", 350.0))
            for operation in ("softmax", "layer_norm")
        ],
        "matmul_kernel": [
            _row("matmul_kernel", "torch.mm", "gemm_tflops", 0.7, {"m": 1, "n": 2, "k": 3}),
            _row("matmul_kernel", "triton", "gemm_tflops", None, {"m": 1, "n": 2, "k": 3}),
        ],
        "attention_speed": [
            _row("attention_speed", name, "attention_tflops", value, SHAPE | {"pass": which})
            for name, value in (("triton", 0.4), ("cudnn", 0.6), ("flash", None))
            for which in ("forward", "backward")
        ],
        "attention_memory": [
            _row("attention_memory", name, "peak_memory_gib", value * length, {"length": length})
            for name, value in (("triton", 1e-6), ("math", 1e-3))
            for length in (1024, 2048)
        ],
    }
    return [(CHAPTER, experiment, some, pd.DataFrame({"x": [1]})) for experiment, some in rows.items()]


def _row(experiment: str, variant: str, metric: str, value: float | None, params: dict) -> Row:
    timed = {"n": 30, "ci_low": 0.99 * value, "ci_high": 1.01 * value} if value else {"value_reason": "unavailable: made up"}
    checks = {"check": "float64", "check_error": 1e-3, "check_tolerance": 1e-2} if value else {}
    common = {"notebook": CHAPTER, "experiment": experiment, "dtype": "bf16", "limit_source": "no limit: made up"}
    return Row(variant=variant, metric=metric, value=value, params=params, **common | timed | checks)
