"""Program that `relaunch` starts once for each launch. It loads the functions, and then times one function per request.

Run as `python -P -m hyperion.measure.api.relaunch_worker`. The option `-P` keeps the working folder off the import path, so
that the folder of the measured version comes first.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.hardware import Device, read
from hyperion.measure.api.arguments import checked_callable, device_of, noting
from hyperion.measure.clock.clocks import WallClock
from hyperion.measure.clock.timing import time_function
from hyperion.processes.request_worker import serve_requests

FUNCTION = "work"
_MODULE = "relaunched_work"  # not the name of the user's file, because the measured code may contain a package of that name
_WARM_UP_S = 0.1
_EXAMPLE = 'def work(): return {"step": lambda: model(x)}'


class Launch:
    """The functions that this process times. The methods answer the requests of the parent process."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[[], object]] = {}
        self.device: Device | None = None

    def ready(self) -> dict:
        """Return an empty answer as soon as Hyperion is imported, before any user code runs."""
        return {}

    def prepare(self, work: str, folder: str) -> dict:
        """Load the user's file, get the functions from it, and warm up each function.

        Returns:
            {"functions": {name: {"call_s", "warmup_s", "warm"}}, "files": {path of a module file relative to `folder`: sha256
            of the file}}.

        Raises:
            HyperionError: the file has no function `work`, or `work` returns no functions.

        Exceptions of the user's code are re-raised.
        """
        self.functions = functions_of(Path(work))
        self.device = device_of(None)  # after loading the user's file, which may choose the device or hide devices
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
        """Time a function for `seconds` seconds, with `calls` calls per sample.

        An additional first sample is dropped, because its caches are cold.

        Returns:
            {"samples_s": mean seconds per call of each sample, in the order taken, "state": telemetry after the samples}.

        Raises:
            HyperionError: `prepare` was not called.
        """
        if self.device is None:
            raise HyperionError("turn was called before prepare loaded the functions", next_step="call prepare first")
        clock, timed = WallClock(self.device, calls), [self.functions[function]]
        with noting("relaunch", function):
            clock.sample(timed, None, 1)
            # The sample above is dropped, because other launches have used the caches since the last turn.
            samples, end = [], clock.now() + seconds
            while not samples or clock.now() < end:
                samples += clock.sample(timed, None, 1)[0]
        return {"samples_s": samples, "state": asdict(read(self.device))}


def functions_of(work: Path) -> dict[str, Callable[[], object]]:
    """Call `work()` in a Python file and return its result: a dict that maps names to functions without arguments.

    Raises:
        HyperionError: the file has no function `work`, or `work` returns something else.
    """
    specification = importlib.util.spec_from_file_location(_MODULE, work)
    if specification is None or specification.loader is None:
        raise HyperionError("not a Python file", where=work, next_step="pass a file that ends in .py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[_MODULE] = module  # dataclasses and pickle look up the module of a class
    specification.loader.exec_module(module)
    make = getattr(module, FUNCTION, None)
    if not callable(make):
        raise HyperionError(f"the file has no function {FUNCTION}()", where=work, next_step=f"add one: {_EXAMPLE}")
    functions = make()
    if not isinstance(functions, dict) or not functions or not all(isinstance(name, str) and name for name in functions):
        got = f"a dict with the keys {list(functions)}" if isinstance(functions, dict) else f"{type(functions).__name__}"
        raise HyperionError(
            f"{FUNCTION}() returned {got}, not functions by name", where=work, next_step=f"return a dict of functions: {_EXAMPLE}"
        )
    return {name: checked_callable(function, "relaunch") for name, function in functions.items()}


def files_from(folder: Path) -> dict[str, str]:
    """Return a dict that maps the path of each module file imported from a folder, relative to the folder, to its sha256."""
    digests = {}
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/")
        if file.is_file() and file.is_relative_to(folder):
            below = file.relative_to(folder)
            # Skip modules of a virtual environment inside the folder. Their packages lie deeper in the folder.
            if below.parts[0].split(".")[0] == name.split(".")[0]:
                digests[below.as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digests


if __name__ == "__main__":
    launch = Launch()
    serve_requests({"ready": launch.ready, "prepare": launch.prepare, "turn": launch.turn})
