"""Self-marking exercises on runtimes. Each begins with a function that contains a common mistake."""

from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor

from hyperion.chapter.exercises import Question, explains_errors
from hyperion.workloads.percentiles import samples_needed

P99_SAMPLES = Question(
    samples_needed(0.99),
    "the smallest n for which all n samples lie below the true percentile with at most 2.5 %: 0.99^n <= 0.025",
)


@explains_errors
def judge_parity(my_check: Callable[[Tensor, Tensor], bool]) -> pd.DataFrame:
    """Test a check that compares the logits of an exported model with those of the original.

    Args:
        my_check: function that takes the logits of the original and of the exported model, both float32 of shape [N, K]. It
            returns True if they agree. It should accept differences of about 1e-6, which are rounding errors. An exception
            counts as False.

    Returns:
        A table with one line for each exported model: the result of the check, and whether it is right.
    """
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(1, 10, generator=generator)
    logits = torch.randn(4, 10, generator=generator)
    nan, off = torch.full_like(logits, torch.nan), logits.clone()
    off[3, 7] += 0.1
    cases = {
        "the same logits": (logits, logits.clone(), True),
        "float32 rounding": (logits, logits * (1 + 1e-6), True),
        "one logit is off by 0.1": (logits, off, False),
        "a batch fixed at 1: all examples are equal": (one.expand(4, 10), one, False),
        "the last class is cut off": (logits, logits[:, :9], False),
        "only NaN": (logits, nan, False),
    }
    lines = []
    for name, (expected, output, wanted) in cases.items():
        try:
            said = bool(my_check(expected, output))
        except Exception:  # such as the AssertionError of torch.testing.assert_close
            said = False
        lines.append({"export": name, "your check says equal": said, "right": said == wanted})
    return pd.DataFrame(lines)
