"""Exercise of chapter 2.5: which mean over ranks is the mean of the whole batch?"""

from collections.abc import Callable
from typing import Any

import pandas as pd

from hyperion.chapter.exercises import mutation_score


def judge_mean_check(check: Callable[[Any], bool]) -> pd.DataFrame:
    """Test the reader's check on four ways to combine the ranks' losses, one of which gives the loss of one device.

    Args:
        check: takes a function (sums of token losses by rank, tokens by rank) -> loss; returns whether it is correct.
    """
    mutants = {
        "mean of the ranks' means": lambda sums, counts: sum(s / n for s, n in zip(sums, counts, strict=True)) / len(sums),
        "rank 0's own mean": lambda sums, counts: sums[0] / counts[0],
        "sum over the tokens of the longest part": lambda sums, counts: sum(sums) / (len(sums) * max(counts)),
    }
    return mutation_score(check, lambda sums, counts: sum(sums) / sum(counts), mutants)
