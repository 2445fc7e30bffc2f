"""Exercises for the chapter on frameworks: improve a judge that reads only losses, and correct a throughput that is too high."""

from collections.abc import Callable

import pandas as pd

from hyperion.chapter.exercises import Question

_STEPS, _ROWS, _LENGTH = 4, 8, 64
# The run counts each of its 8 micro-batches of one row as a whole step.
OVERSTATED = Question(8.0, "divide the counted tokens by the tokens of the rows that the model read")


def mystery_run() -> pd.DataFrame:
    """Return the observations of a run that reports a throughput, one line for each step.

    The columns are `time_s`; `rows_read`, the number of rows of 64 tokens that the embedding received; `micro_batches`; and
    `counted_tokens`, from which the run computes its throughput.
    """
    steps = range(1, _STEPS + 1)
    counted = _ROWS * _ROWS * _LENGTH
    return pd.DataFrame({"step": steps, "time_s": 0.5, "rows_read": _ROWS, "micro_batches": _ROWS, "counted_tokens": counted})


def judge_equal_work(my_judge: Callable[[dict, dict], bool]) -> pd.DataFrame:
    """Test a function that decides whether two runs did equal work.

    Args:
        my_judge: function of (run, reference). Both are dicts with `losses`, the loss of each step; `first_norm`, the gradient
            norm of the first step; `rows`, the row numbers of each step; `counted_tokens`; `optimizer_steps`; and `undecayed`,
            the number of elements without weight decay. The function returns True if the work is equal.

    Returns:
        A table with one line for each run: whether the decision is right, and what it was.
    """
    reference = {
        "losses": [6.0925, 6.0103, 5.8711, 5.7742],
        "first_norm": 4.0187,
        "rows": [list(range(step * _ROWS, (step + 1) * _ROWS)) for step in range(_STEPS)],
        "counted_tokens": _STEPS * _ROWS * _LENGTH,
        "optimizer_steps": _STEPS,
        "undecayed": 320,
    }
    runs: dict[str, tuple[dict, bool]] = {
        "the same": ({}, True),
        "other rounding": ({"losses": [6.0925, 6.0103002, 5.8710995, 5.7742004], "first_norm": 4.0187003}, True),
        "a sum instead of a mean": ({"first_norm": 4.0187 * _ROWS * _LENGTH}, False),
        "tokens counted on each of two ranks": ({"counted_tokens": 2 * _STEPS * _ROWS * _LENGTH}, False),
        "one step less at the end": ({"optimizer_steps": _STEPS - 1}, False),
        "decay on norms": ({"undecayed": 0}, False),
        "rows in another order": ({"rows": reference["rows"][::-1], "losses": [6.1004, 6.0012, 5.8807, 5.7698]}, False),
    }
    lines = []
    for name, (changes, equal) in runs.items():
        try:
            answer = bool(my_judge(reference | changes, reference))
            right, seen = answer == equal, "equal work" if answer else "unequal work"
        except Exception as error:  # the reader's code may raise any exception, which counts as wrong
            right, seen = False, f"{type(error).__name__}: {error}"
        lines.append({"run": name, "right": right, "seen": seen})
    return pd.DataFrame(lines)
