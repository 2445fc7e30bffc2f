"""Rows of the chapter on megatron-core that no machine measured: test data, valid by every rule of a row."""

import pandas as pd

from hyperion.chapter.subjects import subjects
from hyperion.results import Row

CHAPTER = "11_megatron"
LOSS, NORM = "training loss", "gradient norm before clipping"


def megatron_chapters() -> list[tuple[str, str, list[Row], pd.DataFrame]]:
    """Chapter, experiment, rows and samples of the experiments that have figures, as a made-up run records them."""
    subjects()  # registers the metrics of the chapter
    layouts = {"DP 2": 0.0, "TP 2": 3e-7, "PP 2": 5e-6}
    parity = [
        _row("megatron_parity", name, "relative_difference", value * scale, {"what": what}, predicted=1e-6, tolerance=1e-4)
        for name, value in layouts.items()
        for what, scale in ((LOSS, 1), (NORM, 2))
    ]
    parity.append(_row("megatron_parity", "TP 4", "relative_difference", None, {"what": LOSS}))
    bubble = [
        _row("pipeline_bubble", "1F1B", "bubble_fraction", 1.1 / (count + 1), {"micro_batches": count}, predicted=1 / (count + 1))
        for count in (1, 2, 4)
    ]
    over = {"over": "megatron-core, DP 2"}
    speeds = [
        _row("layout_speed", "this library, DDP", "step_time_s", 0.2, {}),
        _row("layout_speed", "this library, DDP", "speedup", 1.25, over),
        _row("layout_speed", "megatron-core, DP 2", "step_time_s", 0.25, {}),
        _row("layout_speed", "megatron-core, PP 2", "step_time_s", 0.5, {}),
        _row("layout_speed", "megatron-core, PP 2", "speedup", 0.5, over, predicted=0.8),
    ]
    losses = [
        _row("megatron_pretraining", "megatron-core", "validation_loss", 2.2, {"what": "test split"}),
        _row("megatron_pretraining", "unigram", "validation_loss", 3.2, {"what": "test split"}),
    ]
    curve = pd.DataFrame({"step": range(1, 21), "loss": [5.5 - 0.15 * step for step in range(1, 21)]})
    samples = pd.DataFrame({"x": [1]})
    return [
        (CHAPTER, "megatron_parity", parity, samples),
        (CHAPTER, "pipeline_bubble", bubble, samples),
        (CHAPTER, "layout_speed", speeds, samples),
        (CHAPTER, "megatron_pretraining", losses, curve),
    ]


def _row(
    experiment: str,
    variant: str,
    metric: str,
    value: float | None,
    params: dict,
    predicted: float | None = None,
    tolerance: float = 0.0,
) -> Row:
    timed = {"value_reason": "unavailable: made up"}
    if value is not None:
        timed = {"n": 5, "ci_low": 0.9 * value, "ci_high": 1.1 * value}
        timed |= {"check": "made up", "check_error": value if tolerance else 0.0, "check_tolerance": tolerance}
    common = {"notebook": CHAPTER, "experiment": experiment, "dtype": "fp32", "limit_source": "no limit: made up"}
    return Row(variant=variant, metric=metric, value=value, params=params, predicted=predicted, **common | timed)
