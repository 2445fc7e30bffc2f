"""Real ranks under torchrun: their answers, the root cause of a failure, and that no rank outlives its launcher."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from hyperion.errors import HyperionError
from hyperion.processes import Job, JobError, RankError, ranks, run_ranks
from hyperion.processes.child_process import has_ended
from hyperion.processes.ranks import require_launchable
from tests.processes import rank_entries
from tests.processes.waiting import wait_for
from tests.processes.waiting_rank import MARK

GUARDED = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
# Variables of a launcher that is itself rank 3 of 4 under torchrun.
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "another",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "PET_NNODES": "4",
}


def job(function, timeout_s=120.0, ranks=2, **params):
    return Job(function, params, timeout_s=timeout_s, ranks=ranks)


@dataclass
class Finished:
    """A job that succeeded, and the output that its launcher passed on."""

    answers: list[dict]
    lines: list[str]
    progress: list[tuple]
    logs: Path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One job for all tests without a failure. Its launcher is itself a rank under torchrun."""
    lines, progress, logs = [], [], tmp_path_factory.mktemp("logs")
    names = [*GUARDED, "OMP_NUM_THREADS", "WORLD_SIZE", "PET_NNODES"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**dict.fromkeys(GUARDED, "0"), **TORCHRUN}.items():
            patch.setenv(name, value)
        patch.delenv("OMP_NUM_THREADS", raising=False)
        answers = run_ranks(
            job(rank_entries.total, values=[3.0, 4.0], names=names), lines.append, lambda *report: progress.append(report), logs
        )
    return Finished(answers, lines, progress, logs)


@pytest.fixture(scope="module")
def hanging(finished):
    """A job whose rank 1 never joins, started in the background. Its timeout begins when both ranks have begun, because the time
    of their start depends on the load of the machine."""
    hangs, follow = job(rank_entries.fails, how="hangs", timeout_s=2.0), ranks.Torchrun.follow

    def follow_when_begun(torchrun, timeout_s):
        logs = [ranks.rank_log(torchrun.logs, rank) for rank in range(2)]
        if torchrun.job is hangs:
            wait_for(lambda: all(log.exists() and "has begun" in log.read_text() for log in logs), 120.0)
        return follow(torchrun, timeout_s)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(ranks.Torchrun, "follow", follow_when_begun)
        yield pool.submit(run_ranks, hangs, on_line=lambda line: None)


@pytest.mark.process
def test_answers_come_in_rank_order(finished):
    assert [(answer["rank"], answer["total"]) for answer in finished.answers] == [(0, 7.0), (1, 7.0)]


@pytest.mark.process
def test_rank_0s_output_is_passed_on_and_each_rank_has_its_log(finished):
    assert "rank 0 of 2" in finished.lines and "rank 1 of 2" not in finished.lines
    assert finished.progress == [(0, 2, "from 0")]
    assert "rank 1 of 2" in (finished.logs / "rank-1.log").read_text()


@pytest.mark.process
@pytest.mark.parametrize("rank", [0, 1])
def test_the_environment_reaches_every_rank_without_torchruns_variables_of_the_launcher(finished, rank):
    found = dict(finished.answers[rank]["environment"])
    assert [found.pop(name) for name in GUARDED] == ["0"] * 3
    assert int(found.pop("OMP_NUM_THREADS")) >= 1
    assert found == {"WORLD_SIZE": "2", "PET_NNODES": None}


@pytest.mark.process
@pytest.mark.long
def test_a_thread_that_needs_the_interpreter_at_the_end_costs_no_answer_and_no_output(tmp_path):
    """The interpreter of a rank is not finalized: a thread of gloo that needs it then would abort the process."""
    logs = tmp_path / "logs"
    answers = run_ranks(job(rank_entries.leaves_a_thread_of_gloo, folder=str(tmp_path)), log_folder=logs)
    assert answers == [{"rank": 0}, {"rank": 1}]
    for rank in range(2):
        log = (logs / f"rank-{rank}.log").read_text()
        assert "by Python, without a newline" in log and "by C, into a buffer" in log
        assert (tmp_path / f"exit-{rank}").exists()


@pytest.mark.process
def test_a_killed_rank_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, str(tmp_path))
    begun = time.monotonic()
    with pytest.raises(RankError, match="^rank 1 of 2 was killed by SIGKILL") as error:
        run_ranks(job(rank_entries.dies))
    assert (error.value.rank, error.value.signal) == (1, "SIGKILL")
    assert "rank 1 stands alone" in error.value.what and "memory" in error.value.next_step
    assert time.monotonic() - begun < 60
    assert len(list(tmp_path.glob("pid-*"))) == 2 and not marked(tmp_path)


@pytest.mark.process
def test_the_traceback_is_that_of_the_rank_that_raised_and_not_of_its_peer():
    with pytest.raises(RankError, match="^rank 1 of 2 raised ValueError: the sum is wrong on purpose") as error:
        run_ranks(job(rank_entries.fails, how="raised"), on_line=lambda line: None)
    assert (error.value.rank, error.value.signal) == (1, "")
    message = error.value.what
    assert "Traceback" in message and "rank_entries.py" in message
    assert "all_reduce" not in message and "ChildFailedError" not in message and "worker.py" not in message


