"""The rank that waits to be ended in test_ranks.py. Its launchers import this module, and it imports no torch: three launchers
would spend two seconds each on it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hyperion.errors import HyperionError

MARK = "HYPERION_TEST_RANKS"


def waits(folder: str, saves: bool) -> dict:
    """Write the process number of torchrun to FOLDER/ready and wait. After SIGTERM save, if `saves`."""
    start_child()
    received = []
    if saves:
        signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    ready = Path(folder) / "ready"
    ready.with_suffix(".new").write_text(str(os.getsid(os.getppid())))  # torchrun's process leads the session of the parent
    ready.with_suffix(".new").rename(ready)
    while not received:
        time.sleep(0.05)
    (Path(folder) / "saved").touch()
    raise _Interrupted("stopped on purpose; the state was saved", next_step="start again")


class _Interrupted(HyperionError):
    exit_code = 75


def start_child() -> None:
    """Start a child of the rank, as a data loader does; it ignores SIGTERM."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with contextlib.closing(child.stdout) as output:
        output.readline()
