"""Start a notebook's kernel in a session of its own, and end it with all processes that it started."""

import contextlib
import os
import sys
from importlib.metadata import EntryPoint
from typing import Any

import psutil
from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from hyperion.processes.child_process import GRACE_S, descendants, start
from hyperion.reproduce.kernels import with_assertions

NAME = "hyperion-provisioner"


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


def register() -> None:
    """Register the provisioner with jupyter_client, which otherwise finds only entry points of installed packages."""
    entry = EntryPoint(NAME, f"{__name__}:{SessionProvisioner.__name__}", KernelProvisionerFactory.GROUP_NAME)
    KernelProvisionerFactory.instance().provisioners[NAME] = entry
