"""Each exercise: the cell as given fails it, a right answer passes, and no shortcut does."""

import time

import torch

from hyperion.chapter.exercises import judge_leak_check, judge_number, judge_timer, solved


def test_timer_as_given_is_marked_wrong_and_a_sound_one_right():
    def as_given(device):
        start = time.perf_counter()
        device.launch()
        return time.perf_counter() - start

    def sound(device):
        device.launch()
        device.synchronize()
        samples = []
        for _ in range(10):
            start = time.perf_counter()
            device.launch()
            device.synchronize()
            samples.append(time.perf_counter() - start)
        return min(samples)

    assert not judge_timer(as_given)["right"].all()
    assert solved(judge_timer(sound))


def test_timer_that_waits_but_counts_the_first_call_is_caught():
    def cold(device):
        start = time.perf_counter()
        device.launch()
        device.synchronize()
        return time.perf_counter() - start

    faults = judge_timer(cold).set_index("fault")["right"]
    assert faults["stops the clock before the work is done"]
    assert not faults["counts the first, slow call"]


def test_leak_check_as_given_passes_leaking_models_and_perturbation_catches_them():
    def as_given(model):
        return model(torch.randint(32, (2, 16))).shape == (2, 16, 32)

    def perturbing(model):
        tokens = torch.randint(32, (2, 16))
        changed = tokens.clone()
        changed[:, -1] = (changed[:, -1] + 1) % 32
        return torch.equal(model(tokens)[:, :-1], model(changed)[:, :-1])

    assert not solved(judge_leak_check(as_given))
    assert solved(judge_leak_check(perturbing))


def test_numbers_are_marked():
    assert judge_number(None, 6.0, "count") == "not answered yet: set `answer` and run the cell again"
    assert judge_number(6.0, 6.0, "count") == "right"
    assert "count" in judge_number(5.0, 6.0, "count")
