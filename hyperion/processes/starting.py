"""How a worker's process begins: forked from a fork server where one is at hand, else as a new interpreter."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from hyperion.processes import fork_server
from hyperion.processes.lifeline import has_ended

# The server's socket, for all processes below the one that started it.
SOCKET = "HYPERION_FORK_SERVER"
# What that server loaded its libraries under: where it is the same, a block within another needs no server of its own.
LOADED = "HYPERION_FORK_SERVER_LOADED"
_LOOK_S = 0.01
_LONGEST_FOLDER = 70  # a socket's name has at most 107 characters


class Forked:
    """A process that a fork server made for this one: the part of subprocess.Popen's interface that launchers use.

    The server gives up the process number soon after the exit code was read here, not before.

    Args:
        connection: to the server, which has just told the process number.
        pid: that number.
        stdout: the end to read from, where the process writes into a pipe.
    """

    stdin = stderr = None  # there is nothing to write to, and stderr goes where stdout does

    def __init__(self, connection: socket.socket, pid: int, stdout=None):
        self.pid, self.stdout, self.returncode = pid, stdout, None
        self._connection: socket.socket | None = connection
        self._looking = threading.Lock()  # a timer's thread and a handler of signals look too

    def poll(self) -> int | None:
        """The exit code, negative for a signal's; None while it runs."""
        if self._looking.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._looking.release()
        return self.returncode

    def _look(self) -> None:
        if self._connection is not None and _is_readable(self._connection):
            told = _line(self._connection)
            self._connection.close()
            self._connection = None
            self.returncode = json.loads(told) if told else None
        if self._connection is None and self.returncode is None and has_ended(self.pid):
            # Linux asks a child whose server is gone to end, and nobody is left to tell how it did.
            self.returncode = -signal.SIGTERM

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_LOOK_S)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is known to have ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start(
    python: str,
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    stdout=subprocess.PIPE,
    new_session=False,
    folder: str = "",
) -> "subprocess.Popen | Forked":
    """Start `python -m module arguments`, stdout and stderr in one stream, nothing to read.

    Args:
        stdout: a file, or subprocess.PIPE for text that `.stdout` of the result reads.
        new_session: make it the leader of a session, with a process group of its own.
        folder: to work in; this process's when left out.
    """
    folder = folder or _current_folder()
    return _forked(python, module, arguments, environment, stdout, new_session, folder) or subprocess.Popen(
        [python, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=new_session,
        cwd=folder or None,
    )


@contextlib.contextmanager
def fork_server_running(environment: dict[str, str] | None = None) -> Iterator[None]:
    """On Linux, workers that this process and those below it start meanwhile are forked.

    The first of them waits while the server imports; a server that nobody asks imports nothing. Within a block whose
    server can do the same, of this process or of one above it, there is no second one.

    Args:
        environment: of the server, this process's when left out. It forks only what wants its libraries loaded under the
            same variables (fork_server.read_once).
    """
    loaded = json.dumps([sys.executable, fork_server.read_once(environment or dict(os.environ))], sort_keys=True)
    outer = {name: os.environ[name] for name in (SOCKET, LOADED) if name in os.environ}
    if sys.platform != "linux" or (SOCKET in outer and outer.get(LOADED) == loaded):
        yield
        return
    base = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="hyperion-fork-", dir=base if len(base) < _LONGEST_FOLDER else "/tmp") as folder:
        address = str(Path(folder) / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            command = [sys.executable, "-u", fork_server.__file__, str(listener.fileno())]
            server = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], start_new_session=True, env=environment
            )
        os.environ.update({SOCKET: address, LOADED: loaded})
        try:
            yield
        finally:
            for name in (SOCKET, LOADED):
                os.environ.pop(name, None)
            os.environ.update(outer)
            server.kill()
            server.communicate()


def _forked(
    python: str, module: str, arguments: list[str], environment: dict[str, str], stdout, new_session: bool, folder: str
) -> Forked | None:
    """The process, or None where no server is at hand that could make it as it is asked for."""
    address = os.environ.get(SOCKET)
    if not address or not folder:
        return None
    request = {
        "python": python,
        "module": module,
        "arguments": arguments,
        "environment": environment,
        "folder": folder,
        "new_session": new_session,
    }
    reading, writing = os.pipe() if stdout is subprocess.PIPE else (None, stdout.fileno())
    connection = socket.socket(socket.AF_UNIX)
    with open(os.devnull) as nothing:
        pid = _asked(connection, address, request, [nothing.fileno(), writing, writing])
    if reading is not None:
        os.close(writing)
    if not pid:
        connection.close()
        if reading is not None:
            os.close(reading)
        return None
    stream = None if reading is None else open(reading, errors="replace")  # noqa: SIM115 - its reader closes it
    return Forked(connection, pid, stream)


def _asked(connection: socket.socket, address: str, request: dict, files: list[int]) -> int:
    """The number of the process that the server at this address made; 0 where it made none, or is no longer there."""
    message = json.dumps(request).encode() + b"\n"
    try:
        connection.connect(address)
        sent = socket.send_fds(connection, [message], files)
        connection.sendall(message[sent:])
    except (ConnectionError, FileNotFoundError):
        return 0
    answer = json.loads(_line(connection) or "null")
    return answer["pid"] if isinstance(answer, dict) else 0


def _current_folder() -> str:
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()
    return ""  # it was removed


def _is_readable(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _line(connection: socket.socket) -> str:
    """One line and not a byte more, since the next one is to show as readable; "" at the end."""
    line = b""
    with contextlib.suppress(ConnectionError):
        while not line.endswith(b"\n") and (byte := connection.recv(1)):
            line += byte
    return line.decode()
