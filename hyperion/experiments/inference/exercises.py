"""Self-marking exercises on runtimes. Each starts from a function with a classic mistake. `exercises_quantization` has more."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hyperion.chapter.exercises import Question
from hyperion.experiments.inference.exercises_quantization import DECODE_MS, NF4_BITS, judge_int8, judge_packing
from hyperion.experiments.inference.percentiles import samples_needed

__all__ = ["DECODE_MS", "NF4_BITS", "P99_SAMPLES", "judge_int8", "judge_packing", "judge_parity", "judge_percentile"]

P99_SAMPLES = Question(
    samples_needed(0.99),
    "the smallest n for which all n samples lie below the true percentile with at most 2.5 %: 0.99^n <= 0.025",
)


def judge_parity(my_check: Callable[[Tensor, Tensor], bool]) -> pd.DataFrame:
    """Test a check that compares the logits of an exported model with those of the original.

    Args:
        my_check: function of the logits of the original and of the export, float32 [N, K], that returns whether they agree. A
            rounding error of 1e-6 is right. An exception counts as False.

    Returns:
        A table with one line for each export: the answer of the check, and whether it is right.
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
        "the batch is fixed at 1, and all examples are equal": (one.expand(4, 10), one, False),
        "the last class is cut off": (logits, logits[:, :9], False),
        "only NaN": (logits, nan, False),
    }
    lines = []
    for name, (expected, output, wanted) in cases.items():
        try:
            said = bool(my_check(expected, output))
        except (RuntimeError, ValueError, TypeError):
            said = False
        lines.append({"export": name, "your check says equal": said, "right": said == wanted})
    return pd.DataFrame(lines)


def judge_percentile(my_p99: Callable[[Sequence[float], Sequence[bool]], float]) -> pd.DataFrame:
    """Test a function that computes the 99th percentile of the latency of requests, of which some failed.

    Args:
        my_p99: function of the seconds and of the success of each request. A failed request never got its answer, so its
            latency is infinite.

    Returns:
        A table with one line for each server: the answer, and whether it is right.
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
