"""A resumed run is judged by the losses after the checkpoint."""

import pandas as pd
import pytest

from hyperion.chapter.context import Result
from hyperion.experiments.distributed.resharding import ReshardingOptions, _row
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
        Result([], pd.DataFrame({"step": range(1, 6), "loss": curve}), "synthetic")
        for curve in ([6.0, 5.0, 4.0, 3.0, 2.0], losses)
    )
    row = _row(context, ReshardingOptions.of(context), 1, first, resumed)
    assert row.value == pytest.approx(difference) and row.without_failed_value().is_unexpected is (difference > 0)
