"""Barriers through the job's store: no rank passes before all have arrived, and no rank waits for ever."""

import threading

import pytest
import torch.distributed as dist

from hyperion.errors import HyperionError
from hyperion.processes.group import StoreBarrier


@pytest.fixture
def two(monkeypatch):
    """The barriers of two ranks, in one process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store, StoreBarrier(), StoreBarrier()


def test_a_barrier_is_complete_when_all_have_arrived_and_not_before(two):
    _, a, b = two
    assert not a.is_complete("start", 2)
    a.arrive("start")
    assert not a.is_complete("start", 2) and not b.is_complete("start", 2)
    b.arrive("start")
    assert a.is_complete("start", 2) and b.is_complete("start", 2)
    assert not a.is_complete("end", 2)  # another name is another barrier


def test_the_first_rank_waits_for_the_other(two):
    _, a, b = two
    passed = threading.Event()
    waiting = threading.Thread(target=lambda: (a.wait("start", 2), passed.set()), daemon=True)
    waiting.start()
    assert not passed.wait(0.2)
    b.wait("start", 2)
    assert passed.wait(30)


def test_a_missing_rank_ends_the_wait_with_an_error(two):
    with pytest.raises(HyperionError, match="1 of 2 ranks arrived at barrier 'start'"):
        StoreBarrier(timeout_s=0.05).wait("start", 2)
