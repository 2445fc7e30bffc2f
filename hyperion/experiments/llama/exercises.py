"""Exercises for chapter 2.6.

In the first exercise, the reader computes the targets of an instruction row. In the second exercise, the reader writes a check
that finds token ids without a row in the embedding.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from hyperion.chapter.exercises import Question, explains_errors, mutation_score
from hyperion.data.packing import IGNORE_INDEX

PARAMETERS_OF_LORA = Question(16_777_216, "r (d_in + d_out) for each of four projections, 32 times", tolerance=1e-6)

END, LENGTH, ROWS = 99, 12, 32_000
_PROMPT, _COMPLETION = [11, 12, 13, 14], [21, 22, 23]


@explains_errors
def judge_targets(my_targets: Callable[[Sequence[int], Sequence[int], int], tuple]) -> pd.DataFrame:
    """Test a function that computes the inputs and targets of one fine-tuning row from a prompt and its completion.

    Args:
        my_targets: function of three arguments: the token ids of the prompt, the token ids of the completion including the end of
            text, and a length. It returns (inputs, targets), each of this length. A target is the token after the input at the
            same position, or -100 (IGNORE_INDEX) if the position has no loss.

    Returns:
        A table with one line per fault: whether the row is free of the fault, and the targets.
    """
    inputs, targets = (np.asarray(side) for side in my_targets(_PROMPT, [*_COMPLETION, END], LENGTH))
    ids = [*_PROMPT, *_COMPLETION, END]
    size, first = len(ids) - 1, len(_PROMPT) - 1
    scored = targets != IGNORE_INDEX
    learned = targets[scored].tolist()
    faults = {
        "inputs are not the row": inputs.shape == (LENGTH,) and inputs[:size].tolist() == ids[:-1],
        "the prompt is learned": targets.shape == (LENGTH,) and not scored[:first].any(),
        "padding is learned": targets.shape == (LENGTH,) and not scored[size:].any(),
        "targets are not one token ahead": learned[-len(_COMPLETION) - 1 :] == [*_COMPLETION, END] and scored[first:size].all(),
        "the end of text is not learned": END in learned and learned.count(END) == 1,
    }
    seen = f"targets {targets.tolist()}"
    return pd.DataFrame([{"fault": name, "right": bool(free), "seen": seen} for name, free in faults.items()])


def judge_vocabulary_check(my_check: Callable[[np.ndarray, int], bool]) -> pd.DataFrame:
    """Test a check that decides whether token ids fit an embedding.

    Args:
        my_check: function that takes token ids (int64 of shape [N]) and the number of embedding rows. It returns True if the
            embedding has a row for every id.
    """

    def check(ids: Any) -> bool:
        return my_check(ids, ROWS)

    sound = np.array([0, 5, 17, ROWS - 1, 3])
    mutants = {
        "one id too large by one": np.array([0, 5, ROWS, 3]),
        "ids of GPT-2 (up to 50256)": np.array([15496, 995, 50256]),
        "a target's -100 among the inputs": np.array([3, IGNORE_INDEX, 17]),
    }
    return mutation_score(check, sound, mutants)
