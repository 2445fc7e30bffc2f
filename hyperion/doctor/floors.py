"""Is this machine healthy? What was measured, now or in a run, held against the floors that are known for its device."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hyperion.errors import HyperionError
from hyperion.hardware import Floor, collect_facts, detect, facts_of, floors_for
from hyperion.results import Row, Run, find_run
from hyperion.units import GIB

MET, NOT_MET, NOT_MEASURED = "met", "not met", "not measured"
# Failed measurements: they say nothing about the floor, and nothing good about the machine.
IMPOSSIBLE, WRONG = "above its limit", "wrong output"
# A run's products have sizes of their own: 4096 will do for a floor of 4000.
_SIZE_TOLERANCE = 0.05


@dataclass(frozen=True)
class Verdict:
    """One floor and what was found.

    Args:
        outcome: met, not met, not measured, or a failed measurement: above its limit, or with a wrong output.
        row: what was measured; of several devices the slowest one's. None where nothing was.
        note: why nothing was measured, or what to know beside the outcome.
        mode: how many devices worked at once, "" where only one is meant.
    """

    floor: Floor
    outcome: str
    row: Row | None = None
    note: str = ""
    mode: str = ""


@dataclass(frozen=True)
class FloorReport:
    """All verdicts about one device.

    Args:
        device: its name.
        unknown: why no floor is known for it, else "".
    """

    device: str
    verdicts: tuple[Verdict, ...] = ()
    unknown: str = ""

    @property
    def healthy(self) -> bool | None:
        """False when a floor is not met, True when all that were measured are, None when none was."""
        outcomes = {verdict.outcome for verdict in self.verdicts} - {NOT_MEASURED}
        return None if not outcomes else outcomes == {MET}

    @property
    def conclusion(self) -> str:
        """One sentence for the end of the table."""
        if self.unknown:
            return self.unknown
        met, left = (sum(v.outcome == outcome for v in self.verdicts) for outcome in (MET, NOT_MEASURED))
        measured = len(self.verdicts) - left
        also = f"; {left} not measured" if left else ""
        if self.healthy is None:
            return f"{self.device}: health not known, none of {len(self.verdicts)} floors was measured"
        if self.healthy:
            return f"{self.device}: healthy, all {measured} floors that were measured are met{also}"
        return f"{self.device}: NOT healthy, {measured - met} of {measured} floors that were measured are not met{also}"


def check_floors(run: str | None = None, on_line: Callable[[str], object] = print) -> FloorReport:
    """Measure what the floors of this machine's device name, or read it from a run.

    Args:
        run: a run's name; None measures now.
        on_line: told what is being measured.

    Raises:
        HyperionError: no such run, or a run that was replayed and measured nothing.
    """
    if run is not None:
        return floors_of_run(Run.open(find_run(run)))
    facts = collect_facts()
    device = detect(facts)
    floors, unknown = floors_for(device, max(1, len(facts.gpus)))
    if unknown:
        return FloorReport(device.name, unknown=unknown)
    from hyperion.doctor.floor_modes import measure_floors

    rows = measure_floors(floors, [detect(facts, index) for index in range(len(facts.gpus))], on_line)
    # An all-reduce takes all devices, whatever the modes of the others.
    single, reductions = ([f for f in floors if (f.quantity == "all_reduce") == collective] for collective in (False, True))
    modes = list(dict.fromkeys(row.params["mode"] for row in rows))
    verdicts = [verdict for mode in modes for verdict in judge(single, rows, mode)] + judge(reductions, rows)
    return FloorReport(device.name, tuple(verdicts))


def floors_of_run(run: Run) -> FloorReport:
    """The floors of the device that a run was measured on, held against its rows."""
    information = run.information()
    if information.get("profile") == "replay":
        raise HyperionError(
            "a replayed run measured nothing", where=run.folder, next_step="name the reference machine it was replayed from"
        )
    if "environment" not in information:
        raise HyperionError(
            "run.json does not say on which device it was measured", where=run.folder, next_step="measure it again"
        )
    return floors_of(information["environment"], run.rows())


def floors_of(environment: dict, rows: Iterable[Row]) -> FloorReport:
    """The floors of a device held against rows that were measured on it.

    Args:
        environment: the fingerprint of the machine; in a notebook `chapter.environment`, in replay the reference's.
        rows: of any experiments; `chapter.results.rows()`.

    Raises:
        HyperionError: the fingerprint has a field that is unknown, missing or of another type.
    """
    facts = facts_of(environment, "environment")
    device = detect(facts)
    floors, unknown = floors_for(device, max(1, len(facts.gpus)))
    return FloorReport(device.name, tuple(judge(floors, rows)), unknown)


def judge(floors: Iterable[Floor], rows: Iterable[Row], mode: str = "") -> list[Verdict]:
    """A verdict for each floor. Of several devices the slowest one's value counts.

    Args:
        rows: what was measured; those that no floor is about are passed over.
        mode: take only the rows whose params name this mode; "" takes all.
    """
    rows = [row for row in rows if not mode or row.params.get("mode") == mode]
    return [_verdict(floor, rows, mode) for floor in floors]


def _verdict(floor: Floor, rows: list[Row], mode: str) -> Verdict:
    found = [row for row in rows if _about(floor, row)]
    by_device: dict[int | None, list[Row]] = {}
    for row in found:
        if row.value is not None:
            by_device.setdefault(row.rank, []).append(row)
    if not by_device:
        reason = found[0].value_reason if found else _absent(floor, rows)
        return Verdict(floor, NOT_MEASURED, note=reason, mode=mode)
    best = [_best(floor, of_device) for of_device in by_device.values()]
    for row in best:
        error, tolerance = _number(row.check_error), _number(row.check_tolerance)
        # Not `error > tolerance`: a NaN must fail.
        if row.check and not error <= tolerance:
            return Verdict(floor, WRONG, row, f"{row.check}: off by {error:.2g}", mode)
        if row.limit is not None and _number(row.value) > row.limit:
            return Verdict(floor, IMPOSSIBLE, row, f"limit {row.limit:.6g}: a failed measurement", mode)
    slowest = min(best, key=lambda row: _number(row.value))
    met = _number(slowest.value) >= floor.value
    notes = [_otherwise(floor, slowest)]
    if _number(slowest.ci_low) < floor.value <= _number(slowest.ci_high):
        notes.append("the interval includes the floor: measure it again")
    return Verdict(floor, MET if met else NOT_MET, slowest, "; ".join(filter(None, notes)), mode)


def _number(value: float | None) -> float:
    """Return the value, NaN where a row has none: no comparison holds for it."""
    return math.nan if value is None else value


def _otherwise(floor: Floor, row: Row) -> str:
    """How a row's size and format differ from the floor's, "" where they do not."""
    size = row.params.get({"gemm_tflops": "m", "bandwidth_gb_s": "elements"}.get(floor.metric, "bytes"))
    parts = [f"size {size:,}"] if size != floor.size else []
    parts += [row.dtype] if row.dtype != floor.dtype else []
    return f"measured at {' and '.join(parts)}" if parts else ""


def _about(floor: Floor, row: Row) -> bool:
    if row.metric != floor.metric:
        return False
    if floor.quantity == "gemm":
        sizes = [row.params.get(name) for name in "mnk"]
        same = all(size and abs(size / floor.size - 1) <= _SIZE_TOLERANCE for size in sizes)
        return same and row.dtype == floor.dtype and row.variant == "torch.mm" and row.params.get("data", "normal") == "normal"
    if floor.quantity == "all_reduce":
        enough = row.params.get("bytes", 0) >= (1 - _SIZE_TOLERANCE) * floor.size
        return row.variant == "all_reduce" and row.params.get("ranks") == floor.ranks and enough
    return row.variant == floor.quantity and not row.hot and "elements" in row.params


def _best(floor: Floor, rows: list[Row]) -> Row:
    """Of one device's rows that of the floor's format and the largest arrays: smaller ones may owe their rate to a cache."""
    rows = [row for row in rows if row.dtype == floor.dtype] or rows
    if floor.metric == "bandwidth_gb_s":
        largest = max(row.params["elements"] for row in rows)
        rows = [row for row in rows if row.params["elements"] == largest]
    return max(rows, key=lambda row: _number(row.value))


def _absent(floor: Floor, rows: list[Row]) -> str:
    if floor.quantity == "all_reduce":
        ranks = sorted(
            {row.params["ranks"] for row in rows if row.metric == floor.metric and row.params.get("ranks") is not None}
        )
        others = f", there are some of {', '.join(map(str, ranks))}" if ranks and floor.ranks not in ranks else ""
        return f"no all-reduce of {floor.size / GIB:g} GiB on {floor.ranks} devices{others}"
    size = f" of {floor.size} x {floor.size} x {floor.size}" if floor.quantity == "gemm" else ""
    return f"no row of {floor.quantity}{size} in {floor.dtype}"
