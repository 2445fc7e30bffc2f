"""`hyperion lab`: JupyterLab on this checkout, on loopback with a token, and the line that reaches it from elsewhere."""

import getpass
import os
import secrets
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from hyperion.errors import HyperionError
from hyperion.paths import project_root

FIRST_PORT = 8888


def lab(
    port: Annotated[int | None, typer.Option(help="Port on loopback.", show_default="the first free one from 8888")] = None,
) -> None:
    """Start JupyterLab on this checkout, on loopback with a token; print the ssh line for a remote node."""
    from hyperion.reproduce.kernels import library_environment

    chosen = free_port() if port is None else port
    token = secrets.token_hex(24)
    command = lab_command(project_root(), chosen)
    print("\n".join(lab_lines(chosen, token)), flush=True)
    # exec, not a child: signals, the terminal and the exit code are those of the server.
    os.execve(command[0], command, {**library_environment(), "JUPYTER_TOKEN": token})


def free_port(first: int = FIRST_PORT) -> int:
    """Return the first free loopback port from `first` on.

    Raises:
        HyperionError: a hundred ports in a row are taken.
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
    """Return the command that serves the checkout on loopback only.

    The token is passed in the environment: other users of the machine can read a process's arguments.

    Raises:
        HyperionError: JupyterLab is not installed.
    """
    if find_spec("jupyterlab") is None:
        raise HyperionError("JupyterLab is not installed", where=sys.executable, next_step="pip install -e '.[lab]'")
    options = ["--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
    if os.geteuid() == 0:  # common in containers; the server refuses to start for root without this option
        options.append("--allow-root")
    return [sys.executable, "-s", "-m", "jupyterlab", *options, f"--ServerApp.root_dir={root}"]


def lab_lines(port: int, token: str) -> list[str]:
    """Return the address to open, and the ssh command to type first on another machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, the user's number may have no entry in the password file
        user = str(os.getuid())
    return [
        f"open      http://127.0.0.1:{port}/lab?token={token}",
        f"remotely  ssh -N -L {port}:127.0.0.1:{port} {user}@{socket.gethostname()}    then open the same address there",
    ]
