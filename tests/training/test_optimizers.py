import torch

from hyperion.models import TransformerConfig, TransformerLM, resnet18
from hyperion.training import adamw, decay_groups, sgd_nesterov


def test_matrices_decay_and_vectors_do_not():
    model = TransformerLM(TransformerConfig(7, 4, 8, 2, 1))
    decayed, plain = decay_groups(model, 0.3)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {p.ndim for p in plain["params"]} == {1}
    assert {p.ndim for p in decayed["params"]} == {2}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out():
    model = resnet18(width=4)
    model.conv1.weight.requires_grad_(False)
    assert all(p is not model.conv1.weight for group in decay_groups(model, 0.1) for p in group["params"])


def test_the_kinds():
    model = resnet18(width=4)
    assert isinstance(adamw(model, 1e-3), torch.optim.AdamW)
    sgd = sgd_nesterov(model, 0.1)
    assert isinstance(sgd, torch.optim.SGD) and sgd.defaults["nesterov"] and sgd.defaults["momentum"] == 0.9
