"""Program that runs a backend and ends it when the front ends.

Usage: `python -m hyperion.experiments.serving.tether PID module options`, where PID is the process ID of the front. This program
runs at every start of a server. Therefore this module avoids imports that load pandas, which takes a second.
"""

import os
import runpy
import sys

from hyperion.processes.child_process import die_with, pin_to_cores


def tethered_command(module: str, options: list[str]) -> list[str]:
    """Return the command that runs a module as a child process of this process and ends it when this process ends."""
    return [sys.executable, "-m", "hyperion.experiments.serving.tether", str(os.getpid()), module, *options]


def main() -> None:
    """Run a module with its options. The arguments are the process ID of the launcher, the module, and its options."""
    launcher, module, *options = sys.argv[1:]
    die_with(int(launcher))
    pin_to_cores()
    sys.argv = [module, *options]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
