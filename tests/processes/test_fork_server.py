"""Workers that are forks of a process with torch: they are as fresh processes, and no fault of the server loses a job."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hyperion.processes import Job, JobError, fork_server, run_job, run_ranks
from hyperion.processes.child_process import child_environment, has_ended
from hyperion.processes.fork_server import ForkedWorker, start_worker
from tests.processes.fork_entries import describe, ignored, matmul, threads, wait_for_the_end
from tests.processes.waiting import wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not fork_server._can_refer_to_processes(), reason="this system has no descriptors of processes"),
]


@pytest.fixture(scope="module", autouse=True)
def server_of_these_tests():
    """Start another server than that of earlier tests, in an environment with HYPERION_OLD."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "_servers", {})
        patch.setenv("HYPERION_OLD", "1")
        run(describe)
        yield


def run(function, **params):
    return run_job(Job(function, params, timeout_s=300), on_line=lambda line: None)


def pids(folder):
    """Return the process IDs of the worker that runs `wait_for_the_end`, and of its parent."""
    assert wait_for(lambda: (folder / "pids").exists())
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def test_a_worker_is_a_fork_with_torch_and_otherwise_like_a_fresh_process(tmp_path, monkeypatch):
    first = run(describe)
    assert first["torch"] and first["parent"] != os.getpid()
    assert first["ignored"] == ignored()  # a shell starts background processes with SIGINT ignored
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYPERION_NEW", "7")
    monkeypatch.delenv("HYPERION_OLD")
    second = run(describe, names=["HYPERION_NEW", "HYPERION_OLD"])
    assert second["parent"] == first["parent"]
    assert second["folder"] == second["first"] == str(tmp_path)
    assert second["variables"] == {"HYPERION_NEW": "7", "HYPERION_OLD": None}
    assert all(before != after for before, after in zip(first["random"], second["random"], strict=True))


def test_a_worker_inherits_nothing_of_the_server_and_of_the_workers_beside_it(tmp_path):
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(run, wait_for_the_end, folder=str(tmp_path))
        worker, _ = pids(tmp_path)
        try:
            assert run(describe)["sockets"] == []
        finally:
            os.kill(worker, signal.SIGTERM)
        with pytest.raises(JobError, match="exit code 1"):
            beside.result(60)


def test_a_variable_that_an_import_reads_needs_a_fresh_process(monkeypatch):
    forked = run(describe)["parent"]
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    fresh = run(describe, names=["MKL_NUM_THREADS"])
    assert fresh["parent"] == os.getpid() and not fresh["torch"] and fresh["variables"] == {"MKL_NUM_THREADS": "3"}
    monkeypatch.undo()
    assert run(describe)["parent"] == forked


def start_waiting(folder):
    """Start a worker that runs `wait_for_the_end`, and return it."""
    folder.mkdir(exist_ok=True)
    (folder / "request.json").write_text(json.dumps(Job(wait_for_the_end, {"folder": str(folder)}).request()))
    arguments = ["job", str(folder / "request.json"), str(folder / "answer.json")]
    worker = start_worker(sys.executable, arguments, child_environment())
    assert isinstance(worker, ForkedWorker)
    assert pids(folder)[0] == worker.pid
    return worker


def test_workers_that_end_together_with_their_clients_do_not_end_the_server(tmp_path):
    """The server sees both ends at once, because it is stopped meanwhile."""
    server = run(describe)["parent"]
    workers = [start_waiting(tmp_path / str(number)) for number in range(3)]
    os.kill(server, signal.SIGSTOP)
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
    time.sleep(0.2)
    for worker in workers:
        worker._server.close()
    os.kill(server, signal.SIGCONT)
    assert run(describe)["parent"] == server


