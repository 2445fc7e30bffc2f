"""Notebooks side by side: where a machine has several devices, those that need one share them out, each with its part of the
cores; those that use all devices run alone.

Each notebook is executed in a thread of the driver, which only passes on what its kernel says: the kernel and its workers
are processes of their own.
"""

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hyperion.processes.child_process import CORES
from hyperion.reproduce.notebooks import Notebook
from hyperion.reproduce.stopping import SHUTDOWN_S, Stopped


@dataclass(frozen=True)
class Place:
    """What a notebook gets of the machine.

    Args:
        number: from 0; places of one number are never taken twice at a time.
        environment: variables that show its kernel no more than that; none for all of the machine.
    """

    number: int
    environment: dict[str, str] = field(default_factory=dict)


class Interruption:
    """Ends what another thread executes as a signal ends the main thread: `Stopped` is raised inside its event loop."""

    def __init__(self):
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Stopped | None = None

    def reaches(self, loop: asyncio.AbstractEventLoop) -> None:
        """The executing thread's loop; a stop that came before is raised here."""
        self._loop = loop
        if self._stop is not None:
            raise self._stop

    def __call__(self, stop: Stopped) -> None:
        self._stop = Stopped(stop.number)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._raise)

    def _raise(self) -> None:
        raise self._stop


Work = Callable[[Place, Interruption], object]


@dataclass(frozen=True)
class _Going:
    notebook: Notebook
    place: Place
    interruption: Interruption
    thread: threading.Thread


class Lanes:
    """The places of a machine and the notebooks in them.

    Args:
        masks: variables that show a process one device, for each device; fewer than two leave one place, the whole machine.
    """

    def __init__(self, masks: Sequence[dict[str, str]] = ()):
        self.places = places_of(masks)
        self._going: dict[str, _Going] = {}
        self._ended: queue.SimpleQueue = queue.SimpleQueue()

    @property
    def stems(self) -> set[str]:
        """The notebooks that run."""
        return set(self._going)

    def pick(self, waiting: Sequence[Notebook], expected_s: Callable[[Notebook], float]) -> Notebook | None:
        """Which of the waiting notebooks starts now; None: wait until one has ended.

        One can start once the chapters that it builds on have ended. In the book's order where there is one place; else
        those of one device first, the longest before the others.
        """
        return self._next(waiting, [going.notebook for going in self._going.values()], expected_s)

    def lasting_s(self, notebooks: Sequence[Notebook], expected_s: dict[str, float]) -> float:
        """Seconds until all of them have ended, if each takes what is expected of it."""
        waiting, ends, now = list(notebooks), {}, 0.0
        while waiting or ends:
            notebook = self._next(waiting, list(ends), lambda notebook: expected_s[notebook.stem])
            if notebook is None:
                first = min(ends, key=ends.get)
                now = ends.pop(first)
            else:
                waiting.remove(notebook)
                ends[notebook] = now + expected_s[notebook.stem]
        return now

    def _next(
        self, waiting: Sequence[Notebook], going: Sequence[Notebook], expected_s: Callable[[Notebook], float]
    ) -> Notebook | None:
        unfinished = {notebook.stem for notebook in (*waiting, *going)}
        ready = [notebook for notebook in waiting if not unfinished & {*notebook.needs, *notebook.optional}]
        if not ready or any(notebook.devices == "all" for notebook in going):
            return None
        if len(self.places) == 1:
            return None if going else ready[0]
        single = [notebook for notebook in ready if notebook.devices == "one"]
        if single and len(going) < len(self.places):
            return max(single, key=expected_s)
        return None if going else ready[0]

    def start(self, notebook: Notebook, work: Work) -> None:
        """Do the work in a thread, at a place that is free."""
        place = Place(0)
        if notebook.devices == "one" and len(self.places) > 1:
            taken = {going.place.number for going in self._going.values()}
            place = next(place for place in self.places if place.number not in taken)
        interruption = Interruption()

        def run() -> None:
            try:
                result = work(place, interruption)
            except BaseException as end:  # it is told where the notebook's end is waited for
                result = end
            self._ended.put((notebook.stem, result))

        thread = threading.Thread(target=run, name=notebook.stem, daemon=True)
        thread.start()
        self._going[notebook.stem] = _Going(notebook, place, interruption, thread)

    def wait(self) -> tuple[Notebook, object]:
        """The next notebook that ends, and what its work returned or raised."""
        stem, result = self._ended.get()
        going = self._going.pop(stem)
        going.thread.join()
        return going.notebook, result

    def stop(self, stop: Stopped) -> list[tuple[Notebook, object]]:
        """End all that run; the notebooks that did, and what the work of each returned or raised."""
        for going in self._going.values():
            going.interruption(stop)
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
    """A place for each device with its part of the cores; one, for all of the machine, where there are fewer than two devices
    or not a core for each. Threads of one core and cores of one package stay together: neighbours that shared a core would
    slow each other.

    Args:
        cores: that this process may use, asked when left out.
        sys: where Linux tells of them.
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
    """(package, core in it, number), as Linux tells them; where it does not, by number alone."""
    topology = sys / f"devices/system/cpu/cpu{number}/topology"
    try:
        package, core = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, number, number
    return package, core, number


def scratch_of(place: Place, scratch: Path) -> Path:
    """A folder for the files of the kernel at a place."""
    folder = scratch / str(place.number)
    folder.mkdir(exist_ok=True)
    return folder
