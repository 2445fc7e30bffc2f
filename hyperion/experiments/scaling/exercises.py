"""Exercise for chapter 2.8: the efficiency of weak and strong scaling."""

from collections.abc import Callable

import pandas as pd

from hyperion.chapter.exercises import Question, explains_errors

MILLISECONDS_OF_ALL_REDUCE = Question(
    1e3 * 2 * 3 / 4 * 4 * 124e6 / 300e9, "2 (N - 1) / N times the bytes of the gradients, over the bandwidth"
)

_CASES = (
    ("one device", 2.0, 2.0, 1, "weak", 1.0),
    ("weak, ideal", 2.0, 2.0, 4, "weak", 1.0),
    ("weak, slower", 2.0, 2.5, 4, "weak", 0.8),
    ("strong, ideal", 2.0, 0.5, 4, "strong", 1.0),
    ("strong, half", 2.0, 1.0, 4, "strong", 0.5),
)


@explains_errors
def judge_efficiency(efficiency: Callable[[float, float, int, str], float]) -> pd.DataFrame:
    """Test a function that computes scaling efficiency. The results of the test cases are known.

    Args:
        efficiency: function that takes four arguments: the step time on one device in seconds, the step time on N devices in
            seconds, the number of devices N, and the mode ("weak" or "strong"). It returns the efficiency.
    """
    lines = []
    for name, t1, tN, N, mode, expected in _CASES:
        answer = efficiency(t1, tN, N, mode)
        right = abs(answer - expected) < 1e-9
        lines.append({"case": name, "yours": f"{answer:g}", "expected": f"{expected:g}", "right": right})
    return pd.DataFrame(lines)
