"""Running statistics of a recomputed block count each batch once."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyperion.parallel import average_statistics
from hyperion.parallel.activation_checkpoints import frozen_statistics


def statistics(norm: nn.BatchNorm1d) -> list:
    return [norm.running_mean.tolist(), norm.running_var.tolist(), int(norm.num_batches_tracked)]


def test_a_recomputation_leaves_them_alone_and_plain_checkpointing_does_not():
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.3), nn.ReLU())
    initial, inputs = {name: value.clone() for name, value in block.state_dict().items()}, torch.randn(8, 4)
    found = {}
    for name, options in {
        "plain": None,
        "checkpointed": {"context_fn": lambda: frozen_statistics(block)},
        "unguarded": {},
    }.items():
        block.load_state_dict(initial)
        output = block(inputs) if options is None else checkpoint(block, inputs, use_reentrant=False, **options)
        output.sum().backward()
        found[name] = statistics(block[1])
    assert found["checkpointed"] == found["plain"] and found["plain"][2] == 1
    assert found["unguarded"] != found["plain"] and found["unguarded"][2] == 2
    assert block[1].momentum == 0.3


def test_alone_there_is_nothing_to_average():
    norm = nn.BatchNorm1d(4)
    norm(torch.randn(8, 4))
    before = statistics(norm)
    average_statistics(norm)
    assert statistics(norm) == before
