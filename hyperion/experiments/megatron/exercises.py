"""Exercises of the chapter on megatron-core: the order of queries, keys and values, the bubble, a loss scale, bytes on a rank."""

from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor

from hyperion.chapter.exercises import Question
from hyperion.experiments.megatron.loss_scale_states import SCENARIOS, expected_scale
from hyperion.parallel.megatron.layouts import interleaved_qkv

# (p - 1) / (m + p - 1) <= 0.05 with p = 8 stages: m >= 7 / 0.05 - 7 = 133.
MICRO_BATCHES = Question(133, "solve (p - 1) / (m + p - 1) = 0.05 for m; p = 8", tolerance=1e-6)


def judge_qkv(my_qkv: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> pd.DataFrame:
    """Test a function that joins the weights of queries, keys and values for tensor parallelism.

    Args:
        my_qkv: function of (queries, keys, values, number of key-value heads) that returns one matrix. Each part of its rows must
            hold whole heads, so that a rank needs no data of another rank.

    Returns:
        A table with one line for each model: whether the matrix is right, and what was observed.
    """
    lines = []
    for queries, groups in ((4, 4), (4, 2), (8, 1)):
        parts = {
            f"{name}_proj.weight": torch.arange(heads * 2 * 3.0).view(heads * 2, 3) + offset
            for name, heads, offset in (("q", queries, 0), ("k", groups, 1000), ("v", groups, 2000))
        }
        try:
            matrix = my_qkv(parts["q_proj.weight"], parts["k_proj.weight"], parts["v_proj.weight"], groups)
            right = torch.equal(matrix, interleaved_qkv(parts, "", groups))
            seen = "first column: " + ", ".join(f"{value:g}" for value in matrix[:8, 0].tolist()) + ", …"
        except Exception as error:  # the reader's code may raise any exception, which counts as wrong
            right, seen = False, f"{type(error).__name__}: {error}"
        lines.append({"model": f"{queries} query heads, {groups} key-value heads", "right": right, "seen": seen})
    return pd.DataFrame(lines)


def judge_scaler(my_scale: Callable[[list[bool], int], float]) -> pd.DataFrame:
    """Test a function that computes a dynamic loss scale with hysteresis.

    Args:
        my_scale: function of (whether each step overflowed, hysteresis) that returns the scale after the last step. The initial
            scale is 4096, the minimum is 1, and the window has 1000 steps.

    Returns:
        A table with one line for each sequence of steps: whether the scale is right, and what was observed.
    """
    lines = []
    for hysteresis in (1, 2):
        for name, (events, _) in SCENARIOS.items():
            steps = [overflow for overflow, count in events for _ in range(count)]
            expected = expected_scale(events, hysteresis)
            try:
                found = my_scale(steps, hysteresis)
                right, seen = abs(found - expected) < 1e-9, f"{found:g}"
            except Exception as error:  # the reader's code may raise any exception, which counts as wrong
                right, seen = False, f"{type(error).__name__}: {error}"
            lines.append({"steps": name, "hysteresis": hysteresis, "right": right, "seen": seen})
    return pd.DataFrame(lines)
