import os
import signal
import threading

import pytest

from hyperion.hardware import Device, detect_cpu
from hyperion.training import Interrupted, StopFlag
from hyperion.training.clocks import SYNC_STEPS, Pulse


def test_sigterm_sets_the_flag_and_the_old_handler_comes_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopFlag() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) is before


def test_watched_batches_end_when_asked():
    with StopFlag() as stop:
        seen = []
        with pytest.raises(Interrupted):
            for batch in stop.watch([1, 2, 3]):
                seen.append(batch)
                if batch == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [1, 2]


def test_ranks_decide_when_watched_batches_end():
    answers = iter([False, False, True])
    seen = []
    with StopFlag() as stop, pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGTERM)  # this rank knows already, the others do not
        seen.extend(stop.watch(["a", "b", "c"], lambda: next(answers)))
    assert list(answers) == []


def test_another_thread_leaves_the_handlers_alone():
    before, flags = signal.getsignal(signal.SIGTERM), []

    def enter():
        with StopFlag() as stop:
            flags.append((stop.requested, signal.getsignal(signal.SIGTERM) is before))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert flags == [(False, True)]


def test_a_cpu_reads_every_loss():
    assert Pulse(detect_cpu()).steps == 1


def test_one_accelerator_waits_seldom(monkeypatch):
    cpu = detect_cpu()
    fields = {name: getattr(cpu, name) for name in cpu.__dataclass_fields__} | {"kind": "cuda"}
    assert Pulse(Device(**fields)).steps == SYNC_STEPS


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("fault", [False, True])
def test_alone_a_rank_agrees_with_itself(stop, fault):
    assert Pulse(detect_cpu()).agree(stop, fault, 3) == (stop, fault)
