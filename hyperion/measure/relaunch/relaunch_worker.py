"""One launch of `relaunch`: prepare what is timed, then wait for each turn.

Run as `python -P -m hyperion.measure.relaunch.relaunch_worker`.
`-P` keeps the working folder off the import path: what stands first there is the side's own folder.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.hardware import Device, read
from hyperion.measure.api.functions import checked_callable, device_of, noting
from hyperion.measure.clock.clocks import WallClock
from hyperion.measure.clock.timing import time_function
from hyperion.processes.request_worker import serve_requests

FUNCTION = "work"
_MODULE = "relaunched_work"  # not the file's own name: a side may hold a package of that name
_WARM_UP_S = 0.1
_EXAMPLE = 'def work(): return {"step": lambda: model(x)}'


class Launch:
    """What this process times, and how it answers."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[[], object]] = {}
        self.device: Device | None = None

    def ready(self) -> dict:
        """Everything is imported; nothing of the reader's has run."""
        return {}

    def prepare(self, work: str, folder: str) -> dict:
        """Load the reader's file, ask it for its functions, and call each until its time is steady.

        Returns:
            {"functions": {name: {"call_s", "warmup_s", "warm"}}, "files": {module's file below `folder`: its sha256}}.

        Raises:
            HyperionError: the file has no such function, or it returns no functions. What it raises itself comes through.
        """
        self.functions = functions_of(Path(work))
        self.device = device_of(None)  # only now: the file may choose the device, or which of them are visible
        answer = {}
        for name, function in self.functions.items():
            with noting("relaunch", name):
                timing = time_function(
                    function, self.device, cold=False, back_to_back=1, minimum_samples=3, time_limit_s=_WARM_UP_S
                )
            call_s = timing.estimate.value
            answer[name] = {"call_s": call_s, "warmup_s": timing.warmup_s, "warm": timing.warm}
        return {"functions": answer, "files": files_from(Path(folder))}

    def turn(self, function: str, calls: int, seconds: float) -> dict:
        """Time a function for some seconds, `calls` calls a sample. The first sample, with cold caches, is not counted.

        Returns:
            {"samples_s": seconds of a call, the mean of each sample, in the order taken, "state": telemetry just after}.
        """
        clock, timed = WallClock(self.device, calls), [self.functions[function]]
        with noting("relaunch", function):
            clock.sample(timed, None, 1)
            samples, end = [], clock.now() + seconds
            while not samples or clock.now() < end:
                samples += clock.sample(timed, None, 1)[0]
        return {"samples_s": samples, "state": asdict(read(self.device))}


def functions_of(work: Path) -> dict[str, Callable[[], object]]:
    """What `work()` of a Python file returns: functions without arguments, by name.

    Raises:
        HyperionError: there is no function of that name, or it does not return such a dict.
    """
    specification = importlib.util.spec_from_file_location(_MODULE, work)
    if specification is None:
        raise HyperionError("this is no Python file", where=work, next_step="name a file that ends in .py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[_MODULE] = module  # dataclasses and pickle look a class's module up
    specification.loader.exec_module(module)
    make = getattr(module, FUNCTION, None)
    if not callable(make):
        raise HyperionError(f"the file has no function {FUNCTION}()", where=work, next_step=f"write one: {_EXAMPLE}")
    functions = make()
    if not isinstance(functions, dict) or not functions or not all(isinstance(name, str) and name for name in functions):
        got = f"a dict with the keys {list(functions)}" if isinstance(functions, dict) else f"{type(functions).__name__}"
        raise HyperionError(
            f"{FUNCTION}() returned {got}, not functions by name", where=work, next_step=f"return some: {_EXAMPLE}"
        )
    return {name: checked_callable(function, "relaunch") for name, function in functions.items()}


def files_from(folder: Path) -> dict[str, str]:
    """sha256 of the files of all modules that were imported from a folder of the import path, by their path below it."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/")
        if file.is_file() and file.is_relative_to(folder):
            below = file.relative_to(folder)
            # A module of an environment that lies in the folder has other folders between.
            if below.parts[0].split(".")[0] == name.split(".")[0]:
                found[below.as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


if __name__ == "__main__":
    launch = Launch()
    serve_requests({"ready": launch.ready, "prepare": launch.prepare, "turn": launch.turn})
