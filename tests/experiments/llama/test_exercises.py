"""The chapter's exercises know the right answer from the wrong ones, and from the one they begin with."""

import numpy as np

from hyperion.data.packing import IGNORE_INDEX
from hyperion.experiments.llama.exercises import ROWS, judge_targets, judge_vocabulary_check
from tests.exercise_scores import solved


def right(prompt, completion, length):
    ids = [*prompt, *completion]
    inputs, targets = np.full(length, 0), np.full(length, IGNORE_INDEX)
    inputs[: len(ids) - 1] = ids[:-1]
    targets[len(prompt) - 1 : len(ids) - 1] = completion
    return inputs, targets


def faults(score):
    return set(score.loc[~score["right"], "fault"])


def test_each_fault_of_targets_is_named():
    def everything(prompt, completion, length):
        ids = [*prompt, *completion]
        inputs = np.array(ids + [completion[-1]] * (length - len(ids)))
        return inputs, inputs.copy()

    def with_prompt(prompt, completion, length):
        inputs, targets = right(prompt, completion, length)
        targets[: len(prompt) - 1] = prompt[1:]
        return inputs, targets

    def without_end(prompt, completion, length):
        inputs, targets = right(prompt, completion, length)
        targets[targets == completion[-1]] = IGNORE_INDEX
        return inputs, targets

    assert solved(judge_targets(right))
    assert faults(judge_targets(with_prompt)) == {"the prompt is learned"}
    assert "the end of text is not learned" in faults(judge_targets(without_end))
    assert {"the prompt is learned", "padding is learned", "targets are not one token ahead"} <= faults(judge_targets(everything))


def test_a_check_of_ids_must_look_at_both_ends():
    assert solved(judge_vocabulary_check(lambda ids, rows: ids.min() >= 0 and ids.max() < rows))
    assert not solved(judge_vocabulary_check(lambda ids, rows: ids.max() <= rows))
    assert not solved(judge_vocabulary_check(lambda ids, rows: ids.max() < ROWS))
