"""The exercise on memory: the notebook's measurement fails, a correct one passes."""

import pytest
import torch

from hyperion.experiments.memory.exercises import judge_saving
from hyperion.hardware import detect_cpu
from hyperion.measure import TensorMemory
from tests.exercise_scores import solved


def saving(backward=True, of="peak_bytes"):
    def measure(plain, checkpointed, batch):
        held = []
        for model in (plain, checkpointed):
            with TensorMemory(detect_cpu()) as memory:
                if backward:
                    model(batch).sum().backward()
                else:
                    with torch.no_grad():
                        model(batch).sum()
            held.append(getattr(memory, of))
        return held[0] - held[1]

    return measure


def test_a_saving_is_the_difference_of_peaks_with_a_backward_pass():
    assert solved(judge_saving(saving()))


@pytest.mark.parametrize("broken", [{"backward": False}, {"of": "now_bytes"}])
def test_a_saving_without_gradients_or_without_peaks_is_none(broken):
    verdict = judge_saving(saving(**broken)).set_index("second model")
    assert not verdict["right"]["every block checkpointed"] and verdict["right"]["none checkpointed"]
    assert verdict["true"]["every block checkpointed"] > verdict["true"]["every second block checkpointed"] > 0
