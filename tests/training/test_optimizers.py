import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyperion.errors import HyperionError
from hyperion.models import TransformerConfig, TransformerLM, resnet18
from hyperion.training import WarmupCosine, adamw, decay_groups, sgd_nesterov


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


def test_the_corners():
    rate = WarmupCosine(peak=1.0, warmup_steps=10, total_steps=110, final_fraction=0.2)
    assert rate(1) == pytest.approx(0.1)
    assert rate(10) == 1.0
    assert rate(60) == pytest.approx(0.6)
    assert rate(110) == rate(500) == pytest.approx(0.2)


def test_without_warm_up_the_first_step_is_near_the_peak():
    assert WarmupCosine(1.0, 0, 1000)(1) == pytest.approx(1.0, abs=1e-4)


@given(warmup=st.integers(0, 50), extra=st.integers(1, 100), final=st.floats(0, 1))
def test_it_rises_then_falls_and_stays_in_range(warmup, extra, final):
    rate = WarmupCosine(2.0, warmup, warmup + extra, final)
    rates = [rate(step) for step in range(1, warmup + extra + 5)]
    assert all(0 <= value <= 2.0 for value in rates)
    top = max(warmup, 1) - 1
    assert rates[:top] == sorted(rates[:top])
    assert all(a >= b - 1e-12 for a, b in zip(rates[top:], rates[top + 1 :], strict=False))


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(HyperionError, match="warmup_steps 5"):
        WarmupCosine(1.0, 5, 5)
