"""A notebook's kernel that ends with its launcher: `python -m hyperion.processes.kernel LAUNCHER arguments`."""

import os
import runpy
import sys

from hyperion.processes.child_process import die_with, pin_to_cores


def main() -> None:
    """Tie this process to the launcher of that process number, then run ipykernel with the other arguments."""
    die_with(int(sys.argv.pop(1)))
    pin_to_cores()
    # With it ipykernel watches its parent, for systems where `die_with` gets no signal.
    os.environ["JPY_PARENT_PID"] = str(os.getppid())
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
