"""Forked workers share imports, and in everything else they are like other workers."""

import os
import subprocess
import sys
import time

import pytest

from hyperion.processes import Job, JobError, run_job
from tests.processes import job_entries

pytestmark = pytest.mark.process


def family() -> dict:
    return {"parent": os.getppid(), "pid": os.getpid(), "folder": os.getcwd()}


def run(function, params=None, **options) -> dict:
    return run_job(Job(function, params or {}, forked=(), **options), options.pop("on_line", print))


def test_results_output_and_failures_come_back(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_TEST", "set later than the server")
    first, second = run(family), run(family)
    assert first["parent"] == second["parent"] != os.getpid(), "the server forked both"
    assert first["pid"] != second["pid"] and first["folder"] == str(tmp_path)
    lines, progress = [], []
    job = Job(job_entries.double, {"value": 21}, forked=())
    assert run_job(job, lines.append, lambda *report: progress.append(report)) == {"value": 42}
    assert (lines, progress) == (["doubling 21"], [(1, 2, "half way")])
    assert run(job_entries.environment, {"names": ["OF_THE_TEST"]}) == {"OF_THE_TEST": "set later than the server"}
    with pytest.raises(JobError, match="the file is damaged") as refused:
        run(job_entries.refuse)
    assert (refused.value.where, refused.value.next_step) == ("a.bin", "copy it again")
    with pytest.raises(JobError) as stopped:
        run(job_entries.stop)
    assert stopped.value.exit_code == 75
    with pytest.raises(JobError, match=r"job_entries:die was killed by SIGKILL"):
        run(job_entries.die)
    capfd.readouterr()
    with pytest.raises(JobError, match=r"failed with exit code 1\n(?s:.*)the sum is wrong on purpose"):
        run(job_entries.fail)
    assert "the sum is wrong on purpose" in capfd.readouterr().out, "on_line prints it"
    with pytest.raises(JobError, match=r"exceeded its timeout of 0\.5 s"):
        run(job_entries.sleep, {"pid_file": str(tmp_path / "pid")}, timeout_s=0.5)


@pytest.mark.slow
def test_a_forked_worker_dies_with_its_launcher(tmp_path):
    file = tmp_path / "pid"
    code = (
        "from hyperion.processes import Job, run_job\nfrom tests.processes import job_entries\n"
        f"run_job(Job(job_entries.sleep, {{'pid_file': {str(file)!r}}}, forked=()))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code])
    while not file.exists() or not file.read_text():
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    worker, deadline = int(file.read_text()), time.monotonic() + 20
    while os.path.exists(f"/proc/{worker}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
