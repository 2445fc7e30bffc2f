"""Epochs timed and counted, losses read in time, and a stop that all ranks agree on."""

import json
import os
import signal
import threading
import time
from dataclasses import asdict, replace

import pytest
import torch

from hyperion.checkpoints import read_state, write_state
from hyperion.hardware import Device, detect_cpu
from hyperion.measure.memory_use.tensor_memory import PeakMemory
from hyperion.training import EpochRecord, History, Interrupted, StopFlag, clocks, mean_over_ranks
from hyperion.training.clocks import SYNC_STEPS, UNTIMED_STEPS, EpochMeter, Pulse


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


RECORD = EpochRecord(1, 10, 10, 2.5, 1e-3, 640, 0.5, 7, 900.0, "peak_rss_gib", None, {"loss": 2.0})


def test_a_history_survives_a_file_bit_for_bit(tmp_path):
    history = History("token", [0.1, 1 / 3, 2e-30], [RECORD], [4], [replace(RECORD, rank=0)])
    write_state(tmp_path, history.state_dict())
    assert History.from_state_dict(read_state(tmp_path)) == history


def test_a_record_is_json():
    assert EpochRecord(**json.loads(json.dumps(asdict(RECORD)))) == RECORD


def test_an_epoch_of_many_ranks_is_their_sum_over_the_slowest_ones_time():
    fast = replace(RECORD, rank=0, loss=2.0, items=100, time_s=0.5, items_per_s=200.0, peak_memory_gib=1.0, evaluation=None)
    fast = replace(fast, reserved_memory_gib=3.0, wall_s=0.75)
    slow = replace(fast, rank=1, loss=3.0, items=300, time_s=1.0, items_per_s=300.0, peak_memory_gib=2.0, wall_s=1.5)
    history = History("token")
    whole = history.add_epoch([fast, slow], 2.75, 40, {"loss": 1.0})
    assert history.epochs == [whole] and history.rank_epochs == [fast, slow]
    assert (whole.rank, whole.loss, whole.items, whole.evaluation) == (None, 2.75, 440, {"loss": 1.0})
    assert (whole.time_s, whole.items_per_s, whole.peak_memory_gib) == (1.0, pytest.approx(400.0), 2.0)
    assert (whole.reserved_memory_gib, whole.wall_s) == (3.0, 1.5)
    assert mean_over_ranks([fast, slow]) == pytest.approx(2.75)


def test_what_one_rank_cannot_tell_is_not_told_of_all():
    known = replace(RECORD, rank=0, peak_memory_gib=1.0)
    whole = History("token").add_epoch([known, replace(known, rank=1, items_per_s=None, peak_memory_gib=None)], 1.0, 0, None)
    assert whole.items_per_s is None and whole.peak_memory_gib is None and whole.reserved_memory_gib is None


def test_the_epoch_of_one_process_is_its_part():
    part = replace(RECORD, rank=0, evaluation=None)
    assert History("token").add_epoch([part], part.loss, 0, RECORD.evaluation) == RECORD


def items(n):
    return torch.tensor(n)


def test_the_first_steps_of_a_process_are_counted_but_not_timed():
    meter = EpochMeter(detect_cpu())
    meter.start()
    for _ in range(UNTIMED_STEPS + 2):
        meter.count(items(5))
    meter.pause()
    results = meter.results()
    assert results["items"] == 5 * (UNTIMED_STEPS + 2)
    assert results["timed_steps"] == 2
    assert results["items_per_s"] == 10 / results["time_s"]


def test_the_wall_time_has_the_warm_up_steps_but_no_pause():
    meter = EpochMeter(detect_cpu())
    for _ in range(2):
        meter.start()
        time.sleep(0.02)
        meter.count(items(1))
        meter.pause()
        time.sleep(0.02)
    results = meter.results()
    assert results["time_s"] == 0 and results["wall_s"] >= 0.04
    meter.pause()
    assert meter.results() == results


def test_the_device_is_waited_for_before_the_time_is_read(monkeypatch):
    class Region(clocks.PeakMemoryRegion):
        def __exit__(self, *exception):
            time.sleep(0.05)  # the device still works on the steps
            super().__exit__(*exception)

    monkeypatch.setattr(clocks, "PeakMemoryRegion", Region)
    meter = EpochMeter(detect_cpu(), warmed_up=True)
    meter.start()
    meter.count(items(1))
    meter.pause()
    results = meter.results()
    assert results["wall_s"] >= 0.05 and results["time_s"] >= 0.05


def test_the_largest_memory_that_the_allocator_held_is_kept(monkeypatch):
    held = iter([2 * 2**30, 3 * 2**30, 2**30])
    for name, value in {"synchronize": None, "reset_peak_memory_stats": None, "max_memory_allocated": 2**30}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: next(held))
    meter = EpochMeter(replace(detect_cpu(), kind="cuda", torch_device="cuda:0"), warmed_up=True)
    for _ in range(3):
        meter.start()
        meter.pause()
    assert (meter.results()["peak_memory_gib"], meter.results()["reserved_memory_gib"]) == (1.0, 3.0)


def test_the_peak_of_an_epoch_is_that_of_its_largest_part(monkeypatch):
    peaks = iter([2.0, 3.0, 1.0])

    class Region(clocks.PeakMemoryRegion):
        def __exit__(self, *exception):
            super().__exit__(*exception)
            self.peak = PeakMemory("peak_rss_gib", next(peaks))

    monkeypatch.setattr(clocks, "PeakMemoryRegion", Region)
    meter = EpochMeter(detect_cpu())
    for _ in range(3):
        meter.start()
        meter.pause()
    assert meter.results()["peak_memory_gib"] == 3.0


def test_a_pause_is_not_timed():
    meter = EpochMeter(detect_cpu(), warmed_up=True)
    meter.start()
    meter.count(items(1))
    meter.pause()
    before = meter.results()["time_s"]
    time.sleep(0.05)
    meter.pause()
    assert meter.results()["time_s"] == before
    meter.start()
    meter.count(items(1))
    meter.pause()
    assert meter.results()["timed_steps"] == 2
    assert before < meter.results()["time_s"]


def test_an_epoch_shorter_than_the_warm_up_has_no_rate():
    meter = EpochMeter(detect_cpu())
    meter.start()
    meter.count(items(1))
    meter.pause()
    assert meter.results()["items_per_s"] is None


def test_sums_survive_a_checkpoint():
    meter = EpochMeter(detect_cpu(), warmed_up=True)
    meter.start()
    meter.count(items(4))
    meter.pause()
    other = EpochMeter(detect_cpu())
    other.load_state_dict(meter.state_dict())
    assert other.results() == meter.results()
    assert other.untimed_left == UNTIMED_STEPS


def test_waiting_for_the_loader_is_told_apart_from_the_step():
    def loader():
        for _ in range(4):
            time.sleep(0.02)
            yield "batch"

    meter = EpochMeter(detect_cpu(), warmed_up=True)
    for number, _ in enumerate(meter.waiting(loader())):
        if number == 0:
            meter.start()  # nothing is timed before
        time.sleep(0.01)
        meter.count(items(1))
    meter.pause()
    results = meter.results()
    assert 0.06 <= results["waited_s"] <= results["time_s"] - 0.04
