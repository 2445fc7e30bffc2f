"""List the differences between the circumstances of two sets of runs: device, versions, settings and data.

This module also checks that no launch is given twice. A launch is one process that measures one version of the code, and is
stored as a run.
"""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyperion.errors import HyperionError
from hyperion.results.store import Run

# A difference between two clocks is listed only if it is larger than this share.
CLOCK_DIFFERENCE = 0.03
# These circumstances are listed first, in this order. All others follow in alphabetical order.
_FIRST = (
    "device",
    "profile",
    "data source",
    "data source of rows",
    "seed",
    "throttled rows",
    "clock_mhz",
    "torch",
    "driver",
    "source.commit",
    "source.hash",
    "source.modified",
)
# Fields that `hyperion relaunch` records for a launch and that are not circumstances. The first three identify the launch. The
# list of files is omitted because its digest is listed.
_IDENTITY = ("call", "side", "launch", "files")
_DIGEST = re.compile("[0-9a-f]{32,}")  # only the first characters of a digest are shown
_NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Circumstance:
    """A circumstance that is not the same in all runs.

    Args:
        name: name of the circumstance.
        a, b: values of the circumstance in the runs of set A and in the runs of set B, formatted as strings.
    """

    name: str
    a: str
    b: str


def circumstances(runs_a: list[Run], runs_b: list[Run]) -> list[Circumstance]:
    """Return every circumstance that is not the same in all runs of both sets, the most important first.

    The function compares the device, the profile, the data source, the seed, software versions, the source code and everything
    else in the recorded environment. It also compares the sizes and the data of each experiment that both sets have. Throttled
    rows are always listed. Clocks are listed if the median clocks of a value differ by more than 3 %.
    """
    sides = [_recorded(runs) for runs in (runs_a, runs_b)]
    differences = [_throttled(runs_a, runs_b), _clocks(runs_a, runs_b)]
    for name in sides[0].keys() | sides[1].keys():
        texts = [side.get(name, {_NOT_RECORDED}) for side in sides]
        if len(texts[0] | texts[1]) > 1 and not _of_one_side(name, sides):
            differences.append(Circumstance(name, *(", ".join(sorted(text)) for text in texts)))
    order = {name: place for place, name in enumerate(_FIRST)}
    return sorted(
        filter(None, differences), key=lambda one: (order.get(one.name, len(order)), not _of_experiment(one.name), one.name)
    )


def require_distinct(runs_a: list[Run], runs_b: list[Run]) -> None:
    """Raise an error if the same launch is given twice, in one set or in both sets.

    Two runs are the same launch if they have the same folder, if one is a copy of the other, or if `hyperion relaunch` gave both
    the same launch number in the same call.

    Raises:
        HyperionError: a launch is given twice. The message names both folders.
    """
    seen: dict[object, str] = {}
    for side, runs in (("A", runs_a), ("B", runs_b)):
        for run in runs:
            here = f"{run.folder} ({side})"
            for why, identity in _identities(run):
                if identity in seen:
                    raise HyperionError(
                        f"the same launch is given twice: {why}",
                        where=f"{seen[identity]} and {here}",
                        next_step="name each launch only once; a copy of a run is not a new measurement",
                    )
                seen[identity] = here


def _identities(run: Run) -> Iterator[tuple[str, object]]:
    yield "both names stand for the same folder", Path(run.folder).resolve()
    launched = run.information().get("relaunch")
    if launched:
        place = tuple(launched.get(part) for part in ("call", "side", "launch"))
        yield f"both are launch {place[2]} of version {place[1]} in the same call of `hyperion relaunch`", place
    # Compare measured values only, because predictions may be added later. The times of two runs are never equal in every bit.
    # `repr` keeps every bit, so that two runs differ even if their values agree after rounding.
    measured = sorted(repr((row.key, row.value, row.value_reason, row.n, row.ci_low, row.ci_high)) for row in run.rows())
    if measured:
        yield (
            "all values are equal in every bit, so one run is a copy of the other",
            hashlib.sha256("\n".join(measured).encode()).hexdigest(),
        )


def _recorded(runs: list[Run]) -> dict[str, set[str]]:
    """Return a dict that maps the name of a circumstance to the set of its values in these runs."""
    recorded = defaultdict(set)
    for run in runs:
        for name, value in _statements(run):
            recorded[name].add(_text(value))
    return recorded


