"""A running server: a front and its backend, which run in a session of their own and write to one log.

A server ends at the latest when the process that started it ends.

Experiments in the same process share a server, because starting one takes longer than most measurements.
"""

import atexit
import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hyperion.errors import HyperionError
from hyperion.experiments.serving.backends import Backend, ServerSizes
from hyperion.experiments.serving.client import Endpoint, complete, in_event_loop
from hyperion.processes.child_process import child_environment, is_alive, kill_session, start

MAX_BODY_BYTES = 256 << 10
DRAIN_S = 30.0
_POLL_S = 0.1
_LIST_EVERY_S = 1.0
_LOG_LINES = 15


class ServerError(HyperionError):
    """Raised if a server does not start or does not end."""


@dataclass
class Server:
    """A front with its backend.

    Args:
        front: process of the front.
        endpoint: endpoint to which clients send requests.
        log: file with the output of both processes.
        backend_pid: process ID of the backend.
        start_s: time from the start to the first answer, in seconds.
    """

    front: subprocess.Popen
    endpoint: Endpoint
    log: Path
    backend_pid: int
    start_s: float = field(default=0.0)
    _listed_s: float = field(default=-math.inf, init=False, repr=False)
    _listed: list[psutil.Process] = field(default_factory=list, init=False, repr=False)

    def processes(self) -> list[psutil.Process]:
        """Return all running processes of the server: the front, the backend, and the processes that they have started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            front = psutil.Process(self.front.pid)
            return [process for process in (front, *front.children(recursive=True)) if is_alive(process)]
        return []

    def rss_bytes(self) -> int:
        """Return the resident memory of all processes of the server, in bytes. A new process counts after at most a second.

        Listing the processes takes 5 ms of a core, 50 times as long as reading their memory. A load client that listed them after
        each answer would be busy with this, and would slow the server down that it measures.
        """
        if time.monotonic() - self._listed_s >= _LIST_EVERY_S:
            self._listed_s, self._listed = time.monotonic(), self.processes()
        total = 0
        for process in self._listed:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def backend_cpu_s(self) -> float:
        """Return the CPU time of the backend, in seconds.

        Raises:
            ServerError: the backend has ended.
        """
        try:
            times = psutil.Process(self.backend_pid).cpu_times()
        except psutil.Error as error:
            raise ServerError("the backend has ended", where=self.log, next_step="read the log") from error
        return times.user + times.system

    def log_text(self) -> str:
        """Return the log of both processes."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def drain(self) -> None:
        """Send SIGTERM to the front."""
        self.front.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        """Wait until the front has ended, and return its exit code.

        Raises:
            ServerError: the front did not end in time.
        """
        try:
            return self.front.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ServerError(
                f"the front did not end within {timeout_s:g} s", where=self.log, next_step="read the log"
            ) from error

    def close(self) -> None:
        """End the server with SIGTERM, or with SIGKILL if it does not end within 10 s."""
        if self.front.poll() is None:
            self.drain()
            with contextlib.suppress(ServerError):
                self.wait(10.0)
        kill_session(self.front.pid, ours=self.front.poll() is None)
        self.front.wait()


_running: dict[tuple, Server] = {}


def running_server(backend: Backend, folder: Path, dtype: str, device: str, sizes: ServerSizes) -> Server:
    """Return this process's running server with these properties, or start one if there is none.

    Args:
        backend: the backend.
        folder: folder of the model in Hugging Face format.
        dtype: number format of weights and computation.
        device: device of the backend, in PyTorch's notation.
        sizes: capacity limits of the server.

    Raises:
        ServerError: the server ended while starting, or gave no answer in time.
    """
    key = (backend.name, folder, dtype, device, sizes)
    server = _running.get(key)
    if server is None or server.front.poll() is not None:
        # Run one server at a time, because each takes memory and, on a CPU, cores.
        close_servers()
        _running[key] = server = start_server(backend, folder, dtype, device, sizes)
    return server


@atexit.register
def close_servers() -> None:
    """End all servers of this process. The log of a server that ended normally is deleted."""
    while _running:
        server = _running.popitem()[1]
        server.close()
        if server.front.returncode == 0:
            shutil.rmtree(server.log.parent, ignore_errors=True)


def start_server(backend: Backend, folder: Path, dtype: str, device: str, sizes: ServerSizes) -> Server:
    """Start a front and a backend, and wait for the first answer. Arguments and errors are those of `running_server`."""
    from hyperion.experiments.serving.front import KEY, free_port  # needs packages that may be missing

    began = time.perf_counter()
    where = Path(tempfile.mkdtemp(prefix="hyperion-server-"))
    state, log, port, secret = where / "state.json", where / "server.log", free_port(), secrets.token_urlsafe(16)
    # The model is on this machine. Without these variables, transformers checks the network for a newer version of itself.
    environment = child_environment() | {KEY: secret, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    limits = [
        "--max-requests",
        str(sizes.max_requests),
        "--max-body-bytes",
        str(MAX_BODY_BYTES),
        "--max-tokens",
        str(sizes.cache_tokens),
        "--drain-timeout-s",
        str(DRAIN_S),
    ]
    options = backend.options(folder, port, dtype, device, sizes)
    arguments = ["--launcher", str(os.getpid()), "--state", str(state), *limits, "--backend-port", str(port)]
    with log.open("w") as output:
        front = start(
            sys.executable,
            "hyperion.experiments.serving.front",
            [*arguments, "--module", backend.module, "--", *options],
            environment,
            stdout=output,
            new_session=True,
        )
    server = Server(front, Endpoint("", secret, str(folder)), log, 0)
    try:
        _wait_until_healthy(server, state, began + sizes.start_timeout_s)
        _require_answer(server, began + sizes.start_timeout_s)
    except BaseException:
        server.close()
        raise
    server.start_s = time.perf_counter() - began
    return server


def _wait_until_healthy(server: Server, state: Path, until_s: float) -> None:
    import httpx

    while time.perf_counter() < until_s:
        if server.front.poll() is not None:
            raise _start_error(server, f"it ended with exit code {server.front.returncode}")
        if state.exists() and not server.backend_pid:
            known = json.loads(state.read_text(encoding="utf-8"))
            server.backend_pid = known["backend"]
            server.endpoint = Endpoint(f"http://127.0.0.1:{known['port']}", server.endpoint.key, server.endpoint.model)
        if server.backend_pid:
            if not psutil.pid_exists(server.backend_pid) or not is_alive(psutil.Process(server.backend_pid)):
                raise _start_error(server, "the backend ended")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{server.endpoint.address}/health", timeout=3.0, trust_env=False).status_code == 200:
                    return
        time.sleep(_POLL_S)
    raise _start_error(server, "it is not healthy in time")


def _require_answer(server: Server, until_s: float) -> None:
    """Send one request, so that the backend allocates its cache and shows that it generates text."""
    endpoint = Endpoint(
        server.endpoint.address, server.endpoint.key, server.endpoint.model, max(1.0, until_s - time.perf_counter())
    )

    async def ask():
        async with endpoint.session() as session:
            return await complete(session, endpoint, "The first request", 2)

    if error := in_event_loop(ask).error:
        raise _start_error(server, error)


def _start_error(server: Server, why: str) -> ServerError:
    end = "\n".join(server.log_text().splitlines()[-_LOG_LINES:])
    return ServerError(f"the server did not start: {why}. The end of its log:\n{end}", where=server.log, next_step="read the log")
