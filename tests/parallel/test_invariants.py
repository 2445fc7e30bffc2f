"""Ranks that drift apart are caught, on every rank, with the parameter named."""

import pytest
import torch
from torch import nn

from hyperion.parallel import assert_ranks_agree, fsdp_units, full_parameter_bytes, local_parameter_bytes


@pytest.mark.process
def test_equal_ranks_pass(answers):
    assert [answer["agreement"]["clean"] for answer in answers] == ["", ""]


@pytest.mark.process
def test_a_value_changed_on_one_rank_is_named_on_all(answers):
    for answer in answers:
        told = answer["agreement"]["values"]
        assert "parameter blocks.1.mlp.up.weight of rank 1 differs from that of rank 0; 2 of 52 parameters differ" in told


@pytest.mark.process
def test_models_of_other_shapes_are_told_apart_before_anything_hangs(answers):
    expected = "parameter names, shapes or dtypes of rank 1 differ from those of rank 0"
    assert all(expected in answer["agreement"]["shapes"] for answer in answers)


def test_alone_a_model_agrees_with_itself_and_holds_all_it_has():
    model = nn.Linear(3, 4).to(torch.bfloat16)
    assert_ranks_agree(model)
    assert local_parameter_bytes(model) == full_parameter_bytes(model) == 2 * 16
    assert fsdp_units(model) == []
