"""Meetings of ranks through the job's store: nobody passes before all are there, and nobody waits for ever."""

import threading

import pytest
import torch.distributed as dist

from hyperion.errors import HyperionError
from hyperion.processes import meeting
from hyperion.processes.meeting import Meetings


@pytest.fixture
def two(monkeypatch):
    """The meetings of two ranks, in one process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store, Meetings(), Meetings()


def test_a_meeting_is_complete_when_all_are_there_and_not_before(two):
    _, a, b = two
    assert not a.complete("start", 2)
    a.arrive("start")
    assert not a.complete("start", 2) and not b.complete("start", 2)
    b.arrive("start")
    assert a.complete("start", 2) and b.complete("start", 2)
    assert not a.complete("end", 2)  # another name is another meeting


def test_who_comes_first_waits_for_the_other(two):
    _, a, b = two
    passed = threading.Event()
    waiting = threading.Thread(target=lambda: (a.meet("start", 2), passed.set()), daemon=True)
    waiting.start()
    assert not passed.wait(0.2)
    b.meet("start", 2)
    assert passed.wait(30)


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(two, monkeypatch):
    monkeypatch.setattr(meeting, "_PATIENCE_S", 0.05)
    with pytest.raises(HyperionError, match="1 of 2 ranks came to 'start'"):
        two[1].meet("start", 2)