@dataclass
class Launched:
    """A launcher process of one waiting rank."""

    folder: Path
    process: subprocess.Popen

    def torchrun(self) -> int:
        """torchrun's process number, once the rank waits."""
        ready = self.folder / "ready"
        assert wait_for(ready.exists)
        return int(ready.read_text())

    def wait(self) -> str:
        """Return the launcher's stderr after its end. Soon after, no process of its job is left."""
        _, message = self.process.communicate(timeout=180)
        assert wait_for(lambda: has_ended(self.torchrun()) and not marked(self.folder))
        return message


@pytest.fixture(scope="module")
def launched(tmp_path_factory, hanging):
    """Launchers by what will happen to them, started together: most of their time they wait for imports."""
    launchers = {}
    for fate, saves in (("launcher killed", True), ("torchrun killed", False), ("launcher terminated", True)):
        folder = tmp_path_factory.mktemp("launched")
        launchers[fate] = Launched(folder, launch(folder, saves))
    yield launchers
    for launcher in launchers.values():
        launcher.process.kill()


@pytest.mark.process
def test_ranks_end_with_their_launcher_and_save_first(launched):
    launcher = launched["launcher killed"]
    launcher.torchrun()
    launcher.process.kill()
    launcher.wait()
    assert (launcher.folder / "saved").exists()


@pytest.mark.process
def test_ranks_end_with_torchrun(launched):
    launcher = launched["torchrun killed"]
    os.kill(launcher.torchrun(), signal.SIGKILL)
    message = launcher.wait()
    assert "torchrun, the parent of the 1 ranks" in message and "SIGKILL" in message


@pytest.mark.process
def test_sigterm_reaches_the_ranks_which_save_and_say_so(launched):
    launcher = launched["launcher terminated"]
    launcher.torchrun()
    launcher.process.terminate()
    assert "the state was saved" in launcher.wait()
    assert launcher.process.returncode == 75 and (launcher.folder / "saved").exists()


@pytest.mark.process
def test_a_hang_ends_with_the_timeout_and_shows_each_ranks_stack(hanging):
    with pytest.raises(RankError, match="exceeded its timeout") as error:
        hanging.result()
    rank_0, rank_1 = error.value.what.split("rank 0 ")[1].split("rank 1 ")
    assert rank_0.startswith("was waiting for other ranks in all_reduce") and "fails (rank_entries.py" in rank_0
    assert rank_1.startswith("was in _turn_for_ever (rank_entries.py") and "fails (rank_entries.py" in rank_1
    assert error.value.rank == 1


def launch(folder, saves):
    """A process that runs one waiting rank and ends with the error's exit code, marked in its environment.

    It has threads, as a notebook's kernel has: when it is killed Linux signals its child for one after the other.
    """
    code = """
import json, sys, threading, time
for _ in range(50):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
from hyperion.errors import HyperionError
from hyperion.processes import Job, ranks, run_ranks
from tests.processes.waiting_rank import waits
ranks.require_launchable = lambda job: None  # it would import torch, to count GPUs for one rank
try:
    run_ranks(Job(waits, json.loads(sys.argv[1]), ranks=1), on_line=lambda line: None)
except HyperionError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
    params = json.dumps({"folder": str(folder), "saves": saves})
    environment = os.environ | {MARK: str(folder)}
    return subprocess.Popen([sys.executable, "-c", code, params], env=environment, stderr=subprocess.PIPE, text=True)


def marked(folder) -> list[int]:
    """Living processes, other than this one, that have the folder in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue  # gone meanwhile, or another user's
    return [pid for pid in found if pid != os.getpid()]


@pytest.mark.process
def test_a_function_of_a_module_that_the_ranks_do_not_find_is_refused(monkeypatch):
    monkeypatch.setattr(rank_entries.total, "__module__", "no_such_module")
    with pytest.raises(JobError, match="the module 'no_such_module' cannot be found"):
        run_ranks(job(rank_entries.total))


def test_more_ranks_than_devices_are_refused():
    with pytest.raises(HyperionError, match="5 ranks on a node where PyTorch sees 4 GPUs"):
        require_launchable(job(rank_entries.total, ranks=5), devices=4)
    require_launchable(job(rank_entries.total, ranks=4), devices=4)
    require_launchable(Job(rank_entries.total, ranks=8, nodes=2, rendezvous="localhost:0"), devices=4)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_busy_port_is_refused(nodes):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(JobError, match=f"port {port} is used by another process"):
            run_ranks(Job(rank_entries.total, ranks=2, nodes=nodes, rendezvous=f"127.0.0.1:{port}"))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"ranks": 0}, "called with ranks=0"),
        ({"ranks": None}, "called with ranks=None"),
        ({"ranks": 3, "nodes": 2}, "2 nodes cannot share 3 ranks evenly"),
        ({"ranks": 2, "nodes": 2}, "2 nodes need a rendezvous"),
        ({"ranks": 2, "rendezvous": "localhost"}, "'localhost' has no port number"),
        ({"ranks": 2, "rendezvous": "nowhere.invalid:29500"}, "cannot be resolved"),
        ({"ranks": 2, "timeout_s": 0}, "the timeout is 0 s"),
    ],
)
def test_numbers_that_cannot_work_are_refused(numbers, message):
    with pytest.raises(JobError, match=message):
        run_ranks(Job(rank_entries.total, **numbers))
