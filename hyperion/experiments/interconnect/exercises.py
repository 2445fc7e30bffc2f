"""Exercises for the interconnect chapter.

In the first exercise the reader computes a bus bandwidth and avoids the usual mistakes, which make it too high. In the second
exercise the reader chooses inputs for a verification that detects every fault.
"""

from collections.abc import Callable, Iterable

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.exercises import Question, explains_errors

GB_ON_THE_RING = Question(2 * 7 / 8 * 124e6 * 2 / 1e9, "2 (n - 1) / n times the bytes of the gradient")

_MESSAGE_BYTES = 1 << 28
_CALL_S = 2e-3
_COUNT, _RANKS = 4096, 4


def timed_calls(ranks: int, calls: int = 40) -> np.ndarray:
    """Return synthetic times in seconds [calls, ranks] of an all-reduce. All ranks finish within microseconds of each other."""
    random = np.random.default_rng(ranks)
    return _CALL_S * random.normal(1, 0.01, (calls, 1)) + random.uniform(0, 5e-6, (calls, ranks))


@explains_errors
def judge_busbw(my_busbw: Callable[[np.ndarray, int], float]) -> pd.DataFrame:
    """Test a function that computes the bus bandwidth of an all-reduce from the times of each rank.

    Args:
        my_busbw: function that takes times in seconds of shape [calls, ranks] and the message size in bytes, and returns GB/s.

    Returns:
        A table with one line for each case: whether the answer is within 2 % of the correct value, the answer, and the correct
        value.
    """
    unwaited, cold = timed_calls(4), timed_calls(4)
    unwaited[:, 0] = 2e-5  # launch time only: this rank stopped its clock before its device had finished
    cold[0] = 0.4  # the first call of a collective sets up its connections
    cases = {
        "4 ranks": timed_calls(4),
        "8 ranks: another factor": timed_calls(8),
        "a rank that did not wait": unwaited,
        "a first call that sets up connections": cold,
    }
    return pd.DataFrame([_busbw_line(name, float(my_busbw(s, _MESSAGE_BYTES)), s.shape[1]) for name, s in cases.items()])


def _busbw_line(case: str, answer: float, ranks: int) -> dict:
    true = _MESSAGE_BYTES * 2 * (ranks - 1) / ranks / _CALL_S / 1e9
    return {"measured": case, "right": abs(answer / true - 1) < 0.02, "your GB/s": f"{answer:.1f}", "true": f"{true:.1f}"}


@explains_errors
def judge_inputs(my_inputs: Callable[[int, int], torch.Tensor]) -> pd.DataFrame:
    """Test the inputs of a verification: they must reveal every fault of an all-reduce in bf16.

    Args:
        my_inputs: function that takes a rank (0 to 3) and a number of elements. It returns the input of this rank as a tensor
            with this number of elements, in any dtype. The input is converted to bf16.

    Returns:
        A table. Its first line says whether the sum is exact in bf16 for the tested orders of the ranks. Each other line says
        whether the output with one fault differs from the correct output.
    """
    given = [my_inputs(rank, _COUNT).to(torch.bfloat16) for rank in range(_RANKS)]
    expected = torch.stack([one.double() for one in given]).sum(0)
    sound = all(torch.equal(_added(given, order).double(), expected) for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]))
    right = _added(given, range(_RANKS))
    faults = {
        "rank 3 left out": _added(given, [0, 1, 2]),
        "rank 1 counted twice": _added(given, [0, 1, 1, 2, 3]),
        "rank 2 taken for rank 1": _added(given, [0, 2, 2, 3]),
        "moved by one element": right.roll(1),
        "halves swapped": right.roll(_COUNT // 2),
        "nothing arrived": given[0],
    }
    lines = [{"what arrives": "the sum, in any order of the ranks", "right": sound, "seen": "equal" if sound else "rounded"}]
    for name, output in faults.items():
        differs = int((output.double() != expected).sum())
        lines.append({"what arrives": name, "right": differs > 0, "seen": f"{differs:,} of {_COUNT:,} values differ"})
    return pd.DataFrame(lines)


def _added(given: list[torch.Tensor], order: Iterable[int]) -> torch.Tensor:
    """Return the sum of the ranks' inputs in bf16, added one after the other in the given order as in a ring all-reduce."""
    total = torch.zeros_like(given[0])
    for rank in order:
        total = total + given[rank]
    return total
