"""Measure the quantities of floors on one device, on both dies of an MI250X module, and on all devices at once.

Devices that share a package share its power, so two dies together may be slower than one alone. Each device has its own
process. All processes of a mode start together, and each keeps its device busy until the slowest has finished, so that every
measurement happens under full load.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from hyperion.doctor.machine_rows import all_reduce_row, gemm_rows, stream_rows, with_params
from hyperion.hardware import Device, Floor
from hyperion.hardware.telemetry import gcd_position
from hyperion.processes import Job, roll_call, run_ranks, world
from hyperion.processes.group import StoreBarrier
from hyperion.results import Row

ONE, MODULE, ALL = "one device", "both dies of a module", "all devices"
_HANG_S = 120.0


def modes_of(devices: list[Device], root: Path = Path("/")) -> dict[str, list[int]]:
    """Return the indices of the devices that work at the same time, by mode. Modes that need other hardware are omitted.

    Args:
        root: root of the file tree with sysfs, which tells which die of an MI250X module a device is.
    """
    modes = {ONE: [0]}
    ordered = sorted(devices, key=lambda device: device.pci_address or "")
    for first, second in itertools.pairwise(ordered):
        if (gcd_position(first, root), gcd_position(second, root)) == ("first", "second"):
            modes[MODULE] = [first.index, second.index]
            break
    if len(devices) > 1 and len(devices) != len(modes.get(MODULE, ())):
        modes[ALL] = list(range(len(devices)))
    return modes


def measure_floors(
    floors: list[Floor], devices: list[Device], on_line: Callable[[str], object], time_limit_s: float = 2.0
) -> list[Row]:
    """Measure the floors in every mode and return one row per device; `params["mode"]` names the mode.

    Raises:
        RankError: the process of a device failed or hung.
    """
    params = {
        "floors": [asdict(floor) for floor in floors],
        "modes": modes_of(devices),
        "time_limit_s": time_limit_s,
        "heat_s": 2.0,
    }
    job = Job(measure_on_rank, params, timeout_s=900.0, ranks=len(devices))
    answers = run_ranks(job, on_line=on_line)
    return [Row(**row) for answer in answers for row in answer["rows"]]


def measure_on_rank(floors: list[dict], modes: dict[str, list[int]], time_limit_s: float, heat_s: float) -> dict:
    """Run on each rank: measure this device in each mode, then the all-reduce over all devices.

    Args:
        heat_s: seconds of work before the timed work, because clocks and power need time to settle.
    """
    here, wanted = world(), [Floor(**floor) for floor in floors]
    barrier, rows = StoreBarrier(), []
    for mode, ranks in modes.items():
        for number, floor in enumerate(wanted if here.rank in ranks else ()):
            if floor.quantity != "all_reduce":
                if here.rank == 0:
                    print(f"{mode}: {floor.quantity} {floor.dtype}", flush=True)
                together = _Together(barrier, f"{mode}/{number}", len(ranks))
                rows += with_params(
                    together.measure_with_others(_measurement(floor, here.device, time_limit_s), heat_s), here.rank, mode=mode
                )
        barrier.wait(f"{mode}/end", here.size)
    rows += with_params(_all_reduces(wanted, time_limit_s), rank=here.rank, mode=list(modes)[-1])
    return {"rows": [asdict(row) for row in rows]}


def measure_floor(floor: Floor, device: Device, time_limit_s: float) -> list[Row]:
    """Measure the quantity of one floor on one device under its conditions: products with warm caches, streams with cold ones."""
    if floor.quantity == "gemm":
        return gemm_rows(device, floor.dtype, floor.size, cold=False, time_limit_s=time_limit_s)
    return stream_rows(device, floor.quantity, floor.dtype, floor.size, time_limit_s=time_limit_s)


def _measurement(floor: Floor, device: Device, time_limit_s: float) -> Callable[[], list[Row]]:
    return lambda: measure_floor(floor, device, time_limit_s)


@dataclass(frozen=True)
class _Together:
    """Ranks that measure at the same time."""

    barrier: StoreBarrier
    name: str
    ranks: int

    def measure_with_others(self, measure: Callable[[], list[Row]], heat_s: float) -> list[Row]:
        """Call `measure` at the same time on all ranks, on warm devices, and return its rows."""
        started = time.monotonic()
        while time.monotonic() - started < heat_s:
            measure()
        self.barrier.wait(f"{self.name}/start", self.ranks)
        rows = measure()
        self.barrier.arrive(f"{self.name}/done")
        while not self.barrier.is_complete(f"{self.name}/done", self.ranks):
            measure()
        return rows


def _all_reduces(floors: list[Floor], time_limit_s: float) -> list[Row]:
    """Measure the all-reduces of the floors that have this number of ranks."""
    here = world()
    wanted = [floor for floor in floors if floor.quantity == "all_reduce" and floor.ranks == here.size]
    if not wanted or here.size < 2:
        return []
    with roll_call(_HANG_S) as roll:
        rows = [all_reduce_row(here, roll, floor.dtype, floor.size, time_limit_s=time_limit_s) for floor in wanted]
        roll.step("the end of the measurement")
        dist.barrier()
    return rows
