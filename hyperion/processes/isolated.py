"""Run functions in a process of their own, which is replaced after a crash or a timeout."""

import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from hyperion.errors import HyperionError
from hyperion.processes.child_process import do_not_outlive

Value = TypeVar("Value")
_START_S = 300.0  # time limit for the start of the process and its imports


class IsolatedError(HyperionError):
    """The process of a function crashed, or the function did not end in time."""


class IsolatedProcess:
    """Run functions one after the other in one other process, in a `with` block.

    The process is started at the first call, and again after a crash or a timeout. Its output goes to a file, because packages
    print during their import. It ends when this process ends, also if this process is killed.

    Args:
        timeout_s: time limit of each function in seconds. The start of the process does not count.
        prepare: function that the process calls before the first function.
    """

    def __init__(self, timeout_s: float, prepare: Callable[[], object] | None = None):
        self._timeout_s, self._prepare = timeout_s, prepare
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name, "log")
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "IsolatedProcess":
        return self

    def __exit__(self, *exception) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._folder.cleanup()

    def run(self, function: Callable[[], Value]) -> Value:
        """Return the result of a function. An error that the function raises is raised here.

        Args:
            function: the function. It must be picklable.

        Raises:
            IsolatedError: the process crashed, or the function did not end in time.
        """
        self.start()
        assert self._pool is not None
        try:
            return self._pool.submit(function).result(timeout=self._timeout_s)
        except TimeoutError:
            what = f"the function did not end within {self._timeout_s:g} s"
        except BrokenProcessPool:
            what = f"the process crashed; its last output: {self._last_output()}"
        self._kill()
        raise IsolatedError(what, next_step="call the function in a process of its own to see its whole output")

    def start(self) -> None:
        """Start the process, if it does not run."""
        if self._pool is None:
            context = get_context("spawn")  # a process that was forked cannot use CUDA
            self._pool = ProcessPoolExecutor(1, context, _start, (str(self._log), os.getpid(), self._prepare))
            self._pool.submit(int).result(_START_S)

    def _kill(self) -> None:
        # A function that hangs never returns, so its process is killed first. There is no public name for the processes.
        assert self._pool is not None
        for process in list((self._pool._processes or {}).values()):
            process.kill()
        self._pool.shutdown(cancel_futures=True)
        self._pool = None

    def _last_output(self) -> str:
        return self._log.read_text(errors="replace").strip()[-300:] if self._log.is_file() else ""


def _start(log: str, parent: int, prepare: Callable[[], object] | None) -> None:
    do_not_outlive(parent)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    sys.stdout.flush()
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    if prepare is not None:
        prepare()
