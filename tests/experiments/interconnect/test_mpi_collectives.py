"""Collectives under a real mpirun: every value on every rank, planted faults, and the paths of buffers on GPUs.

`.ci/run` installs Open MPI and mpi4py for this file, and sets HYPERION_TESTS_NEED_MPI, with which their absence is a failure.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import psutil
import pytest
import torch

from hyperion.chapter import Context, Result
from hyperion.chapter.variants import packed, run_on_ranks
from hyperion.doctor import probes
from hyperion.errors import HyperionError
from hyperion.experiments.interconnect import mpi_collectives
from hyperion.experiments.interconnect.mpi_collectives import (
    AWARE,
    EXPERIMENT,
    HOST,
    MPI_COLLECTIVES,
    STAGED,
    library_of,
    staged,
    stated_support,
)
from hyperion.hardware import detect, detect_cpu
from hyperion.hardware.cpu import read_cpu
from hyperion.processes import Job, JobError, RankError, World, run_ranks
from hyperion.processes.child_process import has_ended
from hyperion.processes.mpi import why_no_mpi
from hyperion.results import Row
from tests.chapter.toy import perform, toy_context
from tests.experiments.interconnect import mpi_faults
from tests.hardware.machines import facts
from tests.processes import rank_entries

SIZES = {"dtype": "fp32", "bytes": [4096], "ranks": [2], "time_limit_s": 0.01, "hang_timeout_s": 60.0, "timeout_s": 300.0}
NAMES = ["all_reduce", "broadcast", "reduce", "scatter", "gather"]


@pytest.fixture(scope="module")
def mpirun():
    """The path of mpirun. The ranks compute on the CPU."""
    if reason := why_no_mpi():
        (pytest.fail if os.environ.get("HYPERION_TESTS_NEED_MPI") else pytest.skip)(reason)
    with pytest.MonkeyPatch.context() as environment:
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            environment.setenv(name, "")
        yield shutil.which("mpirun")


def ignore(*_: object) -> None:
    pass


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_value_is_right_on_every_rank(mpirun, ranks, tmp_path):
    result = perform(toy_context("mpi_collectives", SIZES | {"ranks": [ranks]}, tmp_path), tmp_path)
    rates = [row for row in result.rows if row.metric == "busbw_gb_s"]
    assert [(row.variant, row.params["bytes"]) for row in rates] == [(name, 4096) for name in NAMES]
    factors = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1, "reduce": 1}
    for row in rates:
        assert row.check_error == row.check_tolerance == 0 and row.n >= 30 and row.ci_low <= row.value <= row.ci_high
        time_s = next(one.value for one in result.rows if one.key == (*row.key[:-1], "collective_time_s"))
        assert row.value == pytest.approx(factors.get(row.variant, (ranks - 1) / ranks) * row.params["bytes"] / time_s / 1e9)
        described = {name: row.params[name] for name in ("ranks", "path", "oversubscribed")}
        assert described == {"ranks": ranks, "path": HOST, "oversubscribed": ranks > read_cpu().cores}
        assert row.params["backend"].startswith(("mpi (Open MPI v", "mpi (MPICH Version: "))
    assert result.samples.groupby(["variant", "params"]).size().min() >= 30 and (result.samples["time_s"] > 0).all()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "what", "operation"),
    [
        (
            "wrong value",
            "rank 1: 1 of 1,024 values of all_reduce, fp32, 4,096 bytes are wrong before .* element 3 ",
            "all_reduce",
        ),
        ("nothing received", "rank 1: 512 of 512 values of scatter, fp32, 4,096 bytes are wrong before", "scatter"),
        ("killed", "^rank 1 of 2 was killed by SIGKILL", "reduce"),
        ("raises", "^rank 1 of 2 raised ValueError: on purpose\n(.*\n)*.*mpi_faults", "broadcast"),
        ("hangs", "rank 1 is missing: the last collective that it entered was collective .* \\(gather, fp32, 4,096", "gather"),
    ],
)
def test_a_fault_ends_the_run_and_names_the_rank_and_the_operation(mpirun, fault, what, operation, tmp_path, monkeypatch):
    def run_with_fault(context, report, function, params, **options):
        params = {"fault": fault, "folder": str(tmp_path)}
        return run_on_ranks(context, report, mpi_faults.measure_with_fault, params, **options)

    monkeypatch.setattr(mpi_collectives, "run_on_ranks", run_with_fault)
    with pytest.raises(RankError, match=what) as error:
        EXPERIMENT.run(toy_context("mpi_collectives", SIZES | {"hang_timeout_s": 3.0}, tmp_path), ignore)
    assert str(error.value.where).startswith(f"{operation} 4,096 B, 2 ranks, host; ")
    assert all(has_ended(pid) for pid in pids(tmp_path)) and len(pids(tmp_path)) == 2
    # MPICH states no rank that ended with an exit code, so only the text names the rank that hangs.
    assert error.value.rank == 1 or (fault == "hangs" and error.value.rank is None)


def pids(folder: Path) -> list[int]:
    """The process IDs that the ranks have written completely."""
    return [int(text) for file in folder.glob("pid-*") if (text := file.read_text())]


@pytest.mark.process
@pytest.mark.slow
def test_the_ranks_end_with_their_launcher(mpirun, tmp_path):
    context = toy_context("mpi_collectives", SIZES, tmp_path)
    program = f"""
