"""Real worker processes: what they return, how they fail, and that none outlives its launcher."""

import functools
import os
import signal
import subprocess
import sys

import pytest

from hyperion.errors import HyperionError
from hyperion.processes import Job, JobError, run_job
from hyperion.processes.child_process import has_ended
from tests.processes import job_entries
from tests.processes.waiting import wait_for

GUARDED = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")


@pytest.mark.process
def test_returns_the_answer_and_streams_lines_and_progress():
    lines, progress = [], []
    answer = run_job(Job(job_entries.double, {"value": 21}), lines.append, lambda *report: progress.append(report))
    assert answer == {"value": 42}
    assert lines == ["doubling 21"]
    assert progress == [(1, 2, "half way")]


@pytest.mark.process
def test_nccls_variables_reach_the_worker_and_torchruns_do_not(monkeypatch):
    for name in (*GUARDED, "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    found = run_job(Job(job_entries.environment, {"names": [*GUARDED, "RANK", "WORLD_SIZE"]}))
    assert found == {**dict.fromkeys(GUARDED, "0"), "RANK": None, "WORLD_SIZE": None}


class _Entries:
    def method(self):
        return {}


@pytest.mark.parametrize("function", [lambda: {}, _Entries().method, functools.partial(job_entries.double, 1)])
def test_a_function_that_a_worker_cannot_import_is_refused(function):
    with pytest.raises(HyperionError, match="a worker process cannot import"):
        Job(function)


def test_a_function_of_a_notebook_is_refused(monkeypatch):
    monkeypatch.setattr(job_entries.double, "__module__", "__main__")
    with pytest.raises(HyperionError, match="cannot import double from __main__"):
        Job(job_entries.double)


@pytest.mark.process
def test_threads_are_awaited_and_exit_handlers_run(tmp_path):
    run_job(Job(job_entries.leave_work_for_the_end, {"folder": str(tmp_path)}))
    assert (tmp_path / "thread").exists() and (tmp_path / "handler").exists()


@pytest.mark.process
def test_the_error_of_a_worker_that_raises_has_its_traceback():
    with pytest.raises(JobError, match="the sum is wrong on purpose") as error:
        run_job(Job(job_entries.fail), on_line=lambda line: None)
    assert "Traceback" in error.value.what and "exit code 1" in error.value.what


@pytest.mark.process
def test_a_workers_own_error_keeps_its_text():
    with pytest.raises(JobError) as error:
        run_job(Job(job_entries.refuse))
    assert str(error.value) == "the file is damaged\n  where: a.bin\n  next:  copy it again"


@pytest.mark.process
def test_a_worker_that_saved_after_sigterm_has_exit_code_75():
    with pytest.raises(JobError, match="the state was saved") as error:
        run_job(Job(job_entries.stop))
    assert error.value.exit_code == 75


def test_a_job_with_ranks_is_refused():
    with pytest.raises(JobError, match="asks for 2 ranks"):
        run_job(Job(job_entries.double, {"value": 1}, ranks=2))


@pytest.mark.process
def test_a_killed_worker_is_named_with_its_signal():
    with pytest.raises(JobError, match="SIGKILL") as error:
        run_job(Job(job_entries.die))
    assert "memory" in error.value.next_step


@pytest.mark.process
def test_a_child_of_the_worker_that_keeps_the_pipe_open_delays_nothing(tmp_path):
    lines, pid_file = [], tmp_path / "pid"
    try:
        answer = run_job(Job(job_entries.leave_a_child, {"pid_file": str(pid_file)}, timeout_s=40), lines.append)
        assert answer == {"ok": 1} and lines == ["one line", "the last line"]
        assert not has_ended(int(pid_file.read_text()))
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


@pytest.mark.process
def test_timeout_ends_the_worker(tmp_path):
    pid_file = tmp_path / "pid"
    with pytest.raises(JobError, match="timeout of 6 s"):
        run_job(Job(job_entries.sleep, {"pid_file": str(pid_file)}, timeout_s=6))
    assert has_ended(int(pid_file.read_text()))


@pytest.mark.process
def test_a_worker_dies_with_its_launcher(tmp_path):
    pid_file = tmp_path / "pid"
    script = f"""
from hyperion.processes import Job, run_job
from tests.processes.job_entries import sleep
run_job(Job(sleep, {{"pid_file": {str(pid_file)!r}}}))
"""
    path = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))
    launcher = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path})
    assert wait_for(lambda: pid_file.exists() and pid_file.read_text())
    worker = int(pid_file.read_text())
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    assert wait_for(lambda: has_ended(worker))
