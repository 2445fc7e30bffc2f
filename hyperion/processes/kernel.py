"""A notebook's kernel that does not outlive its launcher: `python -m hyperion.processes.kernel LAUNCHER arguments`."""

import os
import runpy
import sys

from hyperion.processes.lifeline import die_with
from hyperion.processes.share import keep_to_share


def main() -> None:
    """Tie this process to the launcher of that number, and be an IPython kernel with the other arguments."""
    die_with(int(sys.argv.pop(1)))
    keep_to_share()
    # With it ipykernel watches its parent, for systems where `die_with` cannot.
    os.environ["JPY_PARENT_PID"] = str(os.getppid())
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
