"""JupyterLab on this checkout: on loopback, with its token, and the line that reaches it from elsewhere."""

import getpass
import os
import secrets
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.reproduce.kernels import library_environment

FIRST_PORT = 8888


def free_port(first: int = FIRST_PORT) -> int:
    """The first port from `first` on that nobody listens on at loopback.

    Raises:
        HyperionError: a hundred of them are taken.
    """
    for port in range(first, first + 100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise HyperionError("no free port", where=f"127.0.0.1:{first}-{first + 99}", next_step="name another with --port")


def lab_command(root: Path, port: int) -> list[str]:
    """The command that serves the checkout, to this machine's loopback only; its token comes by environment."""
    if find_spec("jupyterlab") is None:
        raise HyperionError("JupyterLab is not installed", where=sys.executable, next_step="pip install -e '.[lab]'")
    options = ["--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
    if os.geteuid() == 0:  # in a container one often is; the server would refuse to start
        options.append("--allow-root")
    return [sys.executable, "-s", "-m", "jupyterlab", *options, f"--ServerApp.root_dir={root}"]


def lab_lines(port: int, token: str) -> list[str]:
    """What to open, and what to type first on another machine."""
    host, user = socket.gethostname(), _user()
    return [
        f"open      http://127.0.0.1:{port}/lab?token={token}",
        f"remotely  ssh -N -L {port}:127.0.0.1:{port} {user}@{host}    then open the same address there",
    ]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # containers run under numbers without an entry in the password file
        return str(os.getuid())


def serve_lab(root: Path, port: int | None) -> None:
    """Become the JupyterLab server; never returns."""
    chosen = free_port() if port is None else port
    token = secrets.token_hex(24)
    command = lab_command(root, chosen)
    print("\n".join(lab_lines(chosen, token)), flush=True)
    os.execve(command[0], command, {**library_environment(), "JUPYTER_TOKEN": token})
