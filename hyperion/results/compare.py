"""Compare two sets of launches, A and B: which values became worse, whether this can be chance, and which values are missing.

A launch is one process that measures one version of the code. Its results are stored as a run. Typically, A and B are two
versions of the code.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from hyperion.errors import HyperionError
from hyperion.results.circumstances import require_distinct
from hyperion.results.places import find_runs
from hyperion.results.randomization import DIVISIONS, Power, fenced, log_deviations, randomization_test
from hyperion.results.rows import Row
from hyperion.results.store import Run

# Five launches of each version can be divided in comb(10, 5) = 252 ways. A division and its mirror image have the same statistic,
# so the smallest p-value is 2/252, which is far below 5 %.
RELAUNCHES = 5
SMALLEST_CHANGE = 0.03
SIGNIFICANCE = 0.05
VERDICTS = ("regression", "improvement", "indicative", "same", "missing")
# In a row of a search, the params contain the number of sampled shapes ("seen") and the result of the search: "m", "n" and "k"
# are the shape of the fastest product, which may differ between launches.
_SEARCHED, _SEARCH_RESULT = "seen", ("seen", "stopped", "m", "n", "k")


@dataclass(frozen=True)
class Comparison:
    """Comparison of one metric of one variant between the sets A and B.

    Args:
        name: experiment, variant, number format, params and rank of the compared rows, joined into one string.
        metric: name of the metric.
        value_a, value_b: typical value of each set: the geometric mean over the launches of the set, after outliers are clipped
            (see `fenced`), or the arithmetic mean if not all values are positive or if a check bounds them. None if the value is
            missing.
        change: relative change from A to B, positive if B is better. If not all values are positive, the difference is divided
            by the larger of the two absolute means. If the value is a relative error that a check bounds, the difference is
            divided by the tolerance of the check. None if the value is missing.
        spread: relative standard deviation between launches of the same set, pooled over both sets. None if each set has one
            launch, if not all values are positive, or if a check bounds them.
        p_value: p-value of the randomization test, corrected for the number of metrics. None if these runs cannot confirm a
            change.
        verdict: "regression" or "improvement" for a confirmed change; "indicative" for a change of more than 3 % that these runs
            cannot confirm; "same" if no change was found; "missing" if not all runs have the value.
        power: probability that a worsening of 3 % would be confirmed, given the spread and the number of launches. It is at
            most one half, because 3 % is also the threshold. None if these runs cannot confirm a change.
        detectable: the smallest relative worsening that would be confirmed with a probability of 80 %. None if there is none, or
            if these runs cannot confirm a change.
        reason: for a missing value, the runs that lack it, and why.
        launches_a, launches_b: values of the launches of each set. Launches without a value are omitted.
    """

    name: str
    metric: str
    value_a: float | None
    value_b: float | None
    change: float | None
    spread: float | None
    p_value: float | None
    verdict: str
    power: float | None = None
    detectable: float | None = None
    reason: str = ""
    launches_a: tuple[float, ...] = ()
    launches_b: tuple[float, ...] = ()


def relaunches(name: str) -> list[Run]:
    """Return the runs that a name on the command line refers to.

    The name belongs either to one run or to a folder that contains several runs. Links to the same run count once.

    Raises:
        HyperionError: there is no run and no folder of runs of this name.
    """
    return [Run.open(run) for run in find_runs(name)]


def compare(runs_a: list[Run], runs_b: list[Run]) -> list[Comparison]:
    """Compare all metrics for which a higher or a lower value is better.

    A change is confirmed, as a regression or an improvement, if its estimate exceeds 3 % and the randomization test over whole
    launches is significant at 5 % after correction for the number of metrics. If A and B are the same code, at most one
    comparison in twenty confirms any change, whatever the distribution of the launches. The first condition uses the estimate
    and not the lower end of its interval, which would require a change of 6 % or more.

    A change can be confirmed only if all launches come from one call of `hyperion relaunch` and each set has at least five of
    them. Such launches alternate between A and B, so that a change of the machine affects both. In all other cases, a change
    above 3 % is indicative (see `why_indicative`).

    A value is missing if some runs have it and others do not. A value that no run has is not compared.

    Returns:
        The comparisons, the worst change first. Missing values come last.

    Raises:
        HyperionError: a launch is given twice, the sets share no value, or launches from different calls of `hyperion relaunch`
            are compared.
    """
    require_distinct(runs_a, runs_b)
    _require_turns(runs_a, runs_b)
    runs = [*runs_a, *runs_b]
    rows = [_by_identity(run) for run in runs]
    values = _values(rows)
    absent = [_missing(key, rows[: len(runs_a)], rows[len(runs_a) :]) for key in values if len(values[key]) < len(runs)]
    shared: dict[tuple, float] = {}  # 1 if higher is better, -1 if lower is better
    for key in (key for key in values if len(values[key]) == len(runs)):
        # A package may have changed the unit or the direction of its metric between two runs.
        forms = sorted({(of_run[key].definition.unit, of_run[key].definition.direction) for of_run in rows})
        if len(forms) > 1:
            absent.append(_incomparable(key, values[key], len(runs_a), forms))
        elif forms[0][1] != "none":
            shared[key] = 1.0 if forms[0][1] == "higher" else -1.0
    if not shared:
        raise HyperionError(
            "the two sets of runs have no value in common that can be compared",
            where=f"{runs_a[0].folder} and {runs_b[0].folder}",
            next_step="compare runs of the same profile and data source",
        )
    # Shape (launches, keys), with the launches of A first.
    table = np.array([values[key] for key in shared], dtype=np.float64).T
    positive = np.all(table > 0, axis=0).tolist()
    confirming = not why_indicative(runs_a, runs_b)
    tolerances = [_tolerance([of_run[key] for of_run in rows]) for key in shared]
    # Ratios need positive values. Counts may be zero, so they are compared by their difference. The ratio of two errors that are
    # far below their tolerance says nothing.
    by_ratio = [p and tolerance is None for p, tolerance in zip(positive, tolerances, strict=True)]
    ratios = {key: shared[key] for key, used in zip(shared, by_ratio, strict=True) if used}
    compared = _by_ratio(ratios, table[:, by_ratio], len(runs_a), confirming)
    compared += [
        _by_difference(key, shared[key], table[:, place], len(runs_a), tolerances[place])
        for place, key in enumerate(shared)
        if not by_ratio[place]
    ]
    # `change` is positive if B is better, so ascending order lists the worst change first.
    return sorted(compared, key=lambda c: c.change or 0.0) + sorted(absent, key=lambda c: (len(c.launches_b), c.name, c.metric))


def why_indicative(runs_a: list[Run], runs_b: list[Run]) -> str:
    """Return the reason why these runs cannot confirm a change, or "" if they can confirm one."""
    if any("relaunch" not in run.information() for run in (*runs_a, *runs_b)):
        return "the runs did not alternate, so a change of the machine looks like a change of the code"
    if min(len(runs_a), len(runs_b)) < RELAUNCHES:
        return f"fewer than {RELAUNCHES} launches of each version cannot confirm a change"
    return ""


def sensitivity(compared: list[Comparison]) -> str:
    """Return a sentence about the changes that a comparison can detect, or "" if these runs cannot confirm a change."""
    testable = [c for c in compared if c.power is not None]
    if not testable:
        return ""
    powers = [c.power for c in testable if c.power is not None]
    # A value without a detectable change sorts last as infinity, so the median also counts these values.
    changes = sorted(float("inf") if c.detectable is None else c.detectable for c in testable)
    middle = changes[(len(changes) - 1) // 2]
    confirmed = "none, for half of the values" if middle == float("inf") else f"{middle:.1%}"
    return (
        f"power: a worsening of {SMALLEST_CHANGE:.0%} would be confirmed with a probability of {np.median(powers):.0%} (median "
        f"over the values; {min(powers):.0%} to {max(powers):.0%}); confirmed with a probability of 80 %: {confirmed}"
    )


def _require_turns(runs_a: list[Run], runs_b: list[Run]) -> None:
    """Raise an error if launches belong to different calls of `hyperion relaunch`, or if a set mixes both versions.

    All launches of one call are measured within a short time. Their spread does not include changes of the machine between two
    calls, so the test would report a change of the machine as a change of the code.
    """
    sides = [[run.information().get("relaunch", {}) for run in side] for side in (runs_a, runs_b)]
    calls = {launched.get("call") for side in sides for launched in side}
    where = f"{runs_a[0].folder} and {runs_b[0].folder}"
    # The call of runs that `hyperion relaunch` did not make is None. Mixing them with launches of a call is an error too.
    if len(calls) > 1:
        raise HyperionError(
            "the launches come from several calls of `hyperion relaunch`, so the two versions did not take turns",
            where=where,
            next_step="measure both versions in one call, in which their launches take turns: hyperion relaunch WORK A B",
        )
    if any(len({launched.get("side") for launched in side}) > 1 for side in sides):
        raise HyperionError(
            "one of the two sets contains launches of both versions A and B",
            where=where,
            next_step="name the two folders A and B that one call of `hyperion relaunch` wrote",
        )


def _values(rows: list[dict[tuple, Row]]) -> dict[tuple, list[float]]:
    """Return a dict that maps the key of a row to the values of this row in all runs that have one."""
    values = defaultdict(list)
    for of_run in rows:
        for key, row in of_run.items():
            if row.value is not None:
                values[key].append(row.value)
    return values


def _by_identity(run: Run) -> dict[tuple, Row]:
    """Return a dict that maps a key, which identifies what is measured, to the row of the run.

    The key of a row from the search for the fastest shape does not contain this shape, because it may differ between runs.
    """
    by_key, searches = {}, defaultdict(list)
    for row in run.rows():
        if _SEARCHED in row.params:
            given = {name: value for name, value in row.params.items() if name not in _SEARCH_RESULT}
            searches[replace(row, params=given).key].append(row)
        else:
            by_key[row.key] = row
    for key, rows in searches.items():
        # If several searches differ only in their resulting shape, their keys keep it.
        by_key |= {key: rows[0]} if len(rows) == 1 else {row.key: row for row in rows}
    return by_key


def _tolerance(rows: list[Row]) -> float | None:
    """Return the largest tolerance of the rows if each value is a relative error that its check bounds, otherwise None.

    Times and counts with such a check are compared like other times and counts: more of them is worse, also below the tolerance.
    """
    errors = [row for row in rows if row.unit == "fraction" and row.check_error == row.value]
    tolerances = [row.check_tolerance for row in errors if row.check_tolerance]
    return max(tolerances) if len(tolerances) == len(rows) else None


def _missing(key: tuple, *sides: list[dict[tuple, Row]]) -> Comparison:
    values, reasons_by_side = [], []
    for side, runs in zip("AB", sides, strict=True):
        rows = [run.get(key) for run in runs]
        values.append(tuple(row.value for row in rows if row is not None and row.value is not None))
        reasons = sorted({"no row" if row is None else row.value_reason for row in rows if row is None or row.value is None})
        if reasons:
            some = f"{len(runs) - len(values[-1])} of {len(runs)} launches of " if values[-1] else ""
            reasons_by_side.append(f"not in {some}{side}: {', '.join(reasons)}")
    return _without_verdict(key, "; ".join(reasons_by_side), values[0], values[1])


def _incomparable(key: tuple, values: list[float], launches_a: int, forms: list[tuple[str, str]]) -> Comparison:
    """Return a comparison without a result, whose reason is that the runs define this metric differently."""
    stated = ", ".join(f"[{unit}] {'no direction' if better == 'none' else f'{better} is better'}" for unit, better in forms)
    reason = f"the runs define the metric differently: {stated}"
    return _without_verdict(key, reason, tuple(values[:launches_a]), tuple(values[launches_a:]))


def _without_verdict(key: tuple, reason: str, a: tuple[float, ...], b: tuple[float, ...]) -> Comparison:
    return Comparison(_name(key), key[-1], None, None, None, None, None, "missing", reason=reason, launches_a=a, launches_b=b)


def _by_ratio(keys: dict[tuple, float], table: np.ndarray, launches_a: int, confirming: bool) -> list[Comparison]:
    """Compare positive values by their ratio.

    Args:
        keys: for each row key, 1 if a higher value is better and -1 if a lower value is better.
        table: values; shape (launches, keys), with the launches of A first.
        launches_a: number of launches of A.
        confirming: True if these runs can confirm a change (see `why_indicative`).
    """
    if not keys:
        return []
    better = np.array(list(keys.values()))
    # Logarithms turn ratios into differences: the mean of the logarithms is the logarithm of the geometric mean.
    logs = fenced(np.log(table), launches_a)
    means = [side.mean(axis=0) for side in (logs[:launches_a], logs[launches_a:])]
    changes, deviations = np.expm1(better * (means[1] - means[0])), log_deviations(logs, launches_a)
    # The sign makes larger values better for every metric, so that the test has the same direction for all keys.
    test = randomization_test(logs * better, launches_a, SMALLEST_CHANGE) if confirming else None
    power = (
        Power(
            launches_a,
            len(table) - launches_a,
            test.largest,
            divisions=DIVISIONS,
            smallest=SMALLEST_CHANGE,
            significance=SIGNIFICANCE,
        )
        if test
        else None
    )
    compared: list[Comparison] = []
    for place, key in enumerate(keys):
        change, p_value = float(changes[place]), float(test.p_values[place]) if test else None
        compared.append(
            Comparison(
                _name(key),
                key[-1],
                float(np.exp(means[0][place])),
                float(np.exp(means[1][place])),
                change,
                # With one launch per set, there is no spread within a set.
                float(np.expm1(deviations[place])) if len(table) > 2 else None,
                p_value,
                _verdict(change, p_value),
                power.chance(deviations[place], SMALLEST_CHANGE) if power else None,
                power.detectable(deviations[place]) if power else None,
                launches_a=tuple(table[:launches_a, place].tolist()),
                launches_b=tuple(table[launches_a:, place].tolist()),
            )
        )
    return compared


def _by_difference(key: tuple, better: float, values: np.ndarray, launches_a: int, tolerance: float | None) -> Comparison:
    """Compare values by their difference: errors that a check bounds, and values that are not all positive, such as counts.

    The comparison never reports such a change as confirmed.

    Args:
        key: the row key.
        better: 1 if a higher value is better, -1 if a lower value is better.
        values: values of all launches, those of A first.
        launches_a: number of launches of A.
        tolerance: divisor of the difference. None divides it by the larger of the two absolute means.
    """
    a, b = values[:launches_a], values[launches_a:]
    mean_a, mean_b = float(a.mean()), float(b.mean())
    divisor = tolerance or max(abs(mean_a), abs(mean_b))
    change = better * (mean_b - mean_a) / divisor if divisor else 0.0
    return Comparison(
        _name(key),
        key[-1],
        mean_a,
        mean_b,
        change,
        None,
        None,
        _verdict(change, None),
        launches_a=tuple(a.tolist()),
        launches_b=tuple(b.tolist()),
    )


def _name(key: tuple) -> str:
    # A key consists of notebook, experiment, variant, dtype, params, rank and metric (see `Row.key`).
    name = " ".join(str(part) for part in key[1:5] if part not in ("", "{}"))
    return name if key[5] is None else f"{name} rank {key[5]}"


def _verdict(change: float, p_value: float | None) -> str:
    if abs(change) <= SMALLEST_CHANGE:
        return "same"
    if p_value is None:
        return "indicative"
    # The estimate exceeds the threshold, but the difference is within the spread between launches.
    if p_value > SIGNIFICANCE:
        return "same"
    return "improvement" if change > 0 else "regression"
