"""Rows of the chapter on frameworks that no machine measured: test data, valid by every rule of a row."""

import pandas as pd

from hyperion.chapter.subjects import subjects
from hyperion.results import Row

CHAPTER = "10_frameworks"
SIZES = {"model": "made up", "ranks": 1}


def framework_chapters() -> list[tuple[str, str, list[Row], pd.DataFrame]]:
    """Chapter, experiment, rows and samples of the experiments, as a made-up run records them."""
    subjects()  # registers the metrics of frameworks
    planted = [
        _row("planted_unfairness", "learning rate x 1.1", "unequal_loss_difference", 0.09),
        _row("planted_unfairness", "tokens counted per rank", "unequal_loss_difference", 0.0),
        _row("planted_unfairness", "learning rate x 1.1", "count", 1.0, {"what": "named", "expected": "learning rate"}),
        _row("planted_unfairness", "tokens counted per rank", "count", None, {"what": "named", "expected": "tokens counted"}),
    ]
    parity = [
        _row("framework_parity", "accelerate", "loss_difference", 0.0, predicted=6e-6),
        _row("framework_parity", "HF Trainer", "loss_difference", 9e-7, predicted=6e-6),
        _row("framework_parity", "fused AdamW", "loss_difference", 5e-7, SIZES | {"twin": True}),
        _row("framework_parity", "NeMo", "loss_difference", None),
    ]
    defaults = [
        _row("trainer_defaults", "equal work", "unequal_loss_difference", 9e-7),
        _row("trainer_defaults", "all defaults", "unequal_loss_difference", 0.5),
    ]
    speed = []
    for name, rate, faster in (("plain loop", 1000.0, 0), ("accelerate", 990.0, 0), ("HF Trainer", 700.0, 2)):
        speed += [
            _row("framework_speed", name, "tokens_per_s", rate),
            _row("framework_speed", name, "peak_memory_gib", 2.0),
            _row("framework_speed", name, "count", float(faster), SIZES | {"what": "faster", "ties": 1}),
        ]
    for name, norms, idle, step in (("plain loop", 0.03, 0.01, 0.134), ("accelerate", 0.02, 0.01, 0.135)):
        values = {
            "matrix products": 0.1,
            "norms, activations and other elementwise work": norms,
            "communication": 0.0,
            "idle": idle,
        }
        speed += [_row("framework_speed", name, "part_time_s", value, SIZES | {"part": part}) for part, value in values.items()]
        speed.append(_row("framework_speed", name, "step_time_s", step))
        speed.append(_row("framework_speed", name, "tracing_slowdown", 1.04))
    kernel = {"kernel": "nvjet", "operator": "aten::mm", "part": "matrix products", "calls": 154.0}
    speed.append(_row("framework_speed", "accelerate", "kernel_time_s", 0.1, SIZES | kernel))
    speed.append(_row("framework_speed", "HF Trainer", "traced_step_time_s", None))
    speed.append(_row("framework_speed", "deepspeed zero-1", "step_time_s", None))
    samples = pd.DataFrame({"x": [1]})
    experiments = {
        "planted_unfairness": planted,
        "framework_parity": parity,
        "trainer_defaults": defaults,
        "framework_speed": speed,
    }
    return [(CHAPTER, experiment, rows, samples) for experiment, rows in experiments.items()]


def _row(
    experiment: str, variant: str, metric: str, value: float | None, params: dict | None = None, predicted: float | None = None
) -> Row:
    timed = {"n": 5, "ci_low": 0.99 * value, "ci_high": 1.01 * value} if value is not None else {}
    checks = {"check": "made up", "check_error": 0.0, "check_tolerance": 4e-6} if value is not None else {}
    reason = {} if value is not None else {"value_reason": "unavailable: not installed; next step: install it"}
    common = {"notebook": CHAPTER, "experiment": experiment, "dtype": "fp32", "limit_source": "no limit: made up"}
    return Row(
        variant=variant,
        metric=metric,
        value=value,
        params=params or SIZES,
        predicted=predicted,
        **common,
        **timed,
        **checks,
        **reason,
    )