def test_signals_to_all_processes_leave_the_server_which_reports_the_ends_of_its_workers(tmp_path):
    """A batch system sends SIGTERM to every process of a job. The workers save their state, and their exit codes are needed."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run, wait_for_the_end, folder=str(tmp_path))
        worker, server = pids(tmp_path)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(server, number)
        time.sleep(0.2)  # a server that ended now would lose the exit code
        os.kill(worker, signal.SIGTERM)
        with pytest.raises(JobError, match="exit code 1"):
            job.result(60)
    assert run(describe)["parent"] == server


def test_ranks_are_forks_too():
    """Their server is a fork in the session of the agent, while the parent of a fresh rank is the agent itself."""
    answers = run_ranks(Job(describe, {"names": ["RANK", "LOCAL_RANK"]}, ranks=2), on_line=lambda line: None)
    assert [answer["variables"] for answer in answers] == [{"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    assert not any(answer["parent_leads_a_session"] for answer in answers)
    assert all(answer["ignored"] == ignored() for answer in answers)


def test_torch_has_the_threads_of_the_workers_environment(monkeypatch):
    server = run(describe)["parent"]
    for number in (3, 5):
        monkeypatch.setenv("OMP_NUM_THREADS", str(number))
        assert run(threads) == {"parent": server, "threads": number}
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")  # numbers of nested threads
    assert run(threads)["parent"] == os.getpid()


def test_a_worker_runs_the_code_that_is_in_the_files_when_it_starts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "written_later.py"
    for number in (1, 2):
        module.write_text(f"def number():\n    return {{'number': {number}{' ' * number}}}\n")
        monkeypatch.delitem(sys.modules, "written_later", raising=False)
        from written_later import number as function  # pyright: ignore[reportMissingImports]

        assert run(function) == {"number": number}


def test_workers_of_several_threads_run_at_once_and_torch_has_its_threads():
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda number: run(matmul)["sum"], range(8)))
    left = [[(row * 512 + column) % 7 for column in range(512)] for row in range(512)]
    of_rows, of_columns = [sum(row) for row in left], [sum(column) for column in zip(*left, strict=True)]
    assert sums == [float(sum(a * b for a, b in zip(of_columns, of_rows, strict=True)))] * 8


def test_a_worker_whose_server_was_killed_ends_and_the_next_job_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(fork_server, "_servers", {})  # the server of the other tests lives on
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run, wait_for_the_end, folder=str(tmp_path))
        worker, server = pids(tmp_path)
        assert server != os.getpid()
        os.kill(server, signal.SIGKILL)
        with pytest.raises(JobError, match="SIGKILL") as caught:
            job.result(60)
        assert "memory" in str(caught.value.next_step)
        assert wait_for(lambda: has_ended(worker)) and (tmp_path / "ended").exists()
    assert run(describe)["parent"] == os.getpid()


def test_a_worker_that_nobody_waits_for_ends(tmp_path):
    """A launcher can be interrupted before it knows the process ID of its worker. Then only the server can end the worker."""
    worker = start_waiting(tmp_path)
    pid = worker.pid
    worker._server.close()
    assert wait_for(lambda: has_ended(pid)) and (tmp_path / "ended").read_text() == str(int(signal.SIGTERM))


def test_a_job_that_was_given_up_before_the_server_was_ready_does_not_start(tmp_path):
    """The server takes seconds to import torch. The request of a launcher that was interrupted meanwhile is not executed."""
    script = f"""
import signal, sys, threading
from hyperion.processes import Job, run_job
from tests.processes.fork_entries import describe, wait_for_the_end
signal.setitimer(signal.ITIMER_REAL, 0.3)
signal.signal(signal.SIGALRM, signal.default_int_handler)
try:
    run_job(Job(wait_for_the_end, {{"folder": {str(tmp_path)!r}}}))
except KeyboardInterrupt:
    print(run_job(Job(describe), on_line=lambda line: None)["torch"])
"""
    printed = subprocess.run([sys.executable, "-c", script], env=_with_tests(), capture_output=True, text=True, timeout=120)
    assert printed.stdout == "True\n", printed.stderr
    assert not (tmp_path / "pids").exists()


def test_if_the_server_cannot_import_torch_the_worker_is_a_fresh_process_and_reports_it(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('broken on purpose')\n")
    script = """
import json
import os
from hyperion.processes import Job, run_job
from tests.processes.fork_entries import describe, matmul
assert run_job(Job(describe), on_line=lambda line: None)["parent"] == os.getpid()
run_job(Job(matmul), on_line=lambda line: None)
"""
    environment = _with_tests(str(tmp_path))
    printed = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert "broken on purpose" in printed.stderr and "JobError" in printed.stderr


def test_an_open_file_of_a_gpu_is_seen(tmp_path, monkeypatch):
    assert not fork_server._uses_gpu()
    device = tmp_path / "nvidia0"
    monkeypatch.setattr(fork_server, "_GPU_FILES", (str(tmp_path / "nvidia"),))
    with device.open("w"):
        assert fork_server._uses_gpu()
    assert not fork_server._uses_gpu()


def _with_tests(*folders):
    """Return an environment in which Python finds the modules of the tests, and first those in the folders."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([*folders, os.getcwd(), *filter(None, sys.path)])}
