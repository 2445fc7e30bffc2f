"""Start notebook kernels.

A kernel always uses this interpreter and this checkout, even if other kernels are installed on the machine. It starts in its own
session. When the kernel ends, all processes that it started are ended too.
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

from hyperion.processes.child_process import GRACE_S, child_environment, descendants, start
from hyperion.terminal import notice
from hyperion.untrusted import is_private

KERNEL = "python3"
PROVISIONER = "hyperion-provisioner"
OPTIMIZE = "PYTHONOPTIMIZE"
# The path of a Unix socket has at most 107 bytes. jupyter_client appends "/kernel-ipc-5" to the path of the folder.
_LONGEST_FOLDER = 80
# Variables that prevent output of other libraries between the results. Values that the user set have precedence.
_QUIET = {
    "KINETO_LOG_LEVEL": "6",  # the profiler prints its start and stop to standard error; 6 is above all its log levels
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers shows a bar for every model that is loaded or saved
}


def library_environment() -> dict[str, str]:
    """Return the environment variables for processes that use this library.

    They are the variables of this process with these changes: this checkout is importable, the user's site-packages are not used,
    assertions are enabled, Python's UTF-8 mode is on, so that files and output are UTF-8 in every locale, and PyTorch's profiler
    and transformers print no progress, unless the user has set their variables.
    """
    return with_assertions(_QUIET | child_environment() | {"PYTHONNOUSERSITE": "1", "PYTHONUTF8": "1"})


def with_assertions(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment without PYTHONOPTIMIZE, which would disable every `assert`."""
    return {name: value for name, value in environment.items() if name != OPTIMIZE}


def scratch_folder() -> tempfile.TemporaryDirectory:
    """Return a temporary folder on this node for one call.

    It contains the kernels' sockets and Jupyter's runtime files.
    """
    base = tempfile.gettempdir()
    # 20 characters are reserved for the name of the temporary folder.
    return tempfile.TemporaryDirectory(
        prefix="hyperion-", dir=base if len(base) < _LONGEST_FOLDER - 20 else "/tmp", ignore_cleanup_errors=True
    )


def kernel_manager_class(scratch: Path, environment: dict[str, str], folder: Path) -> type:
    """Return a kernel manager class whose only kernel is this interpreter.

    The manager and the kernel communicate through Unix sockets in `scratch`. Unlike with TCP ports, two calls cannot use the same
    socket by accident, and other users of a shared node cannot connect.

    Args:
        scratch: folder for the sockets and the kernel's files.
        environment: environment variables of the kernel, in addition to those of this process.
        folder: working folder of the kernel. The working folder of this process is not changed, because this process starts
            several kernels at the same time.
    """
    # Register the provisioner here, because jupyter_client finds only entry points of installed packages.
    entry = EntryPoint(PROVISIONER, f"{__name__}:{SessionProvisioner.__name__}", KernelProvisionerFactory.GROUP_NAME)
    KernelProvisionerFactory.instance().provisioners[PROVISIONER] = entry
    specification = scratch / "kernels" / KERNEL
    specification.mkdir(parents=True, exist_ok=True)
    (specification / "kernel.json").write_text(json.dumps(_specification(scratch, environment)), "utf-8")

    class ThisInterpreter(AsyncKernelManager):
        @default("kernel_spec_manager")
        def _only_ours(self) -> KernelSpecManager:
            # Without this option, jupyter_client adds its own kernel if the folder has none.
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
    """Starts a local kernel that ends when this process ends, and ends all processes that the kernel started.

    The command in the kernel specification must have the form `python … -m ipykernel_launcher arguments`.
    """

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the kernel as the leader of a new session, so that signals reach its whole process group.

        Output of the kernel that belongs to no cell goes to the standard error of this process.
        """
        # The slice contains the arguments after `-m ipykernel_launcher`. The worker module prepares the process and then starts
        # the launcher.
        arguments = ["kernel", str(os.getpid()), *cmd[cmd.index("-m") + 2 :]]
        self.cwd = kwargs.get("cwd") or os.getcwd()
        self.below: list[psutil.Process] = []
        self.process = start(
            cmd[0],
            "hyperion.processes.worker",
            arguments,
            with_assertions(kwargs["env"]),
            # The caller may have replaced `sys.stderr` with an object without a file descriptor.
            stdout=sys.__stderr__ or sys.stderr,
            new_session=True,
            folder=os.fspath(self.cwd),
        )
        self.pid = self.pgid = self.process.pid
        return self.connection_info

    async def send_signal(self, signum: int) -> None:
        """Send a signal to the kernel's process group, and record the processes that the kernel started.

        The processes are recorded now, because they cannot be found after the kernel has ended.
        """
        if self.process is not None:
            self.below = list({*self.below, *descendants(self.pid)})
        await super().send_signal(signum)

    async def cleanup(self, restart: bool = False) -> None:
        """End the processes that the kernel started. The kernel itself has already ended.

        Processes in the kernel's session are killed, because they have already received the kernel's signals. Processes in other
        sessions, such as launchers, get SIGTERM, and are killed if they are still running after `GRACE_S` seconds.
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
        **{name: ours[name] for name in ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONUTF8", *_QUIET)},
        # IPython must not use startup files or locks in a home folder that several nodes share.
        "IPYTHONDIR": str(scratch / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(scratch / "jupyter"),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        **_node_local_caches(scratch),
        **environment,
    }
    return {
        # This log level hides ipykernel's reports of closed sockets after a stop. The output of cells is not affected.
        "argv": [sys.executable, "-s", "-m", "ipykernel_launcher", "--log-level=CRITICAL", "-f", "{connection_file}"],
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "metadata": {"kernel_provisioner": {"provisioner_name": PROVISIONER}},
        # jupyter_client expands $NAME in these values, so $ is escaped as $$.
        "env": {name: value.replace("$", "$$") for name, value in own.items()},
    }


def _node_local_caches(scratch: Path) -> dict[str, str]:
    """Return environment variables that place the caches of compilers on this node. Variables that the user set are not changed.

    The folder has a fixed name, so that later calls use the same caches. Compilers execute files from their caches, so the folder
    is not used if other users can write to it, for example because another user created it first. In this case, the caches of
    this call are in `scratch`.
    """
    folder = Path(tempfile.gettempdir()) / f"hyperion-{os.getuid()}"
    if not is_private(folder):
        notice(
            f"{folder} is not used for the caches of compilers, because it is a link, is not a folder, or is open to other "
            "users. Remove it, or set TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR to other folders."
        )
        folder = scratch / "caches"
    names = {
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "MIOPEN_USER_DB_PATH": "miopen",
        "MIOPEN_CUSTOM_CACHE_DIR": "miopen",
    }
    return {name: str(folder / sub) for name, sub in names.items() if name not in os.environ}
