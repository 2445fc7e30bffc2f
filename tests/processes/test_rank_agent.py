"""torchrun's side: its command line, and entries that are not there."""

import signal
import sys

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from hyperion.errors import HyperionError
from hyperion.processes.lifeline import child_environment
from hyperion.processes.notes import Notes, read
from hyperion.processes.rank_agent import _Ranks, _run, arguments, require_entry

REQUEST = {"entry": "a:b", "params": {"x": 1}, "ranks": 4, "nodes": 1, "rendezvous": ""}


def test_one_node_needs_no_address():
    words = arguments(REQUEST, "/folder")
    assert {"--standalone", "--nnodes=1", "--nproc-per-node=4", "--max-restarts=0"} <= set(words)


def test_several_nodes_meet_under_a_name_of_their_own():
    two = REQUEST | {"nodes": 2, "rendezvous": "node0:29500"}
    words = arguments(two, "/folder")
    assert {"--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29500"} <= set(words)
    names = {word for request in (two, two, two | {"params": {}}) for word in arguments(request, "/f") if "rdzv-id" in word}
    assert len(names) == 2


MODULE = """
import os
from json import loads as parse
if os.sep == "/":
    CONSTANT = 1
def plain(): local = 1
class Callable: pass
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of entries."""
    (tmp_path / "some_entries.py").write_text(MODULE)
    (tmp_path / "all_of_them.py").write_text("from some_entries import *")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path / "some_entries.py"


@pytest.mark.parametrize("name", ["plain", "Callable", "CONSTANT", "parse"])
def test_what_a_module_binds_is_an_entry_until_it_binds_it_no_more(module, name):
    require_entry(f"some_entries:{name}")
    require_entry(f"all_of_them:{name}")
    module.write_text(MODULE.replace(name, "other"))
    with pytest.raises(HyperionError, match=f"has no '{name}'"):
        require_entry(f"some_entries:{name}")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("some_entries:nothing", "module 'some_entries' has no 'nothing'"),
        ("some_entries:loads", "has no 'loads'"),
        ("no_such_module:plain", "there is no module 'no_such_module'"),
        ("no.such.module:plain", "there is no module 'no.such.module'"),
        ("some_entries", "'some_entries' is no entry"),
        (":plain", "':plain' is no entry"),
    ],
)
def test_an_entry_that_is_not_there_is_refused(module, entry, message):
    with pytest.raises(HyperionError, match=message):
        require_entry(entry)


RANK = """
import os, signal, time
if os.environ["RANK"] != "0":
    os.kill(os.getpid(), signal.SIGKILL if os.environ["RANK"] == "1" else signal.SIGTERM)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ProcessLookupError("on purpose"), {"ends": {"1": {"code": -signal.SIGKILL}}}),
        # Asked to end, torchrun kills a rank that does not listen: that rank is not to blame for the end.
        (SignalException("on purpose", signal.SIGTERM), None),
    ],
)
def test_how_ranks_ended_is_told_though_torchrun_itself_breaks(tmp_path, monkeypatch, capfd, error, told):
    """Rank 0 still runs, 1 was killed, and 2 ended because it was asked to."""
    (tmp_path / "some_rank.py").write_text(RANK)
    environment = child_environment() | {"PYTHONPATH": str(tmp_path)}

    started = []

    def breaks(command):
        for rank in range(3):
            command = (sys.executable, "-u", "-m", "some_rank")
            started.append(SubprocessHandler._popen(None, command, environment | {"RANK": str(rank)}))
        assert [rank.wait(60) for rank in started[1:]] == [-signal.SIGKILL, -signal.SIGTERM]
        raise error

    monkeypatch.setattr(torchrun, "main", breaks)
    monkeypatch.setattr(SubprocessHandler, "_popen", None)
    notes = Notes(tmp_path)
    with capfd.disabled(), pytest.raises(type(error), match="on purpose"):
        _run([], notes, _Ranks())
    started[0].kill()
    started[0].wait(60)
    assert read(notes.ends) == told
