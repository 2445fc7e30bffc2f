"""The kernel of a notebook: this interpreter and this checkout, whatever else is installed on the machine."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import hyperion
from hyperion.paths import SILENT_HOSTS
from hyperion.terminal import notice
from hyperion.untrusted import is_private

KERNEL = "python3"
OPTIMIZE = "PYTHONOPTIMIZE"
# A Unix socket's name has at most 107 bytes; jupyter_client appends "/kernel-ipc-5" to the folder's.
_LONGEST_FOLDER = 80
_SILENT_HOSTS = "silent-hosts"


def library_environment() -> dict[str, str]:
    """Return this process's environment with this checkout importable, without the user's site packages, with assertions.

    UTF-8 mode makes the processes independent of the locale: they read, write and print UTF-8.
    """
    checkout = str(Path(hyperion.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))
    return with_assertions({**os.environ, "PYTHONPATH": path, "PYTHONNOUSERSITE": "1", "PYTHONUTF8": "1"})


def with_assertions(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment without PYTHONOPTIMIZE, which removes every `assert`."""
    return {name: value for name, value in environment.items() if name != OPTIMIZE}


def scratch_folder() -> tempfile.TemporaryDirectory:
    """Return a folder on this node for this call only: sockets, Jupyter's run-time files, the unfinished executed copy."""
    base = tempfile.gettempdir()
    return tempfile.TemporaryDirectory(
        prefix="hyperion-", dir=base if len(base) < _LONGEST_FOLDER - 20 else "/tmp", ignore_cleanup_errors=True
    )


def kernel_manager_class(scratch: Path, environment: dict[str, str], folder: Path) -> type:
    """Return a kernel manager whose only kernel is this interpreter, reached through Unix sockets in `scratch`.

    Unlike TCP ports, sockets in a private folder do not collide with those of another call, and other users of a shared node
    cannot connect to them.

    Args:
        environment: variables of the kernel in addition to this process's.
        folder: working folder of the kernel. This process keeps its own: it starts other kernels at the same time.
    """
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from traitlets import default

    from hyperion.reproduce import provisioner

    provisioner.register()
    specification = scratch / "kernels" / KERNEL
    specification.mkdir(parents=True, exist_ok=True)
    (scratch / _SILENT_HOSTS).mkdir(exist_ok=True)
    (specification / "kernel.json").write_text(json.dumps(_specification(scratch, environment, provisioner.NAME)), "utf-8")

    class ThisInterpreter(AsyncKernelManager):
        @default("kernel_spec_manager")
        def _only_ours(self) -> KernelSpecManager:
            return KernelSpecManager(kernel_dirs=[str(scratch / "kernels")], ensure_native_kernel=False)

        @default("transport")
        def _sockets(self) -> str:
            return "ipc"

        @default("connection_file")
        def _in_scratch(self) -> str:
            return str(scratch / "kernel.json")

        async def start_kernel(self, **kwargs: Any) -> None:
            await super().start_kernel(**{"cwd": str(folder)} | kwargs)

    return ThisInterpreter


def _specification(scratch: Path, environment: dict[str, str], provisioner: str) -> dict:
    ours = library_environment()
    own = {
        "PYTHONPATH": ours["PYTHONPATH"],
        "PYTHONNOUSERSITE": ours["PYTHONNOUSERSITE"],
        "PYTHONUTF8": ours["PYTHONUTF8"],
        # No start-up files or locks from a home folder that other nodes share.
        "IPYTHONDIR": str(scratch / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(scratch / "jupyter"),
        SILENT_HOSTS: str(scratch / _SILENT_HOSTS),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        **_node_local_caches(scratch),
        **environment,
    }
    return {
        # Silences ipykernel's own log, which reports closed sockets on a stop. The output of cells is not part of it.
        "argv": [sys.executable, "-s", "-m", "ipykernel_launcher", "--log-level=CRITICAL", "-f", "{connection_file}"],
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "metadata": {"kernel_provisioner": {"provisioner_name": provisioner}},
        # jupyter_client expands $NAME in these values.
        "env": {name: value.replace("$", "$$") for name, value in own.items()},
    }


def _node_local_caches(scratch: Path) -> dict[str, str]:
    """Return variables that put the caches of compilers on this node, for those that the user has not set.

    The caches outlive this call, so their folder has a fixed name, which another user of the node can create first. Compilers
    execute files from their caches: if others can write to the folder, this call uses caches in `scratch`.
    """
    folder = Path(tempfile.gettempdir()) / f"hyperion-{os.getuid()}"
    if not is_private(folder):
        notice(
            f"{folder} is not used for compilers' caches: it is a link, no folder, or open to other users; "
            "remove it, or name other folders: TRITON_CACHE_DIR=, TORCHINDUCTOR_CACHE_DIR="
        )
        folder = scratch / "caches"
    names = {
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "MIOPEN_USER_DB_PATH": "miopen",
        "MIOPEN_CUSTOM_CACHE_DIR": "miopen",
    }
    return {name: str(folder / sub) for name, sub in names.items() if name not in os.environ}
