"""Exercise for chapter 2.5: check functions that compute the mean loss of a whole batch from the losses of several ranks."""

from collections.abc import Callable
from typing import Any

import pandas as pd

from hyperion.chapter.exercises import Question, mutation_score

GB_PER_RANK = Question(2.0, "four float32 numbers per parameter, 16 bytes, divided by 8 ranks")


def judge_mean_check(check: Callable[[Any], bool]) -> pd.DataFrame:
    """Test the reader's check. The check decides whether a function combines the losses of several ranks correctly.

    The check is called with four functions. Only one of them returns the loss that a single device computes for the whole batch.

    Args:
        check: function that takes one of the four functions and returns True if it is correct. Each of the four functions takes
            two lists with one element per rank, the sum of the token losses and the number of tokens, and returns a loss.
    """
    mutants = {
        "mean of the ranks' means": lambda sums, counts: sum(s / n for s, n in zip(sums, counts, strict=True)) / len(sums),
        "rank 0's own mean": lambda sums, counts: sums[0] / counts[0],
        "sum over the tokens of the longest part": lambda sums, counts: sum(sums) / (len(sums) * max(counts)),
    }
    return mutation_score(check, lambda sums, counts: sum(sums) / sum(counts), mutants)
