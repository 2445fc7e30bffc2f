"""Self-marking exercises on runtimes. Each begins with a function that contains a common mistake."""

from collections.abc import Callable, Sequence

import numpy as np
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


@explains_errors
def judge_percentile(my_p99: Callable[[Sequence[float], Sequence[bool]], float]) -> pd.DataFrame:
    """Test a function that computes the 99th percentile of request latencies if some requests failed.

    Args:
        my_p99: function that takes two sequences with one entry per request: the time in seconds, and whether the request
            succeeded. It returns the 99th percentile in seconds. A failed request never got an answer, so its latency counts as
            infinite.

    Returns:
        A table with one line for each server: the result of the function, and whether it is right.
    """
    seconds = np.linspace(0.010, 0.020, 1000)
    slow = np.where(np.arange(1000) % 50 == 0, 5.0, seconds)  # 2 % of the requests
    servers = {
        "every request succeeds": (seconds, np.full(1000, True), 0.0199),
        "2 % are slow": (slow, np.full(1000, True), 5.0),
        "2 % are slow and are refused": (slow, slow < 1, np.inf),
        "0.2 % fail": (seconds, np.arange(1000) >= 2, 0.0199),
    }
    lines = []
    for name, (times, succeeded, wanted) in servers.items():
        said = float(my_p99(times, succeeded))
        right = said == wanted if np.isinf(wanted) else abs(said - wanted) <= 0.005 * wanted
        lines.append({"server": name, "your p99 / s": said, "right": bool(right)})
    return pd.DataFrame(lines)
