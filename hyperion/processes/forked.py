"""Start workers that share their imports.

The import of torch and of this library takes several seconds of processor time. If an experiment starts many workers that each
work for a second, the imports are most of its cost. With `Job.forked`, they happen once, in the fork server of `multiprocessing`:
a process that only imports modules. Each worker is a copy of this process, with memory, environment, signals, limits and an exit
code of its own.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from io import TextIOWrapper
from multiprocessing import get_context
from multiprocessing.connection import Connection

from hyperion.processes.child_process import do_not_outlive

# The first step of an optimizer imports this module, which takes a second.
OPTIMIZER = "torch._dynamo"


class ForkedWorker:
    """A worker that the fork server forks. Its interface is the part of that of `subprocess.Popen` that `run_job` uses.

    The server starts with the first worker of this process, and ends with this process.

    Args:
        main: function that the worker calls.
        arguments: arguments of `main`. They must be picklable.
        modules: names of the modules that the server imports when it starts. Later workers import other modules themselves.
        environment: all environment variables of the worker.

    Attributes:
        stdout: stream of the worker's output (stdout and stderr).
        pid: process ID of the worker.
        returncode: exit code, or the negative number of the signal that ended the worker. It exists after `wait`.
    """

    returncode: int

    def __init__(self, main: Callable[..., None], arguments: tuple[str, ...], modules: list[str], environment: dict[str, str]):
        context = get_context("forkserver")
        context.set_forkserver_preload(modules)
        receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(sender, os.getpid(), os.getcwd(), environment, main, arguments))
        self._process.start()
        sender.close()  # otherwise the stream would not end with the worker
        self.stdout = TextIOWrapper(os.fdopen(os.dup(receiver.fileno()), "rb"), errors="replace")
        receiver.close()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code of the worker, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the worker ends, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: the worker still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        self.returncode = code
        return code

    def terminate(self) -> None:
        """Send SIGTERM to the worker."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the worker."""
        self._process.kill()


def _run(
    sender: Connection,
    launcher: int,
    folder: str,
    environment: dict[str, str],
    main: Callable[..., None],
    arguments: tuple[str, ...],
) -> None:
    do_not_outlive(launcher)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(sender.fileno(), stream.fileno())
    sender.close()
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue] - the streams of a new process
    main(*arguments)
