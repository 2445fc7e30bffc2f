"""The kernel a notebook runs in: this very interpreter and this checkout, whatever else the machine has installed."""

import json
import os
import sys
import tempfile
from pathlib import Path

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
    """This process's whole environment, with this checkout importable, the user's own site packages left out, and
    assertions switched on.

    UTF-8 mode makes the processes independent of the locale: what they read, write and print is UTF-8.
    """
    checkout = str(Path(hyperion.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))
    return with_assertions({**os.environ, "PYTHONPATH": path, "PYTHONNOUSERSITE": "1", "PYTHONUTF8": "1"})


def with_assertions(environment: dict[str, str]) -> dict[str, str]:
    """The environment without the variable that has Python leave out every `assert`."""
    return {name: value for name, value in environment.items() if name != OPTIMIZE}


def scratch_folder() -> tempfile.TemporaryDirectory:
    """A folder on this node, for this call only: sockets, Jupyter's run-time files, the executed copy in the making."""
    base = tempfile.gettempdir()
    return tempfile.TemporaryDirectory(
        prefix="hyperion-", dir=base if len(base) < _LONGEST_FOLDER - 20 else "/tmp", ignore_cleanup_errors=True
    )


def kernel_manager_class(scratch: Path, environment: dict[str, str], folder: Path) -> type:
    """A kernel manager that knows one kernel, this interpreter, and talks to it over Unix sockets in `scratch`.

    Sockets in a private folder, unlike TCP ports, neither collide with another call's nor are open to a shared node's
    other users.

    Args:
        environment: variables that the kernel gets besides this process's own.
        folder: it works in; this process stays where it is, as other kernels are started from it at the same time.
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

        async def start_kernel(self, **kwargs) -> None:
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
        # ipykernel's own log: on a stop it tells of sockets it was about to close. What cells print is not its log.
        "argv": [sys.executable, "-s", "-m", "ipykernel_launcher", "--log-level=CRITICAL", "-f", "{connection_file}"],
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "metadata": {"kernel_provisioner": {"provisioner_name": provisioner}},
        # jupyter_client expands $NAME in these values.
        "env": {name: value.replace("$", "$$") for name, value in own.items()},
    }


def _node_local_caches(scratch: Path) -> dict[str, str]:
    """Folders for compilers' caches, on this node, where the user named none.

    They outlive this call, so their folder has a fixed name, which another user of the node can take first. Compilers execute
    what they find there: a folder that others can write to is not used, and this call gets caches of its own.
    """
    folder = Path(tempfile.gettempdir()) / f"hyperion-{os.getuid()}"
    if not is_private(folder):
        notice(
            f"{folder} is not used for compilers' caches: it is a link, no folder, or open to other users; "
            "remove it, or name folders of your own: TRITON_CACHE_DIR=, TORCHINDUCTOR_CACHE_DIR="
        )
        folder = scratch / "caches"
    names = {
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "MIOPEN_USER_DB_PATH": "miopen",
        "MIOPEN_CUSTOM_CACHE_DIR": "miopen",
    }
    return {name: str(folder / sub) for name, sub in names.items() if name not in os.environ}