def _statements(run: Run) -> Iterator[tuple[str, object]]:
    information, rows = run.information(), run.rows()
    # A run has one environment in run.json, and others if it was continued on another machine or with other versions.
    environments = [information.get("environment", {}), *run.environments().values()]
    for environment in filter(None, environments):
        yield "device", _device(environment)
        yield from _flat(environment)
    for name in ("profile", "data_source", "seed"):
        if name in information:
            yield name.replace("_", " "), information[name]
    launched = information.get("relaunch", {})
    for name, value in launched.items():
        if name not in _IDENTITY:
            yield f"relaunch {name}", value
    yield "data source of rows", ", ".join(sorted({row.data_source for row in rows} - {""}))
    for notebook, experiment in sorted({(row.notebook, row.experiment) for row in rows}):
        finished = run.finished(notebook, experiment) or {}
        provenance = finished.get("provenance", {})
        # A run may be continued with other settings, so each experiment records its own settings.
        for name in ("profile", "data_source", "seed"):
            if name in provenance:
                yield name.replace("_", " "), provenance[name]
        if not launched:  # for launches of `hyperion relaunch`, the sizes would repeat the fields above
            yield from _flat(provenance.get("sizes", {}), f"sizes of {notebook}/{experiment}: ")
        yield from _flat(finished.get("data", {}), f"data of {notebook}/{experiment}: ")


def _device(environment: dict) -> str:
    gpus = Counter(gpu.get("name") for gpu in environment.get("gpus") or [])
    cpu = environment.get("cpu") or {}
    return ", ".join(f"{count} x {name}" for name, count in gpus.items()) or f"{cpu.get('name')} ({cpu.get('cores')} cores)"


def _flat(content: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in content.items():
        # A list of devices becomes one string per field. The number of devices is listed under "device".
        if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            value = {field: ", ".join(sorted({_text(entry.get(field)) for entry in value})) for field in value[0]}
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _of_one_side(name: str, sides: list[dict[str, set[str]]]) -> bool:
    """Return True if the circumstance belongs to an experiment that only one set has.

    The comparison lists the values of this experiment as missing, so the circumstance need not be listed too.
    """
    # The name is "sizes of NOTEBOOK/EXPERIMENT: FIELD". The part before ": " identifies the experiment.
    experiment = name.partition(": ")[0] + ": "
    return _of_experiment(name) and not all(any(other.startswith(experiment) for other in side) for side in sides)


def _of_experiment(name: str) -> bool:
    return name.startswith(("sizes of ", "data of "))


def _throttled(runs_a: list[Run], runs_b: list[Run]) -> Circumstance | None:
    texts, any_throttled = [], False
    for runs in (runs_a, runs_b):
        states = [row.throttle for run in runs for row in run.rows() if row.throttle is not None]
        # None means unreadable, "none" means that the device reported no throttling.
        reasons = Counter(state for state in states if state != "none")
        any_throttled |= bool(reasons)
        text = f"{reasons.total()} of {len(states)} rows" + (f" ({', '.join(sorted(reasons))})" if reasons else "")
        texts.append(text if states else "unreadable")
    return Circumstance("throttled rows", *texts) if any_throttled else None


def _clocks(runs_a: list[Run], runs_b: list[Run]) -> Circumstance | None:
    a, b = (_clocks_of(runs) for runs in (runs_a, runs_b))
    shared = sorted(a.keys() & b.keys(), key=repr)
    # The absolute logarithm of the ratio is the relative difference for small differences, and it is symmetric in A and B.
    apart = [key for key in shared if abs(np.log(np.median(a[key]) / np.median(b[key]))) > CLOCK_DIFFERENCE]
    if not apart:
        return None
    medians = [f"{np.median([np.median(side[key]) for key in apart]):.0f} MHz" for side in (a, b)]
    return Circumstance("clock_mhz", f"{medians[0]} (median of {len(apart)} of {len(shared)} values)", medians[1])


def _clocks_of(runs: list[Run]) -> dict[tuple, list[float]]:
    clocks = defaultdict(list)
    for row in (row for run in runs for row in run.rows()):
        if row.clock_mhz is not None:
            clocks[row.key].append(row.clock_mhz)
    return clocks


def _text(value) -> str:
    if value in ("", None):
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text[:12] if _DIGEST.fullmatch(text) else text
