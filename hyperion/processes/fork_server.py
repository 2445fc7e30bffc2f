"""Start worker processes as forks of a process that has already imported torch.

Importing torch and the packages around it takes seconds of processor time, and a chapter may start dozens of jobs. The first
job of a launcher starts the fork server, which imports these packages and then waits. For each job, the server forks. The fork is
like a fresh process after the same imports: its memory, settings and exit code are its own, and it has not used a GPU.

The server imports no experiment and no module of the user, so each worker runs the code that is in the files when it starts.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hyperion.garbage import imports_only
from hyperion.processes.child_process import TORCHRUN_VARIABLES, child_environment, pin_to_cores, start

# Packages that most jobs import, and parts of torch that take long to import. At the first step of any optimizer, torch imports
# torch._dynamo.
_IMPORTED = (
    "numpy",
    "pandas",
    "psutil",
    "pydantic",
    "safetensors",
    "tokenizers",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
)
# Prefixes of variables that no import reads: those of this library, of pytest and, together with `TORCHRUN_VARIABLES`, those that
# torchrun sets for a rank. All other variables must have the same values in the server as in a worker.
_READ_LATE = ("HYPERION_", "PYTEST_", "TORCHELASTIC_", "TORCH_NCCL_")
# torch reads this variable when it is imported. In a fork, `torch.set_num_threads` has the same effect.
_THREADS = "OMP_NUM_THREADS"
# A process that has used a GPU holds one of these files open, and its forks cannot use the GPU.
_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render")
_REQUEST_BYTES = 1 << 20
_CODE_BYTES = 4


class ForkedWorker:
    """A worker that the fork server has started, with the methods of `subprocess.Popen` that launchers and torchrun use.

    Args:
        pid: process ID of the worker.
        handle: descriptor of the process. Unlike `pid`, it never refers to another process.
        server: socket on which the server sends the exit code. If it is closed early, the server ends the worker.
        output: descriptor of a pipe with the output of the worker; None if the output goes to a file.

    Attributes:
        returncode: exit code, or -N if signal N ended the worker; None while it runs.
        stdout: text stream of the output; None if the output goes to a file.
    """

    def __init__(self, pid: int, handle: int, server: socket.socket, output: int | None):
        self.pid = pid
        self.returncode: Any = None  # as in typeshed: callers read it only after the end
        self.stdout = None if output is None else os.fdopen(output, errors="replace")
        self._handle, self._server = handle, server

    def poll(self) -> int | None:
        """Return the exit code, or None if the worker is running."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the worker has ended, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: the worker is running after `timeout` seconds.
        """
        if self.returncode is None:
            self._server.settimeout(timeout)
            try:
                code = self._server.recv(_CODE_BYTES)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(f"worker process {self.pid}", timeout or 0.0) from None
            # A server that was killed sends no code. Most likely, memory ran out.
            self.returncode = int.from_bytes(code, sys.byteorder, signed=True) if code else -signal.SIGKILL
            self._server.close()
            os.close(self._handle)
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM to the worker if it is running."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the worker if it is running."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)


class _ForkServer:
    """A fork server, as its client sees it.

    Args:
        control: socket on which the server receives requests.
        environment: the environment of the server.
        end: function that ends the server and waits until it has ended.
    """

    def __init__(self, control: socket.socket, environment: dict[str, str], end: Callable[[], object]):
        self.environment = environment
        self._control = control
        # If this process is killed, the server also ends, but in a container where nobody waits for it, it may stay as a zombie.
        atexit.register(end)

    @classmethod
    def start(cls) -> "_ForkServer":
        """Start a server in a fresh process."""
        control, theirs = _socket_pair()
        environment = child_environment()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "hyperion.processes.worker", "fork-server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        return cls(control, environment, lambda: (process.kill(), process.wait()))

    def fork(self, arguments: list[str], environment: dict[str, str], stdout: int | IO, new_session: bool) -> ForkedWorker | None:
        """Start a worker; see `start_worker`. Return None if the server has ended or cannot fork."""
        late = {name: value for name, value in environment.items() if _is_read_late(name) or name == _THREADS}
        request = {"arguments": arguments, "environment": late, "folder": os.getcwd(), "new_session": new_session}
        ours, theirs = _socket_pair()
        output, end = os.pipe() if stdout == subprocess.PIPE else (None, None)
        descriptor = end if end is not None else stdout if isinstance(stdout, int) else stdout.fileno()
        with contextlib.ExitStack() as unless_started:
            unless_started.enter_context(ours)
            if output is not None:
                unless_started.callback(os.close, output)
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], [descriptor, theirs.fileno()])
            except OSError:
                return None
            finally:
                theirs.close()
                if end is not None:
                    os.close(end)
            # The server replies when it has finished its imports.
            pid, handles, _, _ = socket.recv_fds(ours, _REQUEST_BYTES, 1)
            if not pid:
                return None
            unless_started.pop_all()
            return ForkedWorker(int(pid), handles[0], ours, output)


# The fork server of each process, by process ID, because a fork of this process needs a server of its own.
_servers: dict[int, _ForkServer] = {}
_lock = threading.Lock()


def start_worker(
    python: str, arguments: list[str], environment: dict[str, str], stdout: int | IO = subprocess.PIPE, new_session: bool = False
) -> subprocess.Popen[str] | ForkedWorker:
    """Start `python -m hyperion.processes.worker`, as a fork if possible. The first call in a process starts its fork server.

    The worker is a fresh process with another interpreter, on systems without pidfd_open(2), if importing torch failed or used a
    GPU, and if a variable that an import may read has another value than in the server.

    Args:
        python: path of the Python interpreter.
        arguments: command-line arguments of the worker. The process ID of its parent, with which it ends, is added to them.
        environment: all environment variables of the worker.
        stdout: destination of stdout and stderr: a file or its descriptor, or subprocess.PIPE.
        new_session: if True, make the worker the leader of a new session and process group.
    """
    if python == sys.executable and sys.platform == "linux":
        with _lock:
            process = os.getpid()
            if process not in _servers:
                _servers[process] = _ForkServer.start()
        server = _servers[process]
        if _read_early(environment) == _read_early(server.environment | _threads_of(environment)):
            worker = server.fork(arguments, environment, stdout, new_session)
            if worker is not None:
                return worker
    fresh = [*arguments, str(os.getpid())]
    return start(python, "hyperion.processes.worker", fresh, environment, stdout=stdout, new_session=new_session)


def _read_early(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not _is_read_late(name)}


def _is_read_late(name: str) -> bool:
    return name in TORCHRUN_VARIABLES or name.startswith(_READ_LATE)


def _threads_of(environment: dict[str, str]) -> dict[str, str]:
    """Return the variable with the number of threads, if it holds a single number."""
    threads = environment.get(_THREADS, "")
    return {_THREADS: threads} if threads.isdigit() else {}


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep the boundaries of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@dataclass(frozen=True)
class _Running:
    """A worker of this server."""

    pid: int
    handle: int
    client: socket.socket


# Whether this process has imported all packages: it is a fork server or a fork of one.
_prepared = False


def run_fork_server(descriptor: int) -> list[str]:
    """Import the packages, and serve requests until the client ends. In each fork, return the arguments of the worker.

    Args:
        descriptor: descriptor of the socket on which requests arrive.
    """
    global _prepared
    if not _can_refer_to_processes():
        sys.exit("this system has no pidfd_open(2)")
    handlers = _ignore_signals()
    folder = os.getcwd()
    pin_to_cores()
    with imports_only():
        for name in _IMPORTED:
            importlib.import_module(name)
    gc.freeze()
    if _uses_gpu():
        sys.exit("importing torch has opened a GPU, which forks could not use")
    _prepared = True
    return _serve(socket.socket(fileno=descriptor), folder, handlers)


def fork_own_server() -> list[str] | None:
    """Make a fork of this process the fork server of this process, if this process is itself a fork and has the packages.

    Call this function before this process starts threads.

    Returns:
        None in this process. In each fork of the new server, the arguments of a worker.
    """
    if not _prepared:
        return None
    control, theirs = _socket_pair()
    server = os.fork()
    if server == 0:
        control.close()
        return _serve(theirs, os.getcwd(), _ignore_signals())
    theirs.close()

    def end() -> None:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)

    _servers[os.getpid()] = _ForkServer(control, dict(os.environ), end)
    return None


def _ignore_signals() -> dict[int, Any]:
    """Ignore Ctrl-C and SIGTERM, which a terminal or a batch system sends to all processes at once. Return the earlier handlers.

    Workers may need time to save their state, and the server must report their exit codes.
    """
    return {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}


def _serve(control: socket.socket, folder: str, handlers: dict[int, Any]) -> list[str]:
    """Serve requests until the client ends. In each fork, return the arguments of the worker and the server's process ID."""
    server = os.getpid()
    events = selectors.DefaultSelector()
    events.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in events.select():
            worker: _Running | None = key.data
            if events.get_map().get(key.fd) != key:
                continue  # a worker that ended at the same time as its client has just been removed
            if worker is None:
                request, descriptors, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 2)
                if not request:
                    os._exit(0)  # the client has ended; Linux now sends SIGTERM to the workers, see `die_with`
                if _fork(events, *descriptors):
                    for number, handler in handlers.items():
                        signal.signal(number, handler)
                    _become_worker(json.loads(request), folder, server)
                    return sys.argv[1:]
            elif key.fileobj is worker.client:  # the client has closed its end: it no longer waits for this worker
                events.unregister(worker.client)
                signal.pidfd_send_signal(worker.handle, signal.SIGTERM)
            else:
                _report_end(events, worker)