from hyperion.chapter.variants import restored, run_on_ranks
from tests.experiments.interconnect.mpi_faults import measure_with_fault
params = {{"fault": "hangs", "folder": {str(tmp_path)!r}}}
run_on_ranks(restored({packed(context)!r}), lambda *_: None, measure_with_fault, params, ranks=2, mpirun={mpirun!r})
"""
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(pids(tmp_path)) == 2 or launcher.poll() is not None)
    tree = psutil.Process(launcher.pid).children(recursive=True)
    assert any("mpirun" in " ".join(process.cmdline()) or "prterun" in process.name() for process in tree)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(10)
    wait_for(lambda: all(has_ended(process.pid) for process in tree) and all(map(has_ended, pids(tmp_path))))


def wait_for(holds, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.process
@pytest.mark.slow
def test_the_doctor_compares_values_under_a_real_mpirun(mpirun):
    result = probes.probe_mpi()
    assert (result.status, result.version != "") == ("ok", True), result.evidence


@pytest.mark.process
def test_an_mpirun_that_starts_no_rank_is_shown_with_its_output(tmp_path):
    broken = tmp_path / "mpirun"
    broken.write_text("#!/bin/sh\necho 'There are not enough slots available'\nexit 213\n")
    broken.chmod(0o755)
    job = Job(rank_entries.total, {"values": [1.0, 2.0], "names": []}, timeout_s=60, ranks=2, mpirun=str(broken))
    with pytest.raises(RankError, match="mpirun, the parent of the 2 ranks of .*not enough slots".replace(".*", "(?s:.*)")):
        run_ranks(job, on_line=ignore)


def test_mpirun_starts_no_ranks_on_several_nodes():
    job = Job(rank_entries.total, ranks=2, nodes=2, rendezvous="node0:29500", mpirun="/usr/bin/mpirun")
    with pytest.raises(JobError, match="mpirun starts ranks on one node, not on 2"):
        run_ranks(job)


def test_without_mpi_there_is_one_row_with_the_next_step(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    context = toy_context("mpi_collectives", SIZES, tmp_path)
    (row,) = perform(context, tmp_path).rows
    assert row.value is None and row.value_reason.startswith("unavailable: mpirun is not in PATH")
    assert row.value_reason.endswith("next step: apt install openmpi-bin, then pip install mpi4py")
    (forecast,) = EXPERIMENT.forecast(context)
    assert (forecast.variant, forecast.estimate, forecast.basis) == ("all_reduce", None, row.value_reason)


@pytest.fixture
def with_mpi(monkeypatch, tmp_path):
    """A machine with mpirun and mpi4py, as far as the experiment sees it."""
    (tmp_path / "mpirun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mpi_collectives, "why_no_mpi", lambda: "")


def test_the_forecast_is_between_one_copy_and_two_of_the_measured_memory(with_mpi, tmp_path, monkeypatch):
    monkeypatch.setattr(Context, "device", property(lambda context: detect_cpu()))
    stream = Row(
        notebook="n", experiment="bandwidth", variant="copy", metric="bandwidth_gb_s", value=16.0, params={"elements": 9}
    )
    context = toy_context("mpi_collectives", SIZES | {"ranks": [4]}, tmp_path)
    assert {one.basis for one in EXPERIMENT.forecast(context)} == {
        "no measured memory bandwidth in this run: run 01_hardware_exploration first"
    }
    found = EXPERIMENT.forecast(toy_context("mpi_collectives", SIZES | {"ranks": [4]}, tmp_path, [stream]))
    ends = {one.variant: (one.low, one.high) for one in found}
    thirds = (pytest.approx(4 / 3), pytest.approx(8 / 3))
    assert ends == {"all_reduce": (1, 2), "broadcast": thirds, "reduce": thirds, "scatter": (4, 8), "gather": (4, 8)}
    assert found[0].estimate == pytest.approx(2**0.5) and "16 GB/s (measured in 1.1), and 4 ranks" in found[0].basis
    assert all(one.params == {"bytes": 4096, "ranks": 4} and one.ceiling is None for one in found)


@pytest.fixture
def two_gpus(with_mpi, tmp_path, monkeypatch):
    """Run the experiment for two and four ranks on a machine with two GPUs. `measure` takes the place of the ranks."""
    monkeypatch.setattr(Context, "device", property(lambda context: detect(facts("H200"))))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def run(stated: str, aware: Exception | None = None) -> dict[str, Row]:
        def measure(context, report, function, params, *, ranks, mpirun):
            assert (function, ranks, mpirun) == (mpi_collectives.measure_on_rank, 2, str(tmp_path / "mpirun"))
            report(3, 5, f"reduce 4,096 B, 2 ranks, {params['path']}")
            if aware and params["path"] == AWARE:
                raise aware
            params = {"ranks": 2, "path": params["path"], "device_buffers": stated}
            return [Result([context.row("all_reduce", "busbw_gb_s", 1.0, params=params)], pd.DataFrame())]

        monkeypatch.setattr(mpi_collectives, "run_on_ranks", measure)
        rows = EXPERIMENT.run(toy_context("mpi_collectives", SIZES | {"ranks": [2, 4]}, tmp_path), ignore).rows
        assert [row.params["ranks"] for row in rows] == [2, 2, 4]
        assert rows[2].value_reason == "4 ranks need 4 devices, and this machine has 2"
        assert rows[0].value == 1.0 and rows[0].params["path"] == STAGED and rows[1].params["path"] == AWARE
        return rows[1]

    return run


def test_a_library_that_states_no_gpu_support_is_host_staged_only(two_gpus):
    row = two_gpus("")
    assert row.value is None and row.value_reason.startswith("host-staged only: neither MPIX_Query_cuda_support nor a variable")


def test_stated_support_is_tried_with_device_memory(two_gpus):
    assert two_gpus("MPIX_Query_cuda_support() = 1").value == 1.0


def test_stated_support_that_fails_is_a_refused_row_with_the_rank_and_the_operation(two_gpus):
    fault = RankError("rank 1 of 2 was killed by SIGSEGV in x:y\nlog", rank=1, signal="SIGSEGV", where="x:y; the logs are in z")
    row = two_gpus("MPICH_GPU_SUPPORT_ENABLED=1", fault)
    assert row.value_reason == (
        "refused: the library states MPICH_GPU_SUPPORT_ENABLED=1, but rank 1 of 2 was killed by SIGSEGV in x:y "
        "(reduce 4,096 B, 2 ranks, gpu-aware)"
    )


def test_only_ranks_that_use_device_memory_start_with_the_support_of_cray_mpich(two_gpus, monkeypatch):
    seen, run_on_ranks = [], mpi_collectives._run_ranks
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "1")

    def spy(context, report, path, ranks):
        measure = mpi_collectives.run_on_ranks

        def noting(context, report, function, params, **rest):
            seen.append((path, os.environ["MPICH_GPU_SUPPORT_ENABLED"], params["enabled"]))
            return measure(context, report, function, params, **rest)

        with monkeypatch.context() as patch:
            patch.setattr(mpi_collectives, "run_on_ranks", noting)
            return run_on_ranks(context, report, path, ranks)

    monkeypatch.setattr(mpi_collectives, "_run_ranks", spy)
    two_gpus("MPICH_GPU_SUPPORT_ENABLED=1")
    enabled = {"MPICH_GPU_SUPPORT_ENABLED": "1"}
    assert seen == [(STAGED, "0", enabled), (AWARE, "1", enabled)] and os.environ["MPICH_GPU_SUPPORT_ENABLED"] == "1"


@pytest.mark.parametrize(
    ("kind", "variables", "functions", "stated"),
    [
        ("cuda", {}, (), ""),
        ("cuda", {"MPICH_GPU_SUPPORT_ENABLED": "0"}, ("MPIX_Query_rocm_support",), ""),
        ("cuda", {}, ("MPIX_Query_cuda_support",), "MPIX_Query_cuda_support() = 1"),
        ("rocm", {}, ("MPIX_Query_cuda_support", "MPIX_Query_hip_support"), "MPIX_Query_hip_support() = 1"),
        ("rocm", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, ("MPIX_Query_rocm_support",), "MPIX_Query_rocm_support() = 1, MPICH_"),
    ],
)
def test_what_states_that_a_library_accepts_device_memory(kind, variables, functions, stated):
    found = stated_support(kind, variables, lambda name: int(name in functions))
    assert found.startswith(stated) and bool(found) == bool(stated)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (0, 2)])
def test_the_mpirun_of_another_library_is_named(rank, size, monkeypatch):
    """Each process is then rank 0 of 1."""
    version = "Open MPI v5.0.11, package: Open MPI\0"
    mpi = SimpleNamespace(Get_library_version=lambda: version, COMM_WORLD=SimpleNamespace(rank=rank, size=size))
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    here = World(0, 2, 0, "gloo", detect_cpu())
    if (rank, size) == (0, 2):
        assert library_of(here) == "mpi (Open MPI v5.0.11)"
        return
    with pytest.raises(HyperionError, match=f"started 2 ranks, but mpi4py is rank {rank} of {size}") as error:
        library_of(here)
    assert "mpi4py uses Open MPI v5.0.11" in error.value.where and "--no-binary mpi4py" in error.value.next_step


@pytest.mark.parametrize(("name", "rank", "output"), [("gather", 1, 7.0), ("gather", 0, -1.0), ("scatter", 0, 7.0)])
def test_a_staged_collective_copies_back_what_it_defines(name, rank, output, monkeypatch):
    """A gather defines the output of the root alone, which is rank 1 of 2."""
    monkeypatch.setattr(mpi_collectives, "dist", SimpleNamespace(get_rank=lambda: rank, get_world_size=lambda: 2))
    sound = next(one for one in MPI_COLLECTIVES if one.name == name)
    seen = []

    def call(host_output, host_input):
        seen.append(host_input.tolist())
        host_output.fill_(7.0)

    tensor = torch.full((2,), -1.0)
    staged(mpi_collectives.replace(sound, call=call)).call(tensor, torch.full((2,), 3.0))
    assert tensor.tolist() == [output] * 2
    assert (seen == [[3.0, 3.0]]) == (name == "gather" or rank == 1)
