"""Judge the health of a machine by comparing measured values with floors.

A floor is the smallest value that a healthy device must reach, for example a rate of matrix products or a bandwidth.

Each value is measured in up to three modes: on one device, on both dies of an MI250X module at the same time, and on all devices
at the same time. The two dies of a module share its power, so each die may be slower while the other one also works. Each device
has its own process. All processes of a mode start together, and each keeps its device busy until the slowest one has finished, so
every measurement is made under full load.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch.distributed as dist
from rich.table import Table

from hyperion.doctor.machine_rows import all_reduce_row, gemm_rows, stream_rows, with_params
from hyperion.errors import HyperionError
from hyperion.hardware import Device, Floor, collect_facts, detect, facts_of, floors_for
from hyperion.hardware.telemetry import gcd_position
from hyperion.processes import Job, roll_call, run_ranks, world
from hyperion.processes.group import StoreBarrier
from hyperion.results import Row, Run, find_run
from hyperion.units import GIB

ONE, MODULE, ALL = "one device", "both dies of a module", "all devices"
_HANG_S = 120.0
MET, NOT_MET, NOT_MEASURED = "met", "not met", "not measured"
# Outcomes of failed measurements, which do not show whether the floor is met.
IMPOSSIBLE, WRONG = "above its limit", "wrong output"
# Relative tolerance for sizes: for example, a matrix product of size 4096 in a run is compared with a floor for size 4000.
_SIZE_TOLERANCE = 0.05
COLUMNS = ("at work", "quantity", "floor", "measured [95 % CI]", "power", "verdict", "source")
_COLOURS = {MET: "green", NOT_MEASURED: "yellow"}


@dataclass(frozen=True)
class FloorResult:
    """The result of comparing a measured value with one floor.

    Args:
        floor: the floor.
        outcome: "met", "not met" or "not measured". If the measured value cannot be trusted, "above its limit" or "wrong output".
        row: the measured row, or None if nothing was measured. With several devices, the row of the slowest device.
        note: reason why nothing was measured, or a remark on the outcome.
        mode: which devices worked at the same time. "" if only one mode was measured.
    """

    floor: Floor
    outcome: str
    row: Row | None = None
    note: str = ""
    mode: str = ""


@dataclass(frozen=True)
class FloorReport:
    """The results for all floors of one device.

    Args:
        device: name of the device.
        verdicts: one result per floor and mode.
        unknown: reason why no floor is known for the device, or "".
    """

    device: str
    verdicts: tuple[FloorResult, ...] = ()
    unknown: str = ""

    @property
    def healthy(self) -> bool | None:
        """False if a measured floor is not met, True if all measured floors are met, None if no floor was measured."""
        outcomes = {verdict.outcome for verdict in self.verdicts} - {NOT_MEASURED}
        return None if not outcomes else outcomes == {MET}

    @property
    def conclusion(self) -> str:
        """The conclusion in one sentence."""
        if self.unknown:
            return self.unknown
        met, left = (sum(v.outcome == outcome for v in self.verdicts) for outcome in (MET, NOT_MEASURED))
        measured = len(self.verdicts) - left
        also = f"; {left} not measured" if left else ""
        if self.healthy is None:
            return f"{self.device}: health unknown, because none of the {len(self.verdicts)} floors was measured"
        if self.healthy:
            return f"{self.device}: healthy, all {measured} measured floors are met{also}"
        return f"{self.device}: NOT healthy, {measured - met} of {measured} measured floors are not met{also}"


def check_floors(run: str | None = None, on_line: Callable[[str], object] = print) -> FloorReport:
    """Compare this machine, or the machine that measured a run, with the floors of its device.

    Args:
        run: name of a run whose rows are compared. None measures this machine now.
        on_line: called with a line of text before each measurement.

    Raises:
        HyperionError: the run does not exist, or it is a replay and has no measurements of its own.
    """
    if run is not None:
        return floors_of_run(Run.open(find_run(run)))
    facts = collect_facts()
    device = detect(facts)
    floors, unknown = floors_for(device, max(1, len(facts.gpus)))
    if unknown:
        return FloorReport(device.name, unknown=unknown)
    rows = measure_floors(floors, [detect(facts, index) for index in range(len(facts.gpus))], on_line)
    # An all-reduce always uses all devices, so its floors are compared once and not in every mode.
    single, reductions = ([f for f in floors if (f.quantity == "all_reduce") == collective] for collective in (False, True))
    modes = list(dict.fromkeys(row.params["mode"] for row in rows))
    verdicts = [verdict for mode in modes for verdict in judge(single, rows, mode)] + judge(reductions, rows)
    return FloorReport(device.name, tuple(verdicts))


def floors_of_run(run: Run) -> FloorReport:
    """Compare the rows of a run with the floors of the device on which it was measured.

    Raises:
        HyperionError: the run is a replay, or the environment in run.json is missing or invalid.
    """
    information = run.information()
    if information.get("profile") == "replay":
        raise HyperionError(
            "this run is a replay and has no measurements of its own",
            where=run.folder,
            next_step="name the reference machine whose measurements this run replays",
        )
    if "environment" not in information:
        raise HyperionError(
            "run.json does not name the device of the run", where=run.folder, next_step="run the experiments again"
        )
    return floors_of(information["environment"], run.rows())


def floors_of(environment: dict, rows: Iterable[Row]) -> FloorReport:
    """Compare measured rows with the floors of the device that measured them.

    Args:
        environment: description of the machine. In a notebook, this is `chapter.environment`.
        rows: rows of any experiments. In a notebook, these are `chapter.results.rows()`.

    Raises:
        HyperionError: a field of the environment is unknown or missing, or has a wrong type.
    """
    facts = facts_of(environment, "environment")
    device = detect(facts)
    floors, unknown = floors_for(device, max(1, len(facts.gpus)))
    return FloorReport(device.name, tuple(judge(floors, rows)), unknown)


def judge(floors: Iterable[Floor], rows: Iterable[Row], mode: str = "") -> list[FloorResult]:
    """Return one result per floor. If several devices were measured, the value of the slowest device is compared.

    Args:
        floors: the floors.
        rows: measured rows. Rows for which there is no floor are ignored.
        mode: if not "", use only rows with this value of `params["mode"]`.
    """
    rows = [row for row in rows if not mode or row.params.get("mode") == mode]
    return [_verdict(floor, rows, mode) for floor in floors]


def floor_frame(report: FloorReport) -> pd.DataFrame:
    """Return a DataFrame of strings with the columns `COLUMNS` and one line per floor and mode. Without floors, it is empty."""
    return pd.DataFrame([_cells(verdict) for verdict in report.verdicts], columns=list(COLUMNS))


def floor_table(report: FloorReport) -> Table:
    """Return the content of `floor_frame` as a table for the terminal. The colour shows whether a floor is met."""
    table = Table(*(column.replace("[", "\\[") for column in COLUMNS), pad_edge=False)
    for verdict in report.verdicts:
        cells = [cell.replace("[", "\\[") for cell in _cells(verdict)]
        cells[COLUMNS.index("verdict")] = f"[{_COLOURS.get(verdict.outcome, 'red')}]{cells[COLUMNS.index('verdict')]}[/]"
        table.add_row(*cells)
    return table


def modes_of(devices: list[Device], root: Path = Path("/")) -> dict[str, list[int]]:
    """Return, for each mode that this machine can measure, the indices of the devices that work at the same time.

    Args:
        devices: all devices of the machine.
        root: folder that contains sys/. Linux's sysfs shows which devices are dies of the same MI250X module.
    """
    modes = {ONE: [0]}
    # The two dies of a module have neighbouring PCI addresses.
    ordered = sorted(devices, key=lambda device: device.pci_address or "")
    for first, second in itertools.pairwise(ordered):
        if (gcd_position(first, root), gcd_position(second, root)) == ("first", "second"):
            modes[MODULE] = [first.index, second.index]
            break
    # With a single module, "all devices" would be the same as the mode of the module.
    if len(devices) > 1 and len(devices) != len(modes.get(MODULE, ())):
        modes[ALL] = list(range(len(devices)))
    return modes


def measure_floors(floors: list[Floor], devices: list[Device], on_line: Callable[[str], object]) -> list[Row]:
    """Measure the quantities of the floors in every mode. Return rows of every device, with the mode in `params["mode"]`.

    Raises:
        RankError: the process of a device failed or made no progress.
    """
    params = {"floors": [asdict(floor) for floor in floors], "modes": modes_of(devices), "time_limit_s": 2.0, "heat_s": 2.0}
    job = Job(measure_on_rank, params, timeout_s=900.0, ranks=len(devices))
    answers = run_ranks(job, on_line=on_line)
    return [Row(**row) for answer in answers for row in answer["rows"]]


def measure_on_rank(floors: list[dict], modes: dict[str, list[int]], time_limit_s: float, heat_s: float) -> dict:
    """Measure the device of this rank in each mode, and then the all-reduces over all devices. Every rank must call this.

    Args:
        floors: fields of each floor.
        modes: for each mode, the ranks that measure at the same time.
        time_limit_s: limit for each measurement, in seconds.
        heat_s: seconds of untimed work before each measurement, in which clocks and power become stable.
    """
    here, wanted = world(), [Floor(**floor) for floor in floors]
    barrier, rows = StoreBarrier(), []
    for mode, ranks in modes.items():
        for number, floor in enumerate(wanted if here.rank in ranks else ()):
            if floor.quantity != "all_reduce":
                if here.rank == 0:
                    print(f"{mode}: {floor.quantity} {floor.dtype}", flush=True)
                measure = functools.partial(measure_floor, floor, here.device, time_limit_s)
                together = _Together(barrier, f"{mode}/{number}", len(ranks))
                rows += with_params(together.measure_with_others(measure, heat_s), here.rank, mode=mode)
        # Ranks that do not take part in a mode wait here, and their devices are idle during the measurement.
        barrier.wait(f"{mode}/end", here.size)
    rows += with_params(_all_reduces(wanted, time_limit_s), rank=here.rank, mode=list(modes)[-1])
    return {"rows": [asdict(row) for row in rows]}


def measure_floor(floor: Floor, device: Device, time_limit_s: float) -> list[Row]:
    """Measure the quantity of one floor on one device.

    As for the published floors, matrix products are measured with hot caches, and memory streams with cold caches.
    """
    if floor.quantity == "gemm":
        return gemm_rows(device, floor.dtype, floor.size, cold=False, time_limit_s=time_limit_s)
    return stream_rows(device, floor.quantity, floor.dtype, floor.size, time_limit_s=time_limit_s)


@dataclass(frozen=True)
class _Together:
    """The ranks (one process for each device) that measure at the same time."""

    barrier: StoreBarrier
    name: str
    ranks: int

    def measure_with_others(self, measure: Callable[[], list[Row]], heat_s: float) -> list[Row]:
        """Warm up the device, call `measure` at the same time on all ranks, and return its rows.

        Afterwards, the device is kept busy until all ranks have finished.
        """
        started = time.monotonic()
        while time.monotonic() - started < heat_s:
            measure()
        # All devices are warm now. All ranks start the measured call together.
        self.barrier.wait(f"{self.name}/start", self.ranks)
        rows = measure()
        self.barrier.arrive(f"{self.name}/done")
        # The slowest rank must be measured while all other devices are working, so keep this device busy.
        while not self.barrier.is_complete(f"{self.name}/done", self.ranks):
            measure()
        return rows


def _all_reduces(floors: list[Floor], time_limit_s: float) -> list[Row]:
    """Measure one all-reduce for each floor that applies to this number of ranks."""
    here = world()
    wanted = [floor for floor in floors if floor.quantity == "all_reduce" and floor.ranks == here.size]
    if not wanted or here.size < 2:
        return []
    with roll_call(_HANG_S) as roll:
        rows = [all_reduce_row(here, roll, floor.dtype, floor.size, time_limit_s=time_limit_s) for floor in wanted]
        roll.step("the end of the measurement")
        # No rank may leave the group while another one is still in a collective.
        dist.barrier()
    return rows


def _verdict(floor: Floor, rows: list[Row], mode: str) -> FloorResult:
    matching = [row for row in rows if _matches(floor, row)]
    by_device: dict[int | None, list[Row]] = {}
    for row in matching:
        if row.value is not None:
            by_device.setdefault(row.rank, []).append(row)
    if not by_device:
        reason = matching[0].value_reason if matching else _why_absent(floor, rows)
        return FloorResult(floor, NOT_MEASURED, note=reason, mode=mode)
    best = [_best(floor, of_device) for of_device in by_device.values()]
    for row in best:
        error, tolerance = _number(row.check_error), _number(row.check_tolerance)
        # Written with `not <=`, so that a NaN fails.
        if row.check and not error <= tolerance:
            return FloorResult(floor, WRONG, row, f"{row.check}: the error is {error:.2g}, above the tolerance", mode)
        if row.limit is not None and _number(row.value) > row.limit:
            note = f"the value is above its limit of {row.limit:.6g}, so the measurement is wrong"
            return FloorResult(floor, IMPOSSIBLE, row, note, mode)
    # A floor applies to every device, so the slowest device decides.
    slowest = min(best, key=lambda row: _number(row.value))
    met = _number(slowest.value) >= floor.value
    notes = [_differences(floor, slowest)]
    if _number(slowest.ci_low) < floor.value <= _number(slowest.ci_high):
        notes.append("the confidence interval includes the floor: measure again")
    return FloorResult(floor, MET if met else NOT_MET, slowest, "; ".join(filter(None, notes)), mode)


def _number(value: float | None) -> float:
    """Return the value, or NaN if it is None. Every comparison with NaN is false."""
    return math.nan if value is None else value


def _differences(floor: Floor, row: Row) -> str:
    """Return a note about the size and the number format of a row if they differ from those of the floor, else ""."""
    size = row.params.get({"gemm_tflops": "m", "bandwidth_gb_s": "elements"}.get(floor.metric, "bytes"))
    parts = [f"size {size:,}"] if size != floor.size else []
    parts += [row.dtype] if row.dtype != floor.dtype else []
    return f"measured at {' and '.join(parts)}" if parts else ""


def _matches(floor: Floor, row: Row) -> bool:
    """Return True if the row measures the quantity of the floor."""
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
    """Return the row of one device with the highest rate. Rows in the number format of the floor are preferred.

    For a bandwidth, only rows with the largest arrays are used, because smaller arrays may fit into a cache.
    """
    rows = [row for row in rows if row.dtype == floor.dtype] or rows
    if floor.metric == "bandwidth_gb_s":
        largest = max(row.params["elements"] for row in rows)
        rows = [row for row in rows if row.params["elements"] == largest]
    return max(rows, key=lambda row: _number(row.value))


def _why_absent(floor: Floor, rows: list[Row]) -> str:
    if floor.quantity == "all_reduce":
        ranks = sorted(
            {row.params["ranks"] for row in rows if row.metric == floor.metric and row.params.get("ranks") is not None}
        )
        others = f"; measured numbers of devices: {', '.join(map(str, ranks))}" if ranks and floor.ranks not in ranks else ""
        return f"no all-reduce of {floor.size / GIB:g} GiB on {floor.ranks} devices{others}"
    size = f" of {floor.size} x {floor.size} x {floor.size}" if floor.quantity == "gemm" else ""
    return f"no row of {floor.quantity}{size} in {floor.dtype}"


def _cells(verdict: FloorResult) -> list[str]:
    floor = verdict.floor
    return [
        verdict.mode,
        f"{floor.quantity} {floor.dtype}",
        f"{floor.value:.5g} {floor.unit}",
        _measured(verdict),
        "" if verdict.row is None or verdict.row.power_w is None else f"{verdict.row.power_w:.0f} W",
        verdict.outcome + (f": {verdict.note}" if verdict.note else ""),
        f"{floor.source}; {floor.conditions}",
    ]


def _measured(verdict: FloorResult) -> str:
    row = verdict.row
    if row is None:
        return ""
    interval = f" [{row.ci_low:.5g}, {row.ci_high:.5g}] n={row.n}" if row.n else ""
    place = f", device {row.rank}" if row.rank else ""
    return f"{row.value:.5g}{interval}{place}"
