"""The training ladder as one table: time, memory and loss of each rung, and what it changed beside the one before."""

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from hyperion.figures.formats import number
from hyperion.figures.material import measured
from hyperion.results import Row

EXPERIMENT = "training_ladder"


@dataclass(frozen=True)
class Step:
    """The rows of one rung that was timed.

    Attributes:
        time: of a step.
        memory: the allocator's peak; where there is none, the tensors' own; None where neither was counted.
        speedup: over the rung before, None for the first.
        early, late: differences of the losses from the first rung's in the first steps and in the last ones; None for the
            first rung, and early for runs that compared the last ones alone.
    """

    name: str
    time: Row
    memory: Row | None
    speedup: Row | None
    early: Row | None
    late: Row | None


def ladders(rows: Iterable[Row]) -> dict[str, list[Step]]:
    """The timed rungs of each model, from the bottom."""
    found: dict[str, list[Step]] = {}
    rows = measured(rows)
    for time in (row for row in rows if row.metric == "step_time_s"):
        steps = found.setdefault(time.variant, [])
        own = [row for row in rows if (row.variant, row.params.get("rung")) == (time.variant, time.params["rung"])]
        memory = _first(own, "peak_memory_gib") or _first(own, "tensor_memory_gib")
        speedup = _first(own, "speedup", over=steps[-1].name) if steps else None
        steps.append(Step(time.params["rung"], time, memory, speedup, *_differences(own)))
    return found


def ladder_table(rows: Iterable[Row]) -> pd.DataFrame:
    """A line for each rung of each model, with 95 % intervals; changes are those from the rung before, of the loss from the
    first."""
    return pd.DataFrame(
        [
            {
                "model": model,
                "rung": step.name,
                "format": step.time.dtype,
                "ms a step": number(1e3 * step.time.value, 3),
                "Δ time": _change_of_time(step.speedup),
                "GiB": number(step.memory.value, 3) if step.memory else "not counted",
                "Δ memory": _change_of_memory(before, step),
                "Δ loss early": _change_of_loss(step.early),
                "Δ loss late": _change_of_loss(step.late),
            }
            for model, steps in ladders(rows).items()
            for before, step in zip([None, *steps], steps, strict=False)
        ]
    )


def _first(rows: list[Row], metric: str, **params) -> Row | None:
    return next((row for row in rows if row.metric == metric and params.items() <= row.params.items()), None)


def _differences(rows: list[Row]) -> tuple[Row | None, Row | None]:
    early = _first(rows, "relative_difference", window="early")
    return early, _first(rows, "relative_difference", window="late") or _first(rows, "relative_difference")


def _change_of_time(speedup: Row | None) -> str:
    if speedup is None:
        return ""
    # Time is one over speed: the ends of the interval change places.
    value, low, high = (100 * (1 / ratio - 1) for ratio in (speedup.value, speedup.ci_high, speedup.ci_low))
    return f"{value:+.1f} % [{low:+.1f}, {high:+.1f}]"


def _change_of_memory(before: Step | None, step: Step) -> str:
    if before is None or None in (before.memory, step.memory) or before.memory.metric != step.memory.metric:
        return ""
    return f"{100 * (step.memory.value / before.memory.value - 1):+.1f} %"


def _change_of_loss(row: Row | None) -> str:
    if row is None:
        return ""
    value, allowed = (number(100 * share, 2) for share in (row.value, row.check_tolerance))
    return f"{value} % (allowed {allowed} %)"
