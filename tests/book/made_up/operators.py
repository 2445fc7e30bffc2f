"""Rows of the operator suite and of the architectures that no machine measured: test data, valid by every rule of a row."""

import pandas as pd

from hyperion.chapter import experiment_named
from hyperion.results import Row

CHAPTER = "12_inference_and_quantization"
_CAUSE = "a made-up cause"


def operator_chapters() -> list[tuple[str, str, list[Row], pd.DataFrame]]:
    """Chapter, experiment, rows and samples of the two experiments, as a made-up run records them."""
    experiment_named("operator_suite")  # registers the metric
    counts = {"passed": 7, "failed": 1, "unsupported": 2, "no gradient": 0}
    suite = [
        _row("operator_suite", "all operators", "count", value, {"what": status, "pass": which}, dtype)
        for dtype in ("fp32", "bf16")
        for which in ("forward", "backward")
        for status, value in counts.items()
    ]
    kind = {"kind": "reductions", "mode": "eager"}
    worst = kind | {"worst pass": "backward", "sample inputs": 2}
    suite += [_row("operator_suite", name, _METRIC, error, worst, "fp32") for name, error in (("sum", 0.25), ("softmax", 0.0))]
    suite += [
        _row("operator_suite", "logcumsumexp", _METRIC, 30.0, worst | {"cause": _CAUSE}, "bf16"),
        _row(
            "operator_suite",
            "fft.rfft",
            _METRIC,
            None,
            kind | {"pass": "forward"},
            "bf16",
            "unsupported: RuntimeError: no kernel",
        ),
        _row("operator_suite", "sort", _METRIC, None, worst, "bf16", "unexpected: 3 1 failed its check 'float64'"),
    ]
    architectures = []
    for name, family, errors in (("llama", "decoder", (0.1, 0.2, 0.3)), ("bert", "encoder", (0.1, 0.2, None))):
        common = {"family": family, "seed": 0}
        steps = zip(("forward", "backward", "generate"), errors, strict=True)
        reason = "not applicable: the class has no generation (encoder)"
        architectures += [
            _row("architectures", name, _METRIC, error, common | {"step": step}, "fp32", reason) for step, error in steps
        ]
        architectures.append(_row("architectures", name, "count", 20480, common | {"what": "parameters"}, "fp32"))
    failed = {"family": "encoder", "seed": 0, "step": "build"}
    architectures.append(_row("architectures", "albert", _METRIC, None, failed, "fp32", "failed: TypeError: made up"))
    for what, value in (("pass forward, backward and, where the class can, generate", 2), ("fail in a step", 1)):
        architectures.append(_row("architectures", "all architectures", "count", value, {"what": what}, "fp32"))
    return [
        (CHAPTER, name, rows, pd.DataFrame({"x": [1]}))
        for name, rows in (("operator_suite", suite), ("architectures", architectures))
    ]


_METRIC = "error_over_tolerance"


def _row(experiment: str, variant: str, metric: str, value: float | None, params: dict, dtype: str, reason: str = "") -> Row:
    common = {"notebook": CHAPTER, "experiment": experiment, "variant": variant, "metric": metric, "dtype": dtype}
    return Row(value=value, params=params, value_reason=reason if value is None else "", **common)
