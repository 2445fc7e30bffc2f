"""mpirun: what it needs, and which rank it says has failed. (That it starts ranks: tests/experiments/interconnect.)"""

import os

import pytest

from hyperion.processes import mpi
from hyperion.processes.mpi import adopt_mpi_rank, mpirun_settings, rank_exit_codes, why_no_mpi

OPEN_MPI_5_SIGNAL = """
prterun noticed that process rank 1 with PID 9549 on node vm exited on
signal 9 (Killed).
"""
OPEN_MPI_5_EXIT = """
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-9393@1,3]
   Exit code:    75
"""
OPEN_MPI_4_SIGNAL = "mpirun noticed that process rank 2 with PID 0 on node vm exited on signal 11 (Segmentation fault).\n"
OPEN_MPI_4_EXIT = "  Process name: [[4660,1],1]\n  Exit code:    1\n"
MPICH_SIGNAL = """
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 9895 RUNNING AT vm
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
"""
MPICH_EXIT = "=   PID 9895 RUNNING AT vm\n=   EXIT CODE: 9\n"


@pytest.mark.parametrize(
    ("log", "codes"),
    [
        (OPEN_MPI_5_SIGNAL, {1: -9}),
        (OPEN_MPI_5_EXIT, {3: 75}),
        (OPEN_MPI_4_SIGNAL, {2: -11}),
        (OPEN_MPI_4_EXIT, {1: 1}),
        (MPICH_SIGNAL, {1: -9}),
        (MPICH_EXIT, {1: 9}),
        (MPICH_EXIT.replace("9895", "1"), {}),
        ("There are not enough slots available", {}),
    ],
)
def test_the_rank_that_mpirun_names(log, codes):
    assert rank_exit_codes(log, {0: 9894, 1: 9895}) == codes


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (("mpirun", "mpi4py"), ""),
        (("mpi4py",), "unavailable: mpirun is not in PATH; next step: apt install"),
        (("mpi4py", "srun"), "unavailable: mpirun is not in PATH; next step: load a module of the cluster"),
        (("mpirun",), "unavailable: mpi4py is not installed; next step: "),
        ((), "unavailable: mpirun is not in PATH and mpi4py is not installed; next step: "),
    ],
)
def test_what_is_missing_is_named_with_a_next_step(found, reason):
    why = why_no_mpi(lambda name: name in found, lambda name: name in found)
    assert why.startswith(reason) and bool(why) == bool(reason)


def test_open_mpi_is_allowed_to_run_as_root_and_with_more_ranks_than_cores(monkeypatch):
    cores = mpi.read_cpu().cores
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert mpirun_settings(cores) == {}
    assert mpirun_settings(cores + 1)["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert mpirun_settings(cores) == {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.mark.parametrize(("variables", "rank"), [({"PMI_RANK": "3"}, "3"), ({"PMI_RANK": "0", "OMPI_COMM_WORLD_RANK": "2"}, "2")])
def test_the_rank_of_mpirun_is_that_of_the_process_group(variables, rank, monkeypatch):
    """Slurm sets PMI_RANK for a program that then calls Open MPI's mpirun."""
    for name in ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.setenv(name, "7")  # so that the test leaves the variables as they were
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    adopt_mpi_rank()
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == (rank, rank)
