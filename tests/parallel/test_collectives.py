"""Sums, norms and checks of a model alone. test_parallelize checks sums over ranks, and ranks that drift apart."""

import pytest
import torch
from torch import nn

from hyperion.parallel import (
    assert_ranks_agree,
    clip_gradients,
    fsdp_units,
    full_parameter_bytes,
    is_replicated,
    is_sharded,
    local_gradient_norm,
    local_parameter_bytes,
    ranks_of,
    reshard,
    start_sum,
)


def test_alone_a_sum_is_the_value_itself():
    values = torch.randn(3)
    assert start_sum(values, 1)() is values


def test_a_plain_model_is_alone():
    model = nn.Linear(2, 2)
    reshard(model)
    assert (ranks_of(model), is_sharded(model), is_replicated(model)) == (1, False, False)


def test_the_norm_is_over_all_gradients_that_there_are():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    model(torch.randn(5, 3)).sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in model[1].parameters()])
    torch.testing.assert_close(local_gradient_norm(model), gradients.norm())


@pytest.mark.parametrize("limit", [0.01, 1e6, float("inf")])
def test_clipping_is_torchs(limit):
    gradients = []
    for clip in (clip_gradients, lambda model, limit, norm: nn.utils.clip_grad_norm_(model.parameters(), limit)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double())
        model[1](model[0](torch.randn(5, 3)).double()).sum().backward()
        clip(model, limit, local_gradient_norm(model))
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(ours, torchs) for ours, torchs in zip(*gradients, strict=True))


def test_alone_a_model_agrees_with_itself_and_holds_all_it_has():
    model = nn.Linear(3, 4).to(torch.bfloat16)
    assert_ranks_agree(model)
    assert local_parameter_bytes(model) == full_parameter_bytes(model) == 2 * 16
    assert fsdp_units(model) == []
