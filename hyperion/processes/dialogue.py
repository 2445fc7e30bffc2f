"""A process that waits to be asked: a line in, a line out, and nothing done in between.

Work that takes turns with that of other processes goes on in such a one. It waits in a read, so that it costs nothing until
its turn comes; it ends with the one that asks; and what it prints goes to a log, whose end an error shows.
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
from hyperion.processes.job import KILLED_REMEDY, JobError
from hyperion.processes.lifeline import die_with, kill_session
from hyperion.processes.output import last_lines

_LAUNCHER, _ANSWERS = "HYPERION_LAUNCHER", "HYPERION_ANSWERS"
# So long a process that stands still gets to write down where.
_STACK_S = 0.5
_END_S = 2.0
_LOOK_S = 1.0
_LIBRARY = str(Path(hyperion.__file__).parent) + os.sep


class Partner:
    """The asking side: a process of its own that runs `answer_questions`, always a new interpreter.
    Args:
        name: what to call it in errors.
        arguments: of the interpreter.
        environment: all of it.

    Attributes:
        pid: its process number.
    """

    def __init__(self, name: str, arguments: Sequence[str], environment: dict[str, str]):
        self.name = name
        # Appended to: the process writes on while its end is read.
        self._log = tempfile.TemporaryFile("a+", errors="replace")  # noqa: SIM115 - `close` does
        self._heard = b""
        # A pipe of their own: what is printed before `answer_questions` begins, by a sitecustomize say, is no answer.
        answers, end = os.pipe()
        self._answers = os.fdopen(answers, "rb", buffering=0)
        # A session of its own: Ctrl-C reaches the one that asks, and that one ends this process and all it has started.
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
        os.close(end)
        self.pid = self._process.pid

    def __enter__(self) -> "Partner":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def ask(self, question: str, timeout_s: float, **params) -> dict:
        """Put a question and wait for its answer; see `put` and `answer`."""
        self.put(question, **params)
        return self.answer(timeout_s)

    def put(self, question: str, **params) -> None:
        """Put a question, with JSON-able parameters, and do not wait."""
        with contextlib.suppress(BrokenPipeError):  # it has died: `answer` says how
            self._process.stdin.write(json.dumps([question, params]).encode() + b"\n")

    def answer(self, timeout_s: float) -> dict:
        """The answer to the question that was put.

        Raises:
            JobError: it raised, died, or took longer than `timeout_s` seconds. The message names it and holds the words of
                its HyperionError, else its traceback, or the frames in which it stands.
        """
        line = self._line(time.monotonic() + timeout_s)
        if line is None:
            raise self._hangs(timeout_s)
        if not line:
            raise self._died()
        told = json.loads(line)
        if "error" in told:
            error = told["error"]
            raise JobError(f"{self.name}: {error['what']}", where=error["where"], next_step=error["next_step"])
        if "traceback" in told:
            raise JobError(
                f"{self.name} raised\n{told['traceback'].rstrip()}", where=self._where, next_step="read the traceback above"
            )
        return told["answer"]

    def close(self) -> None:
        """End it and whatever it has started: at once, since it keeps nothing."""
        kill_session(self.pid, ours=self._process.poll() is None)
        self._process.wait()
        for stream in (self._process.stdin, self._answers, self._log):
            stream.close()

    @property
    def _where(self) -> str:
        return f"process {self.pid}"

    def _line(self, deadline: float) -> bytes | None:
        """The next line without its end, b"" when there will be none, None at the deadline."""
        while b"\n" not in self._heard:
            left_s = max(0.0, deadline - time.monotonic())
            if select.select([self._answers], [], [], min(left_s, _LOOK_S))[0]:
                read = self._answers.read(1 << 20)
                if not read:
                    return b""
                self._heard += read
            elif self._process.poll() is not None:  # what it forked may keep the pipe open
                return b""
            elif not left_s:
                return None
        line, self._heard = self._heard.split(b"\n", 1)
        return line

    def _printed(self) -> str:
        self._log.seek(0)
        return last_lines(self._log.read()).rstrip()

    def _hangs(self, timeout_s: float) -> JobError:
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(_STACK_S)
        return JobError(
            f"{self.name} gave no answer within {timeout_s:g} s and was ended\n{self._printed()}",
            where=self._where,
            next_step="look at the frames above for where it stood still",
        )

    def _died(self) -> JobError:
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            code = 0  # it closed the line and goes on
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return JobError(
            f"{self.name} {cause}\n{self._printed()}",
            where=self._where,
            next_step=KILLED_REMEDY if code == -signal.SIGKILL else "read what it printed, above",
        )


def answer_questions(functions: dict[str, Callable[..., dict]]) -> None:
    """The answering side: do what is asked until nobody asks any more.

    What the functions print, on either stream, goes to the log, and they find nothing to read on standard input.

    Args:
        functions: what can be asked for, by name; each takes the question's parameters and returns a JSON-able dict.
    """
    die_with(int(os.environ.pop(_LAUNCHER)))
    questions, answers = os.fdopen(os.dup(0)), os.fdopen(int(os.environ.pop(_ANSWERS)), "w")
    os.set_inheritable(answers.fileno(), False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    for line in questions:
        question, params = json.loads(line)
        try:
            told = {"answer": functions[question](**params)}
        except HyperionError as error:
            told = {"error": error.as_dict()}
        except Exception as error:
            told = {"traceback": _traceback(error)}
        answers.write(json.dumps(told) + "\n")
        answers.flush()


def _traceback(error: Exception) -> str:
    """The traceback from the first frame that is not this library's: the way there helps no reader. All, where none is."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((_LIBRARY, "<frozen ")):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
