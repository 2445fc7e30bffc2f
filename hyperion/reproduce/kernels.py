"""The kernel of a notebook: this interpreter and this checkout, whatever else is installed on the machine.

It starts in a session of its own and ends with all processes that it started.
"""

import contextlib
import json
import os
import sys
import tempfile
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from traitlets import default

from hyperion.paths import SILENT_HOSTS
from hyperion.processes.child_process import GRACE_S, child_environment, descendants, start
from hyperion.terminal import notice
from hyperion.untrusted import is_private

KERNEL = "python3"
PROVISIONER = "hyperion-provisioner"
OPTIMIZE = "PYTHONOPTIMIZE"
# A Unix socket's name has at most 107 bytes; jupyter_client appends "/kernel-ipc-5" to the folder's.
_LONGEST_FOLDER = 80
_SILENT_HOSTS = "silent-hosts"


def library_environment() -> dict[str, str]:
    """Return this process's environment with this checkout importable, without the user's site packages, with assertions.

    UTF-8 mode makes the processes independent of the locale: they read, write and print UTF-8.
    """
    return with_assertions(child_environment() | {"PYTHONNOUSERSITE": "1", "PYTHONUTF8": "1"})


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
    # jupyter_client itself finds only the provisioners that are entry points of installed packages.
    entry = EntryPoint(PROVISIONER, f"{__name__}:{SessionProvisioner.__name__}", KernelProvisionerFactory.GROUP_NAME)
    KernelProvisionerFactory.instance().provisioners[PROVISIONER] = entry
    specification = scratch / "kernels" / KERNEL
    specification.mkdir(parents=True, exist_ok=True)
    (scratch / _SILENT_HOSTS).mkdir(exist_ok=True)
    (specification / "kernel.json").write_text(json.dumps(_specification(scratch, environment)), "utf-8")

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


class SessionProvisioner(LocalProvisioner):
    """Starts a local kernel that ends with this process, and ends all processes that the kernel started.

    The command is `python … -m module arguments`, where the module is ipykernel's.
    """

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the kernel as the leader of a session, so that signals reach its whole process group.

        Output of the kernel outside of cells goes to this process's standard error.
        """
        arguments = ["kernel", str(os.getpid()), *cmd[cmd.index("-m") + 2 :]]
        self.cwd = kwargs.get("cwd") or os.getcwd()
        self.below: list[psutil.Process] = []
        self.process = start(
            cmd[0],
            "hyperion.processes.worker",
            arguments,
            with_assertions(kwargs["env"]),
            stdout=sys.__stderr__ or sys.stderr,
            new_session=True,
            folder=os.fspath(self.cwd),
        )
        self.pid = self.pgid = self.process.pid
        return self.connection_info

    async def send_signal(self, signum: int) -> None:
        """Signal the kernel's process group, and record its descendants: once it has ended, they cannot be found."""
        if self.process is not None:
            self.below = list({*self.below, *descendants(self.pid)})
        await super().send_signal(signum)

    async def cleanup(self, restart: bool = False) -> None:
        """End the processes that the kernel started; the kernel itself has ended.

        Processes in the kernel's session were interrupted with it and are killed. Processes in sessions of their own, such as
        launchers, get SIGTERM and `GRACE_S` seconds to save, then are killed.
        """
        await super().cleanup(restart)
        left, self.below = [process for process in self.below if process.is_running()], []
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill() if _session(process) == self.pid else process.terminate()
        for process in psutil.wait_procs(left, timeout=GRACE_S)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _session(process: psutil.Process) -> int:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        return os.getsid(process.pid)
    return 0


def _specification(scratch: Path, environment: dict[str, str]) -> dict:
    ours = library_environment()
    own = {
        **{name: ours[name] for name in ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONUTF8")},
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
        "metadata": {"kernel_provisioner": {"provisioner_name": PROVISIONER}},
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
