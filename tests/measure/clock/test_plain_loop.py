"""The plain loop beside the harness's clock: what it calls, how often, and for which device it waits."""

import pytest
import torch

from hyperion.hardware import detect, detect_cpu
from hyperion.measure.clock import timing
from hyperion.measure.clock.clocks import device_clock
from hyperion.measure.clock.timing import compare_with_plain_loop
from tests.hardware.machines import facts, gpu

CPU = detect_cpu()


def test_both_call_as_often_in_turn_and_the_first_round_is_no_sample():
    order = []
    ours, plain = compare_with_plain_loop(lambda: order.append("a"), CPU, calls=3, rounds=4, plain=lambda: order.append("b"))
    assert order == (["a"] * 3 + ["b"] * 3) * 5
    assert len(ours.samples_s) == len(plain.samples_s) == 4 and not ours.cold


@pytest.mark.parametrize("index", [0, 1])
def test_the_plain_loop_waits_for_the_device_that_is_measured(monkeypatch, index):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    monkeypatch.setattr(timing, "device_clock", lambda device: device_clock(CPU))
    machine = facts(gpus=(gpu("H200"), gpu("H200")))
    compare_with_plain_loop(lambda: None, detect(machine, index), calls=2, rounds=1)
    assert waited == [f"cuda:{index}"] * 4
