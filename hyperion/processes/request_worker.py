"""Run worker processes that serve requests. Each request and each reply is one line of JSON.

Use these workers if several processes must work in turns. Between two requests, a worker waits for input and uses no CPU time. A
worker ends when the process that started it ends. Its output goes to a log, the end of which is included in error messages.
"""

import contextlib
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import hyperion
from hyperion.errors import HyperionError
from hyperion.garbage import collect_rarely
from hyperion.processes.child_process import die_with, kill_session
from hyperion.processes.job import KILLED_REMEDY, JobError, last_lines

_LAUNCHER, _ANSWERS = "HYPERION_LAUNCHER", "HYPERION_ANSWERS"
# Seconds that a hanging worker has to write its stack.
_STACK_S = 0.5
_EXIT_S = 2.0
_POLL_S = 1.0
_LIBRARY = str(Path(hyperion.__file__).parent) + os.sep


class RequestWorker:
    """Client of a worker process. It starts a Python process that calls `serve_requests`, and sends requests to it.

    Args:
        name: name of the worker in error messages.
        arguments: command-line arguments of the Python interpreter.
        environment: all environment variables of the worker.

    Attributes:
        pid: process ID of the worker.
    """

    def __init__(self, name: str, arguments: Sequence[str], environment: dict[str, str]):
        self.name = name
        # In append mode, the worker continues to write at the end of the file after `_log_end` has moved the position.
        self._log = tempfile.TemporaryFile("a+", errors="replace")  # noqa: SIM115 - closed by `close`
        self._received = b""
        # Answers have their own pipe. Otherwise, text that is printed before `serve_requests` starts, for example by a
        # sitecustomize module, would be read as an answer.
        answers, end = os.pipe()
        # Read without a buffer, because `select` does not see bytes that are already in a Python buffer.
        self._answers = os.fdopen(answers, "rb", buffering=0)
        # The worker is the leader of a new session, so Ctrl-C reaches only this process, which then ends the worker and its child
        # processes.
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            bufsize=0,
            pass_fds=[end],
            env=environment | {_LAUNCHER: str(os.getpid()), _ANSWERS: str(end)},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._requests = self._process.stdin
        # Close the write end of the pipe in this process. Otherwise, the pipe would stay open after the worker has ended.
        os.close(end)
        self.pid = self._process.pid

    def __enter__(self) -> "RequestWorker":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def call(self, function: str, timeout_s: float, /, **params: object) -> dict:
        """Send a request, wait for its result, and return it; see `send` and `receive`."""
        self.send(function, **params)
        return self.receive(timeout_s)

    def send(self, function: str, /, **params: object) -> None:
        """Send a request, and return immediately.

        Args:
            function: name of the function to call, a key of the argument of `serve_requests`.
            params: JSON-serializable keyword arguments of the function.
        """
        with contextlib.suppress(BrokenPipeError):  # if the worker has died, `receive` raises the error
            self._requests.write(json.dumps([function, params]).encode() + b"\n")

    def receive(self, timeout_s: float) -> dict:
        """Wait for the result of the last request, and return it.

        Raises:
            JobError: the worker raised an exception, ended, or took longer than `timeout_s` seconds. The message contains the
                name of the worker and, depending on the failure, the message of its HyperionError, its traceback, or the end of
                its log with its stack.
        """
        line = self._read_line(time.monotonic() + timeout_s)
        if line is None:
            raise self._timeout_error(timeout_s)
        if not line:
            raise self._exit_error()
        reply = json.loads(line)
        if "error" in reply:
            error = reply["error"]
            raise JobError(f"{self.name}: {error['what']}", where=error["where"], next_step=error["next_step"])
        if "traceback" in reply:
            raise JobError(
                f"{self.name} raised\n{reply['traceback'].rstrip()}", where=self._where, next_step="read the traceback above"
            )
        return reply["answer"]

    def close(self) -> None:
        """Kill the worker and its child processes immediately. They have no state to save."""
        kill_session(self.pid, ours=self._process.poll() is None)
        self._process.wait()
        for stream in (self._requests, self._answers, self._log):
            stream.close()

    @property
    def _where(self) -> str:
        return f"process {self.pid}"

    def _read_line(self, deadline: float) -> bytes | None:
        """Return the next line of the worker's output, without its newline.

        Return b"" if the worker has ended, and None if the deadline has passed.
        """
        while b"\n" not in self._received:
            left_s = max(0.0, deadline - time.monotonic())
            if select.select([self._answers], [], [], min(left_s, _POLL_S))[0]:
                data = self._answers.read(1 << 20)
                if not data:
                    return b""
                self._received += data
            elif self._process.poll() is not None:  # the worker has ended, but a child process may keep the pipe open
                return b""
            elif not left_s:
                return None
        line, self._received = self._received.split(b"\n", 1)
        return line

    def _log_end(self) -> str:
        self._log.seek(0)
        return last_lines(self._log.read()).rstrip()

    def _timeout_error(self, timeout_s: float) -> JobError:
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(_STACK_S)
        return JobError(
            f"{self.name} gave no answer within {timeout_s:g} s and was ended\n{self._log_end()}",
            where=self._where,
            next_step="find out from the stack above where the worker hung",
        )

    def _exit_error(self) -> JobError:
        try:
            code = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            code = 0  # the worker has closed its pipe but is still running
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return JobError(
            f"{self.name} {cause}\n{self._log_end()}",
            where=self._where,
            next_step=KILLED_REMEDY if code == -signal.SIGKILL else "read its output above",
        )


def serve_requests(functions: dict[str, Callable[..., dict]]) -> None:
    """Serve requests in the worker process until the client closes the pipe.

    The output of the functions goes to the log. Their standard input is empty.

    Args:
        functions: a dict that maps names to the functions that a request can call. Each function takes the params of the request
            and returns a JSON-serializable dict.
    """
    die_with(int(os.environ.pop(_LAUNCHER)))
    collect_rarely()
    # Move the requests to another descriptor and make stdin empty, so that a function that reads stdin consumes no request.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(int(os.environ.pop(_ANSWERS)), "w")
    # A child process of a function must not keep the pipe open after the worker has ended.
    os.set_inheritable(answers.fileno(), False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    for line in requests:
        function, params = json.loads(line)
        try:
            reply = {"answer": functions[function](**params)}
        except HyperionError as error:
            reply = {"error": error.as_dict()}
        except Exception as error:
            reply = {"traceback": _traceback(error)}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _traceback(error: Exception) -> str:
    """Format the traceback from the first frame outside this library, or completely if there is no such frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((_LIBRARY, "<frozen ")):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
