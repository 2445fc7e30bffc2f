"""Measuring what floors name: on one device, on both dies of an MI250X module, and on all devices at once.

Devices that share a package share its power: what one reaches alone, two may not reach together. One process a device,
from a common start, and each keeps its device busy until the slowest is done, so that none finishes in the others' absence.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from hyperion.doctor.machine_rows import all_reduce_row, gemm_rows, named, stream_rows
from hyperion.hardware import Device, Floor
from hyperion.hardware.readers import gcd_position
from hyperion.processes import Job, roll_call, run_ranks, world
from hyperion.processes.group import StoreBarrier
from hyperion.results import Row

ONE, MODULE, ALL = "one device", "both dies of a module", "all devices"
_HANG_S = 120.0


def modes_of(devices: list[Device], root: Path = Path("/")) -> dict[str, list[int]]:
    """Which devices work at once, by mode; modes that this machine has not are left out.

    Args:
        root: where sysfs is, which tells the first die of an MI250X module from the second.
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
    """Rows for the floors in every mode, which stands in their params, one of each device that worked.

    Raises:
        RankError: a device's process failed, or hung.
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
    """A rank's side: its device alone or beside others, mode by mode, then the all-reduce of all.

    Args:
        heat_s: how long a device does the work before it is timed: clocks and power need a while to settle.
    """
    here, todo = world(), [Floor(**floor) for floor in floors]
    barrier, rows = StoreBarrier(), []
    for mode, ranks in modes.items():
        for number, floor in enumerate(todo if here.rank in ranks else ()):
            if floor.quantity != "all_reduce":
                if here.rank == 0:
                    print(f"{mode}: {floor.quantity} {floor.dtype}", flush=True)
                together = _Together(barrier, f"{mode}/{number}", len(ranks))
                rows += named(together.measured(_measurement(floor, here.device, time_limit_s), heat_s), here.rank, mode=mode)
        barrier.wait(f"{mode}/end", here.size)
    rows += named(_all_reduces(todo, time_limit_s), rank=here.rank, mode=list(modes)[-1])
    return {"rows": [asdict(row) for row in rows]}


def measure_floor(floor: Floor, device: Device, time_limit_s: float) -> list[Row]:
    """Rows of one floor's quantity on one device, under the floor's conditions: products with warm caches, streams cold."""
    if floor.quantity == "gemm":
        return gemm_rows(device, floor.dtype, floor.size, cold=False, time_limit_s=time_limit_s)
    return stream_rows(device, floor.quantity, floor.dtype, floor.size, time_limit_s=time_limit_s)


def _measurement(floor: Floor, device: Device, time_limit_s: float) -> Callable[[], list[Row]]:
    return lambda: measure_floor(floor, device, time_limit_s)


@dataclass(frozen=True)
class _Together:
    """Ranks that measure one thing at once."""

    barrier: StoreBarrier
    name: str
    ranks: int

    def measured(self, measure: Callable[[], list[Row]], heat_s: float) -> list[Row]:
        """What `measure` returns when all of the ranks do it at the same time, on devices that are warm."""
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
    """The all-reduces that floors of this many ranks name."""
    here = world()
    wanted = [floor for floor in floors if floor.quantity == "all_reduce" and floor.ranks == here.size]
    if not wanted or here.size < 2:
        return []
    with roll_call(_HANG_S) as roll:
        rows = [all_reduce_row(here, roll, floor.dtype, floor.size, time_limit_s=time_limit_s) for floor in wanted]
        roll.step("the end of the measurement")
        dist.barrier()
    return rows
