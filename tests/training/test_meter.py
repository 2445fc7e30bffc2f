import time

import torch

from hyperion.hardware import detect_cpu
from hyperion.training.meter import UNTIMED_STEPS, EpochMeter


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
