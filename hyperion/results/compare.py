"""Comparing two sets of relaunches: what became slower, and is it more than chance and more than noise?"""

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hyperion.errors import HyperionError
from hyperion.results.folders import find_run
from hyperion.results.metrics import metric_named
from hyperion.results.power import Rule, detectable_change, log_deviation, power
from hyperion.results.rows import Row
from hyperion.results.statistics import holm, welch_p_value
from hyperion.results.store import RUN, Run

RELAUNCHES = 5
SMALLEST_CHANGE = 0.03
SIGNIFICANCE = 0.05
# A row of a search tells how much it has seen; what it found then stands in its params as well.
_SEARCHED, _FOUND = "seen", ("seen", "stopped", "m", "n", "k")


@dataclass(frozen=True)
class Comparison:
    """One metric of one variant in the two sets.

    Args:
        change: relative change of the median from A to B, positive where B is better.
        spread: largest relative range among the relaunches of one side.
        p_value: Welch's test on the logarithms, corrected by Holm over all metrics compared; None with too few relaunches.
        verdict: regression, improvement, same, or unconfirmed (moved, but fewer than five relaunches a side).
        power: the chance that a change of 3 % for the worse would have been confirmed, given how the relaunches scatter and
            how many there are; None with too few. 3 % is the threshold itself, so that it is a half at most.
        detectable: the smallest change for the worse that would have been confirmed four times out of five; None with too
            few relaunches, or where none would.
    """

    name: str
    metric: str
    median_a: float
    median_b: float
    change: float
    spread: float
    p_value: float | None
    verdict: str
    power: float | None = None
    detectable: float | None = None


def relaunches(name: str) -> list[Run]:
    """The runs behind a command-line name: one run, or every run in a folder of runs."""
    folder = Path(name)
    if folder.is_dir() and not (folder / RUN).is_file():
        runs = sorted(path.parent for path in folder.glob(f"*/{RUN}") if not path.parent.is_symlink())
        if not runs:
            raise HyperionError(
                "no run in this folder", where=folder, next_step="name a run, or a folder of relaunches"
            )
        return [Run.open(run) for run in runs]
    return [Run.open(find_run(name))]


def compare(runs_a: list[Run], runs_b: list[Run]) -> list[Comparison]:
    """Compare every metric with a better direction that all runs of both sides hold, worst change first.

    A change is confirmed only over at least five relaunches a side, at 5 % after Holm's correction over all metrics, and
    when it exceeds both 3 % and the spread between relaunches.

    Raises:
        HyperionError: the two sides share no value, or are launches of `hyperion relaunch` that did not take turns.
    """
    values_a, values_b = _values(runs_a), _values(runs_b)
    shared = [key for key, a in values_a.items() if len(a) == len(runs_a) and len(values_b.get(key, ())) == len(runs_b)]
    if not shared:
        raise HyperionError(
            "the two sides share no comparable value",
            where=f"{runs_a[0].folder} and {runs_b[0].folder}",
            next_step="compare runs of the same profile and data source",
        )
    _require_turns(runs_a, runs_b)
    enough = min(len(runs_a), len(runs_b)) >= RELAUNCHES
    p_values = holm([welch_p_value(values_a[key], values_b[key]) for key in shared]) if enough else [None] * len(shared)
    rule = Rule(len(runs_a), len(runs_b), SIGNIFICANCE / len(shared), SMALLEST_CHANGE) if enough else None
    compared = [_compared(key, values_a[key], values_b[key], p, rule) for key, p in zip(shared, p_values, strict=True)]
    return sorted(compared, key=lambda comparison: comparison.change)


def sensitivity(compared: list[Comparison]) -> str:
    """What a comparison could have seen, in a sentence; "" with too few relaunches to confirm anything."""
    powers = [c.power for c in compared if c.power is not None]
    if not powers:
        return ""
    changes = sorted(float("inf") if c.detectable is None else c.detectable for c in compared)
    middle = changes[(len(changes) - 1) // 2]
    confirmed = "none, for half of the values" if middle == float("inf") else f"{middle:.1%}"
    return (
        f"power: a change of {SMALLEST_CHANGE:.0%} for the worse would have been confirmed with a chance of "
        f"{np.median(powers):.0%} (median over the values; {min(powers):.0%} to {max(powers):.0%}), and four times out of "
        f"five one of {confirmed}"
    )


def _require_turns(runs_a: list[Run], runs_b: list[Run]) -> None:
    """Launches that took turns have seen the machine once, however many they are: their scatter does not hold what changed
    until another call, so that a change of the machine would be confirmed as one of the code."""
    a, b = ({run.information().get("relaunch", {}).get("call") for run in side} for side in (runs_a, runs_b))
    if a != b:
        raise HyperionError(
            "launches of different calls of `hyperion relaunch` did not take turns with each other",
            where=f"{runs_a[0].folder} and {runs_b[0].folder}",
            next_step="have both versions take turns: hyperion relaunch WORK A B",
        )


def _values(runs: list[Run]) -> dict[tuple, list[float]]:
    values = defaultdict(list)
    for run in runs:
        for row in run.rows():
            # A logarithm needs a positive value; a zero (no tokens, no loss) says nothing about speed.
            if row.value is not None and row.value > 0 and metric_named(row.metric).direction != "none":
                values[_identity(row)].append(row.value)
    return values


def _identity(row: Row) -> tuple:
    """The row's key without what a search came upon: its winner may have another shape in each relaunch."""
    if _SEARCHED not in row.params:
        return row.key
    return replace(row, params={name: value for name, value in row.params.items() if name not in _FOUND}).key


def _compared(key: tuple, a: list[float], b: list[float], p_value: float | None, rule: Rule | None) -> Comparison:
    metric = key[-1]
    median_a, median_b = float(np.median(a)), float(np.median(b))
    change = median_b / median_a - 1
    if metric_named(metric).direction == "lower":
        change = median_a / median_b - 1
    spread = max((max(side) - min(side)) / float(np.median(side)) for side in (a, b))
    name = " ".join(str(part) for part in key[1:5] if part not in ("", "{}"))
    seen = (None, None)
    if rule is not None:
        deviation = log_deviation(a, b)
        seen = power(rule, deviation, SMALLEST_CHANGE), detectable_change(rule, deviation)
    return Comparison(name, metric, median_a, median_b, change, spread, p_value, _verdict(change, spread, p_value), *seen)


def _verdict(change: float, spread: float, p_value: float | None) -> str:
    if abs(change) <= max(SMALLEST_CHANGE, spread if p_value is not None else 0):
        return "same"
    if p_value is None:
        return "unconfirmed"
    if p_value >= SIGNIFICANCE:
        return "same"
    return "improvement" if change > 0 else "regression"
