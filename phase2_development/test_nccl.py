"""Do the devices of this machine talk to each other, rightly and how fast?

    torchrun --standalone --nproc_per_node=4 phase2_development/test_nccl.py
    python phase2_development/test_nccl.py                                      starts a rank for each device itself

Seven operations, checked by value on every rank; the devices' topology; the size from which on a message is large enough;
an all-reduce beside a computation. On GPUs one all-reduce of 8 GiB, where 18 GiB are free (`--largest 0` leaves it out).

Works from any directory; `--help` lists the options. No test of pytest's: the name is the one the book's commands have.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hyperion.commands.collective_check import app  # found by the line above, installed or not

if __name__ == "__main__":
    app()
