"""The part of the machine that a process keeps to where several notebooks share it."""

import os

# Numbers of cores, "0,1,2"; set for the kernels of notebooks that run side by side, and with them for their workers.
CORES = "HYPERION_CORES"


def keep_to_share() -> None:
    """Compute on the cores that the environment names, by default on all. Called before torch is imported: it starts a thread
    for each core that it finds.
    """
    named = os.environ.get(CORES)
    if not named or not hasattr(os, "sched_setaffinity"):
        return
    os.sched_setaffinity(0, {int(number) for number in named.split(",")})
