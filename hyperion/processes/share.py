"""The part of the machine that a process keeps to where several notebooks share it."""

import os
import sys

# Numbers of cores, "0,1,2"; set for the kernels of notebooks that run side by side, and with them for their workers.
CORES = "HYPERION_CORES"
_THREADS = "OMP_NUM_THREADS"


def keep_to_share() -> None:
    """Compute on the cores that the environment names, with that share of PyTorch's threads; without a name, on all."""
    named = os.environ.get(CORES)
    if not named or not hasattr(os, "sched_setaffinity"):
        return
    before, share = os.sched_getaffinity(0), {int(number) for number in named.split(",")}
    os.sched_setaffinity(0, share)
    torch = sys.modules.get("torch")  # a forked process has it, with threads for all cores; another will count its own
    if torch is not None and _THREADS not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() * len(share) // len(before)))