def _fork(events: selectors.BaseSelector, output: int, connection: int) -> bool:
    """Fork, and return True in the fork. The server tells the client which process it is."""
    client, pid = socket.socket(fileno=connection), None
    with contextlib.suppress(OSError):  # no memory for another process: the client starts one, and reports what happens to it
        pid = os.fork()
    if pid == 0:
        for key in [*events.get_map().values()]:
            os.close(key.fd)
        events.close()
        client.close()
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        return True
    os.close(output)
    if pid is None:
        client.close()
        return False
    worker = _Running(pid, os.pidfd_open(pid), client)
    with contextlib.suppress(OSError):
        socket.send_fds(client, [str(pid).encode()], [worker.handle])
    for source in (worker.handle, client):
        events.register(source, selectors.EVENT_READ, worker)
    return False


def _become_worker(request: dict, folder: str, server: int) -> None:
    """Give this fork the arguments, environment, working directory, threads and random numbers of a new process."""
    import numpy as np
    import torch

    if request["new_session"]:
        os.setsid()
    sys.argv[1:] = [*request["arguments"], str(server)]
    threads = os.environ.get(_THREADS)
    for name in [name for name in os.environ if _is_read_late(name) or name == _THREADS]:
        del os.environ[name]
    os.environ.update(request["environment"])
    if os.environ.get(_THREADS) != threads:
        torch.set_num_threads(int(os.environ[_THREADS]))
    os.chdir(request["folder"])
    if sys.path[0] == folder:  # `python -m` puts the working directory first, unless an option or a variable forbids it
        sys.path[0] = request["folder"]
    np.random.seed()  # Python's own generator has a new seed after each fork


def _report_end(events: selectors.BaseSelector, worker: _Running) -> None:
    """Send the exit code of a worker that has ended to its client."""
    code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
    events.unregister(worker.handle)
    os.close(worker.handle)
    with contextlib.suppress(KeyError):  # removed before if the client has closed its end
        events.unregister(worker.client)
    with worker.client, contextlib.suppress(OSError):
        worker.client.send(code.to_bytes(_CODE_BYTES, sys.byteorder, signed=True))


def _can_refer_to_processes() -> bool:
    """Return False if the kernel is older than 5.3, or if the rules of a container forbid descriptors of processes."""
    try:
        handle = os.pidfd_open(os.getpid())
        signal.pidfd_send_signal(handle, 0)
    except OSError:
        return False
    os.close(handle)
    return True


def _uses_gpu() -> bool:
    """Return True if this process has a file of a GPU driver open."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            if os.readlink(link).startswith(_GPU_FILES):
                return True
    return False
