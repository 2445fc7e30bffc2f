"""Support for mpirun: check that it can start ranks, provide its settings, and read the ranks and exit codes that it reports."""

import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Mapping

from hyperion.hardware.cpu import read_cpu

# Environment variables in which mpirun passes its rank to a process. The first is for Open MPI, the second for MPICH, MVAPICH and
# Intel MPI.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


def why_no_mpi(
    find_program: Callable[[str], object] = shutil.which, find_module: Callable[[str], object] = importlib.util.find_spec
) -> str:
    """Return why mpirun cannot start ranks that call MPI, and what to install. Return "" if nothing is missing."""
    missing = ["mpirun is not in PATH"] * (not find_program("mpirun")) + ["mpi4py is not installed"] * (not find_module("mpi4py"))
    if not missing:
        return ""
    step = "apt install openmpi-bin, then pip install mpi4py"
    if not find_program("mpirun") and find_program("srun"):
        step = "load a module of the cluster that has mpirun; ranks are not started with srun"
    return f"unavailable: {' and '.join(missing)}; next step: {step}"


def mpirun_settings(ranks: int) -> dict[str, str]:
    """Return the environment variables that Open MPI needs to start this number of ranks. Other MPI libraries ignore them."""
    settings = {}
    if os.geteuid() == 0:  # root, as in containers: without both variables, Open MPI refuses to run
        settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if ranks > read_cpu().cores:  # by default, Open MPI starts one rank per core; the names are those of version 4 and of 5
        settings |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    return settings


def adopt_mpi_rank() -> None:
    """Set torchrun's variables RANK and LOCAL_RANK to the rank that mpirun gave to this process on a single node."""
    rank = next(os.environ[name] for name in _RANK_VARIABLES if name in os.environ)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}


def rank_exit_codes(log: str, pids: Mapping[int, int]) -> dict[int, int]:
    """Find the rank that failed first, and return {rank: exit code}. For a signal, the exit code is its negative number.

    Args:
        log: output of mpirun. Open MPI reports the rank, and MPICH reports the process ID.
        pids: process ID of each rank.

    Returns:
        A dict with one item, or an empty dict if mpirun reported no process.
    """
    if found := re.search(r"process rank (\d+) with PID \d+ on node \S+\s+exited on\s+signal (\d+)", log):
        return {int(found[1]): -int(found[2])}
    if found := re.search(r"Process name: \[.*?(\d+)\]\s+Exit code:\s+(\d+)", log):
        return {int(found[1]): int(found[2])}
    found = re.search(r"PID (\d+) RUNNING AT \S+\s+=\s+EXIT CODE: (\d+)", log)
    by_signal = re.search(r"EXIT STRING: .*\(signal (\d+)\)", log)
    return {
        rank: -int(by_signal[1]) if by_signal else int(found[2])
        for rank, pid in pids.items()
        if found is not None and pid == int(found[1])
    }
