"""Rows of quantised weights, of decoding and of training with few bits that no machine measured, valid by every rule of a row."""

import pandas as pd

from hyperion.chapter import experiment_named
from hyperion.results import Row

CHAPTER = "12_inference_and_quantization"
_TORCH = {"model": "llama", "runtime": "PyTorch"}
_MODE = {"positions": 64, "new_tokens": 8, "cache": "hot"}


def quantization_chapters() -> list[tuple[str, str, list[Row], pd.DataFrame]]:
    """Chapter, experiment, rows and samples, as a made-up run records them."""
    experiment_named("quantization")  # registers the metrics
    schemes = (("int8 weight-only", "int8", 1.001, 1e6, 0.9), ("NF4", "nf4", 1.02, 6e5, 0.5))
    quantization = [
        _row("quantization", name, metric, value, dtype, _TORCH)
        for name, dtype, ratio, stored, speed in schemes
        for metric, value in (("perplexity_ratio", ratio), ("weight_bytes", stored), ("speedup", speed))
    ]
    # Both models are quantised by a scheme of the same name, with different bytes.
    quantization.extend(
        _row("quantization", "int8 static", metric, value, "int8", {"model": model, "runtime": "ONNX Runtime"})
        for model, metric, value in (
            ("llama", "perplexity_ratio", 1.002),
            ("llama", "weight_bytes", 2e6),
            ("resnet", "weight_bytes", 5e6),
        )
    )
    quantization.append(_row("quantization", "fp8", "weight_bytes", None, "fp8", _TORCH))
    decode = [
        _row("decode_speed", name, "decode_time_s", value, "bf16", {"model": model, "mode": mode} | _MODE)
        for model, name, mode, value in (
            ("small", "original", "eager", 2e-3),
            ("large", "original", "eager", 9e-3),
            ("large", "original", "captured graph", 4e-3),
            ("large", "NF4", "captured graph", None),
        )
    ]
    qlora = [
        _row("qlora", name, metric, value, "fp32", {"model": "llama"})
        for name, metric, value in (
            ("AdamW", "optimizer_state_bytes", 8e6),
            ("8-bit AdamW", "optimizer_state_bytes", 2.1e6),
            ("QLoRA", "loss_difference_nats", None),
        )
    ]
    curve = pd.DataFrame({"kind": "loss curve", "variant": ["LoRA", "LoRA", "QLoRA", "QLoRA"], "step": [1, 2] * 2, "loss": 2.0})
    plain = pd.DataFrame({"x": [1]})
    return [
        (CHAPTER, "quantization", quantization, plain),
        (CHAPTER, "decode_speed", decode, plain),
        (CHAPTER, "qlora", qlora, curve),
    ]


def _row(experiment: str, variant: str, metric: str, value: float | None, dtype: str, params: dict) -> Row:
    timed = {"n": 30, "ci_low": 0.99 * value, "ci_high": 1.01 * value} if value else {"value_reason": "unavailable: made up"}
    checks = {"check": "float64", "check_error": 0.0, "check_tolerance": 1e-2} if value else {}
    limits = {"limit": 1e-3, "limit_source": "made up"} if metric == "decode_time_s" else {"limit_source": "no limit: made up"}
    common = {"notebook": CHAPTER, "experiment": experiment, "dtype": dtype}
    return Row(variant=variant, metric=metric, value=value, params=params, **common | timed | checks | limits)
