"""A resumed run is judged by the losses after the checkpoint."""

import pandas as pd
import pytest

from hyperion.chapter.context import Result
from hyperion.experiments.distributed.resharding import ReshardingOptions, _rows
from tests.chapter.toy import toy_context

SIZES = {
    "model": "lm_d64_h4_l2",
    "sequence_length": 16,
    "batch_size": 4,
    "steps_before": 3,
    "steps_after": 2,
    "learning_rate": 1e-3,
    "ranks": 2,
    "cpu_ranks": 2,
    "timeout_s": 300,
}


@pytest.mark.parametrize(
    ("losses", "difference"),
    [
        ([6.0, 5.0, 4.0, 3.0, 2.0], 0.0),
        ([6.0, 5.0, 4.0, 3.0, 2.002], 1e-3),
        ([6.0, 5.0, 4.0, 3.003, 2.0], 1e-3),
        ([6.0, 5.0, 4.1, 3.0, 2.0], 0.0),  # the loss of the last step before the checkpoint
    ],
)
def test_only_losses_after_the_checkpoint_are_compared(losses, difference, tmp_path):
    context = toy_context("resharding", SIZES, tmp_path)
    first, resumed = (
        Result([], pd.DataFrame({"step": range(1, 6), "loss": curve, "resumed_at": 3}), "synthetic")
        for curve in ([6.0, 5.0, 4.0, 3.0, 2.0], losses)
    )
    row, late = _rows(context, ReshardingOptions.of(context), 1, first, resumed)
    assert row.value == pytest.approx(difference) and row.without_failed_value().is_unexpected is (difference > 0)
    assert late.value == 0


@pytest.mark.parametrize("resumed_at", [0, 2])
def test_a_run_that_ignored_the_checkpoint_has_the_right_losses_and_is_found_by_its_step(resumed_at, tmp_path):
    context = toy_context("resharding", SIZES, tmp_path)
    samples = pd.DataFrame({"step": range(1, 6), "loss": [6.0, 5.0, 4.0, 3.0, 2.0], "resumed_at": resumed_at})
    result = Result([], samples, "synthetic")
    row, late = _rows(context, ReshardingOptions.of(context), 1, result, result)
    assert row.value == 0 and late.value == 3 - resumed_at and late.without_failed_value().is_unexpected
