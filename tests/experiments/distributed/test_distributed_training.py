"""Counts of examples that two ranks or no rank got, from the samples of the ranks."""

import pandas as pd
import pytest

from hyperion.chapter.context import Result
from hyperion.experiments.distributed.distributed_training import DistributedTrainingOptions, _overlap_rows
from hyperion.results import RowError
from tests.chapter.toy import toy_context

TRAINING = {"task": "language", "model": "lm_d64_h4_l2", "strategy": "ddp", "precision": "fp32", "batch_size": 4}
SIZES = {"trainings": [TRAINING | {"learning_rate": 1e-3, "weight_decay": 0.0, "steps": 2, "sequence_length": 16}]}


def rows_of(tmp_path, *examples_of_ranks):
    """The rows for an epoch of four examples, of which each rank trained on the given ones."""
    context = toy_context("distributed_training", SIZES, tmp_path)
    frames = []
    for examples in examples_of_ranks:
        parts = {"example": examples, "of one device": range(4)}
        frame = pd.concat([pd.DataFrame({"example": list(numbers), "kind": kind}) for kind, numbers in parts.items()])
        frames.append(frame.assign(training="lm_d64_h4_l2_ddp", source="synthetic"))
    curve = pd.DataFrame({"kind": ["step"], "training": ["lm_d64_h4_l2_ddp"], "loss": [1.0]})
    frames[0] = pd.concat([curve, frames[0]], ignore_index=True)
    return _overlap_rows(context, DistributedTrainingOptions.of(context), [Result([], frame) for frame in frames])


def test_a_partition_of_the_epoch_has_no_overlap(tmp_path):
    rows = rows_of(tmp_path, [0, 1], [2, 3])
    for row in rows:
        row.validate()
    assert [row.value for row in rows] == [0, 0] and {row.data_source for row in rows} == {"synthetic"}


def test_an_example_of_two_ranks_and_one_of_none_are_refused(tmp_path):
    rows = rows_of(tmp_path, [0, 1], [1, 2])
    assert [row.value for row in rows] == [1, 1]
    for row in rows:
        with pytest.raises(RowError):
            row.validate()
