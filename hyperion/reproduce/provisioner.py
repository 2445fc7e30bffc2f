"""How jupyter_client starts a kernel of ours: forked from the fork server where one is at hand."""

import os
import sys
from importlib.metadata import EntryPoint

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

from hyperion.processes.starting import start

NAME = "hyperion-provisioner"


class ForkingProvisioner(LocalProvisioner):
    """A local kernel that need not import PyTorch again, and ends with this process.

    Its command is `python … -m module arguments`, where the module is ipykernel's.
    """

    async def launch_kernel(self, cmd: list[str], **kwargs) -> KernelConnectionInfo:
        """Start the kernel as the leader of a session, whose group signals are sent to; what it prints past its cells goes
        to this process's stderr.
        """
        arguments = [str(os.getpid()), *cmd[cmd.index("-m") + 2 :]]
        self.cwd = kwargs.get("cwd") or os.getcwd()
        self.process = start(
            cmd[0], "hyperion.processes.kernel", arguments, kwargs["env"], stdout=sys.__stderr__, new_session=True,
            folder=os.fspath(self.cwd),
        )  # fmt: skip
        self.pid = self.pgid = self.process.pid
        return self.connection_info


def register() -> None:
    """Let jupyter_client find it by its name, without an installed package's entry points."""
    found = EntryPoint(NAME, f"{__name__}:{ForkingProvisioner.__name__}", KernelProvisionerFactory.GROUP_NAME)
    KernelProvisionerFactory.instance().provisioners[NAME] = found
