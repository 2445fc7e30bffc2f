"""Start a notebook's kernel in a session of its own, and end it with all processes that it started."""

import contextlib
import os
import sys
from importlib.metadata import EntryPoint

import psutil
from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

from hyperion.processes.lifeline import GRACE_S, processes_below
from hyperion.processes.starting import start
from hyperion.reproduce.kernels import with_assertions

NAME = "hyperion-provisioner"


class SessionProvisioner(LocalProvisioner):
    """A local kernel that ends with this process and leaves no process of its own behind.

    Its command is `python … -m module arguments`, where the module is ipykernel's.
    """

    async def launch_kernel(self, cmd: list[str], **kwargs) -> KernelConnectionInfo:
        """Start the kernel as the leader of a session, whose group signals are sent to; what it prints past its cells goes
        to this process's stderr.
        """
        arguments = [str(os.getpid()), *cmd[cmd.index("-m") + 2 :]]
        self.cwd = kwargs.get("cwd") or os.getcwd()
        self.below: list[psutil.Process] = []
        self.process = start(
            cmd[0],
            "hyperion.processes.kernel",
            arguments,
            with_assertions(kwargs["env"]),
            stdout=sys.__stderr__,
            new_session=True,
            folder=os.fspath(self.cwd),
        )
        self.pid = self.pgid = self.process.pid
        return self.connection_info

    async def send_signal(self, signum: int) -> None:
        """Signal the kernel's process group. A kernel is interrupted first, so this sees all that it has started."""
        if self.process is not None:
            self.below = list({*self.below, *processes_below(self.pid)})
        await super().send_signal(signum)

    async def cleanup(self, restart: bool = False) -> None:
        """End what the kernel has started and left, though it ignore SIGTERM; the kernel itself has ended.

        What is still in its session was interrupted with it and is killed. What has a session of its own, as launchers have,
        gets `GRACE_S` after SIGTERM to save.
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
    """Let jupyter_client find it by its name, without an installed package's entry points."""
    found = EntryPoint(NAME, f"{__name__}:{SessionProvisioner.__name__}", KernelProvisionerFactory.GROUP_NAME)
    KernelProvisionerFactory.instance().provisioners[NAME] = found
