"""The exercise of chapter 2.5: which mean over ranks is the mean of the whole batch?"""

from collections.abc import Callable

import pandas as pd

from hyperion.chapter.exercises import mutation_score


def judge_mean_check(check: Callable[[Callable], bool]) -> pd.DataFrame:
    """Let the reader's check judge four ways to put the ranks' losses together, one of which is one device's.

    Args:
        check: takes a function (sums of token losses by rank, tokens by rank) -> loss, and says whether it is sound.
    """
    mutants = {
        "mean of the ranks' means": lambda sums, counts: sum(s / n for s, n in zip(sums, counts, strict=True)) / len(sums),
        "rank 0's own mean": lambda sums, counts: sums[0] / counts[0],
        "sum over the tokens of the longest part": lambda sums, counts: sum(sums) / (len(sums) * max(counts)),
    }
    return mutation_score(check, lambda sums, counts: sum(sums) / sum(counts), mutants)
