"""Run several notebooks at the same time. Each notebook gets one device of the machine and a share of the CPU cores.

A notebook that uses all devices runs alone. Each running notebook has a thread in the driver, which only relays messages, because
the kernel and its workers are separate processes.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hyperion.processes.child_process import CORES
from hyperion.reproduce.execution import SHUTDOWN_S, Interruption, Stopped
from hyperion.reproduce.notebooks import Notebook


@dataclass(frozen=True)
class Place:
    """The part of the machine that a notebook uses.

    Args:
        number: number of the place, counted from 0. At most one notebook at a time uses a place.
        environment: environment variables that restrict the kernel to this part. Empty for the whole machine.
    """

    number: int
    environment: dict[str, str] = field(default_factory=dict)


Work = Callable[[Place, Interruption], object]


@dataclass(frozen=True)
class _Going:
    notebook: Notebook
    place: Place
    interruption: Interruption
    thread: threading.Thread


class Lanes:
    """The places of a machine and the notebooks that run in them.

    Args:
        masks: for each place, the environment variables that hide all devices except its own. With fewer than two entries, the
            whole machine is one place.
    """

    def __init__(self, masks: Sequence[dict[str, str]] = ()):
        self.places = places_of(masks)
        self._going: dict[str, _Going] = {}
        self._ended: queue.SimpleQueue = queue.SimpleQueue()

    @property
    def stems(self) -> set[str]:
        """Stems (file names without .ipynb) of the running notebooks."""
        return set(self._going)

    def pick(self, waiting: Sequence[Notebook], expected_s: Callable[[Notebook], float]) -> Notebook | None:
        """Return the waiting notebook to start now, or None if a running notebook must end first.

        A notebook can start after the chapters that it needs have ended. With one place, notebooks start in the order of the
        book. With several places, notebooks that use one device start first, and among these the longest starts first.
        """
        return self._next(waiting, [going.notebook for going in self._going.values()], expected_s)

    def lasting_s(self, notebooks: Sequence[Notebook], expected_s: dict[str, float]) -> float:
        """Return the number of seconds until the last notebook ends if every notebook takes its expected time."""
        waiting, now = list(notebooks), 0.0
        ends: dict[Notebook, float] = {}
        while waiting or ends:
            notebook = self._next(waiting, list(ends), lambda notebook: expected_s[notebook.stem])
            if notebook is None:
                first = min(ends, key=lambda notebook: ends[notebook])
                now = ends.pop(first)
            else:
                waiting.remove(notebook)
                ends[notebook] = now + expected_s[notebook.stem]
        return now

    def _next(
        self, waiting: Sequence[Notebook], going: Sequence[Notebook], expected_s: Callable[[Notebook], float]
    ) -> Notebook | None:
        unfinished = {notebook.stem for notebook in (*waiting, *going)}
        # Also wait for optional chapters that run in this call, because their rows are used if they exist.
        ready = [notebook for notebook in waiting if not unfinished & {*notebook.needs, *notebook.optional}]
        if not ready or any(notebook.devices == "all" for notebook in going):
            return None
        if len(self.places) == 1:
            return None if going else ready[0]
        single = [notebook for notebook in ready if notebook.devices == "one"]
        if single and len(going) < len(self.places):
            # The longest notebook starts first. If it started last, it would run alone at the end.
            return max(single, key=expected_s)
        # A notebook that uses all devices waits until no other notebook runs.
        return None if going else ready[0]

    def start(self, notebook: Notebook, work: Work) -> None:
        """Start a thread that calls `work` for a notebook in a free place."""
        place = Place(0)
        if notebook.devices == "one" and len(self.places) > 1:
            taken = {going.place.number for going in self._going.values()}
            place = next(place for place in self.places if place.number not in taken)
        interruption = Interruption()

        def run() -> None:
            try:
                result = work(place, interruption)
            except BaseException as end:  # `wait` returns the exception to the driver
                result = end
            self._ended.put((notebook.stem, result))

        # A kernel that does not end must not keep this process alive after a stop.
        thread = threading.Thread(target=run, name=notebook.stem, daemon=True)
        thread.start()
        self._going[notebook.stem] = _Going(notebook, place, interruption, thread)

    def wait(self) -> tuple[Notebook, object]:
        """Wait until a notebook ends. Return the notebook, and the value or the exception of its work."""
        stem, result = self._ended.get()
        going = self._going.pop(stem)
        going.thread.join()
        return going.notebook, result

    def stop(self, stop: Stopped) -> list[tuple[Notebook, object]]:
        """Stop all running notebooks. Return each notebook, and the value that its work returned or the exception it raised."""
        # Request all notebooks to stop before waiting for the first one, so that they shut down at the same time.
        for going in self._going.values():
            going.interruption(stop)
        # All threads share one deadline.
        deadline = time.monotonic() + SHUTDOWN_S
        for going in self._going.values():
            going.thread.join(max(0.0, deadline - time.monotonic()))
        results: dict[str, object] = {}
        while not self._ended.empty():
            stem, results[stem] = self._ended.get()
        ended = [(going.notebook, results.get(stem, stop)) for stem, going in self._going.items()]
        self._going.clear()
        return ended


def places_of(masks: Sequence[dict[str, str]], cores: set[int] | None = None, sys: Path = Path("/sys")) -> list[Place]:
    """Return one place for each device, with an equal share of the CPU cores.

    If the machine has fewer than two devices, or fewer cores than devices, the whole machine is one place. Hardware threads of
    one core belong to the same place, because notebooks that share a core slow each other down. As far as possible, the cores of
    a place are in the same package.

    Args:
        masks: for each device, the environment variables that hide all other devices.
        cores: numbers of the cores to share; default: all cores that this process may use.
        sys: folder of Linux's sysfs.
    """
    if cores is None:
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    each = len(cores) // len(masks) if masks else 0
    if len(masks) < 2 or not each:
        return [Place(0)]
    numbers = sorted(cores, key=lambda core: _in_order(core, sys))
    parts = [numbers[n * each : (n + 1) * each] for n in range(len(masks))]
    return [Place(n, mask | {CORES: ",".join(map(str, parts[n]))}) for n, mask in enumerate(masks)]


def _in_order(number: int, sys: Path) -> tuple[int, int, int]:
    """Return the sort key (package, core in the package, number). If the package is unknown, sort only by number."""
    topology = sys / f"devices/system/cpu/cpu{number}/topology"
    try:
        package, core = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, number, number
    return package, core, number
