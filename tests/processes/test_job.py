"""Real worker processes: what they return, how they fail, and that none outlives its launcher."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from hyperion.processes import Job, JobError, run_job
from hyperion.processes.lifeline import has_ended
from hyperion.processes.starting import SOCKET
from tests.processes.waiting import wait_for

GUARDED = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")


@pytest.fixture(params=["forked", "started"])
def entries(request, tmp_path, monkeypatch):
    """A module of entries that the worker can import; with a fork server at hand, and without one."""
    if request.param == "started":
        monkeypatch.delenv(SOCKET)
    (tmp_path / "job_entries.py").write_text(
        textwrap.dedent(
            """
            import os, signal, time
            from hyperion.errors import HyperionError
            from hyperion.processes import report_progress

            def double(value):
                print("doubling", value)
                report_progress(1, 2, "half way")
                return {"value": 2 * value}

            def environment(names):
                return {name: os.environ.get(name) for name in names}

            def fail():
                raise ValueError("the sum is wrong on purpose")

            def refuse():
                raise HyperionError("the file is damaged", where="a.bin", next_step="copy it again")

            class Stopped(HyperionError):
                exit_code = 75

            def stop():
                raise Stopped("the state was saved")

            def die():
                os.kill(os.getpid(), signal.SIGKILL)

            def sleep(pid_file):
                with open(pid_file, "w") as file:
                    file.write(str(os.getpid()))
                time.sleep(600)
            """
        )
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "job_entries"


def test_returns_the_answer_and_streams_lines_and_progress(entries):
    lines, progress = [], []
    answer = run_job(Job(f"{entries}:double", {"value": 21}), lines.append, lambda *report: progress.append(report))
    assert answer == {"value": 42}
    assert lines == ["doubling 21"]
    assert progress == [(1, 2, "half way")]


def test_guarding_variables_reach_the_worker_and_torchruns_do_not(entries, monkeypatch):
    for name in (*GUARDED, "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    found = run_job(Job(f"{entries}:environment", {"names": [*GUARDED, "RANK", "WORLD_SIZE"]}))
    assert found == {**dict.fromkeys(GUARDED, "0"), "RANK": None, "WORLD_SIZE": None}


def test_a_raising_worker_hands_over_its_traceback(entries):
    with pytest.raises(JobError, match="the sum is wrong on purpose") as error:
        run_job(Job(f"{entries}:fail"), on_line=lambda line: None)
    assert "Traceback" in error.value.what and "exit code 1" in error.value.what


def test_what_a_worker_refuses_is_told_in_its_own_words(entries):
    with pytest.raises(JobError) as error:
        run_job(Job(f"{entries}:refuse"))
    assert str(error.value) == "the file is damaged\n  where: a.bin\n  next:  copy it again"


def test_a_worker_that_was_stopped_and_saved_is_told_by_its_exit_code(entries):
    with pytest.raises(JobError, match="the state was saved") as error:
        run_job(Job(f"{entries}:stop"))
    assert error.value.exit_code == 75


def test_a_job_of_ranks_is_refused(entries):
    with pytest.raises(JobError, match="is to run on ranks"):
        run_job(Job(f"{entries}:double", {"value": 1}, ranks=2))


def test_a_killed_worker_is_named_with_its_signal(entries):
    with pytest.raises(JobError, match="SIGKILL") as error:
        run_job(Job(f"{entries}:die"))
    assert "memory" in error.value.next_step


def test_timeout_ends_the_worker(entries, tmp_path):
    pid_file = tmp_path / "pid"
    with pytest.raises(JobError, match="timeout of 6 s"):
        run_job(Job(f"{entries}:sleep", {"pid_file": str(pid_file)}, timeout_s=6))
    assert has_ended(int(pid_file.read_text()))


def test_a_worker_dies_with_its_launcher(entries, tmp_path):
    pid_file = tmp_path / "pid"
    script = f"from hyperion.processes import *; run_job(Job('{entries}:sleep', {{'pid_file': {str(pid_file)!r}}}))"
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    launcher = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path})
    assert wait_for(lambda: pid_file.exists() and pid_file.read_text())
    worker = int(pid_file.read_text())
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    assert wait_for(lambda: has_ended(worker))
