"""The torchrun agent: its command line, modules that are not found, and exit codes of ranks."""

import signal
import sys

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from hyperion.errors import HyperionError
from hyperion.processes import rank_agent
from hyperion.processes.child_process import child_environment, start
from hyperion.processes.rank_agent import _Ranks, _run, arguments, require_module
from hyperion.processes.ranks import JobFolder, read_json

REQUEST = {"entry": "a:b", "params": {"x": 1}, "ranks": 4, "nodes": 1, "rendezvous": ""}


def test_one_node_needs_no_address():
    words = arguments(REQUEST, "/folder")
    assert {"--standalone", "--nnodes=1", "--nproc-per-node=4", "--max-restarts=0"} <= set(words)


def test_several_nodes_find_each_other_by_the_id_of_their_job():
    two = REQUEST | {"nodes": 2, "rendezvous": "node0:29500"}
    words = arguments(two, "/folder")
    assert {"--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29500"} <= set(words)
    names = {word for request in (two, two, two | {"params": {}}) for word in arguments(request, "/f") if "rdzv-id" in word}
    assert len(names) == 2


@pytest.mark.parametrize("module", ["no_such_module", "no.such.module", "tests.processes.no_such_module"])
def test_a_module_that_ranks_do_not_find_is_refused(module):
    require_module("tests.processes.rank_entries")
    with pytest.raises(HyperionError, match=f"the module '{module}' cannot be found"):
        require_module(module)


RANK = """
import os, signal, time
if os.environ["RANK"] != "0":
    os.kill(os.getpid(), signal.SIGKILL if os.environ["RANK"] == "1" else signal.SIGTERM)
time.sleep(600)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (ProcessLookupError("on purpose"), {"ends": {"1": {"code": -signal.SIGKILL}}}),
        # After SIGTERM torchrun kills a rank that ignores it: that rank did not fail.
        (SignalException("on purpose", signal.SIGTERM), None),
    ],
)
def test_exit_codes_of_ranks_are_written_though_torchrun_itself_raises(tmp_path, monkeypatch, capfd, error, ends):
    """Rank 0 still runs, 1 was killed, and 2 ended by SIGTERM."""
    (tmp_path / "some_rank.py").write_text(RANK)
    environment = child_environment() | {"PYTHONPATH": str(tmp_path)}

    started = []

    def breaks(command):
        for rank in range(3):
            command = (sys.executable, "-u", "-m", "hyperion.processes.worker")
            started.append(SubprocessHandler._popen(None, command, environment | {"RANK": str(rank)}))
        assert [rank.wait(60) for rank in started[1:]] == [-signal.SIGKILL, -signal.SIGTERM]
        raise error

    monkeypatch.setattr(torchrun, "main", breaks)
    monkeypatch.setattr(SubprocessHandler, "_popen", None)
    monkeypatch.setattr(
        rank_agent,
        "start_worker",
        lambda python, rest, environment, **options: start(python, "some_rank", [], environment, **options),
    )
    files = JobFolder(tmp_path)
    with capfd.disabled(), pytest.raises(type(error), match="on purpose"):
        _run([], files, _Ranks())
    started[0].kill()
    started[0].wait(60)
    assert read_json(files.ends) == ends
