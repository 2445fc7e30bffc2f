"""Run functions in a separate process. After a crash or a timeout, a new process replaces it."""

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from hyperion.errors import HyperionError
from hyperion.garbage import collect_rarely
from hyperion.processes.child_process import do_not_outlive

Value = TypeVar("Value")
_START_S = 300.0  # time limit for the start of the process and its imports


class IsolatedError(HyperionError):
    """Raised if the separate process crashed, or if a function did not end in time."""


class IsolatedProcess:
    """Context manager that runs functions in a separate process, one after the other.

    The process is started at the first call, and again after a crash or a timeout. Its output goes to a file, because some
    packages print while they are imported. The separate process ends when the process that started it ends, even if the latter is
    killed. Ctrl-C interrupts only the latter, which then kills the separate process.

    Args:
        timeout_s: time limit of each function in seconds. The time for starting the process is not included.
        prepare: function that the process calls before the first function.
    """

    def __init__(self, timeout_s: float, prepare: Callable[[], object] | None = None):
        self._timeout_s, self._prepare = timeout_s, prepare
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name, "log")
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "IsolatedProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error) -> None:
        if self._pool is not None:
            if kind is None:
                self._pool.shutdown()
            else:  # for example KeyboardInterrupt, during a function that may take long
                self._kill()
        self._folder.cleanup()

    def run(self, function: Callable[[], Value]) -> Value:
        """Run a function in the process and return its result. If the function raises an error, raise the same error here.

        Args:
            function: the function. It must be picklable.

        Raises:
            IsolatedError: the process crashed, or the function did not end in time.
        """
        self.start()
        return self._result(function, self._timeout_s, "the function did not end")

    def start(self) -> None:
        """Start the process if it is not running.

        Raises:
            IsolatedError: the process crashed, or it was not ready in time.
        """
        if self._pool is None:
            context = get_context("spawn")  # spawn, because a forked process cannot use CUDA
            self._pool = ProcessPoolExecutor(1, context, _start, (str(self._log), os.getpid(), self._prepare))
            self._result(int, _START_S, "the process was not ready")

    def interrupt(self) -> None:
        """Kill the process. A function that runs in it then raises IsolatedError. Another thread may call this."""
        for process in self._processes():
            process.kill()

    def _processes(self) -> list[BaseProcess]:
        pool = self._pool
        # The pool has no public attribute for its processes.
        return [] if pool is None else list((pool._processes or {}).values())

    def _result(self, function: Callable[[], Value], limit_s: float, late: str) -> Value:
        assert self._pool is not None
        with _interrupts_blocked():  # the first call starts the process
            future = self._pool.submit(function)
        # `result(timeout=…)` would not distinguish its own TimeoutError from one that the function raises.
        if wait([future], limit_s).done:
            try:
                return future.result()
            except BrokenProcessPool:
                what = f"the process crashed; its last output: {self._last_output()}"
        else:
            what = f"{late} within {limit_s:g} s"
        self._kill()
        raise IsolatedError(what, next_step="call the function in a process of its own to see its whole output")

    def _kill(self) -> None:
        assert self._pool is not None
        self.interrupt()  # first, because a function that hangs never returns
        self._pool.shutdown(cancel_futures=True)
        self._pool = None

    def _last_output(self) -> str:
        return self._log.read_text(errors="replace").strip()[-300:] if self._log.is_file() else ""


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Context manager that blocks SIGINT. Processes that are started meanwhile inherit this.

    Otherwise Ctrl-C would interrupt their imports, with a traceback for each.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(log: str, parent: int, prepare: Callable[[], object] | None) -> None:
    do_not_outlive(parent)
    collect_rarely()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    sys.stdout.flush()
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    if prepare is not None:
        prepare()
