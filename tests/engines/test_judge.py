"""The judge names every planted unfairness, and accepts equal work."""

import json
from dataclasses import replace

import pytest
import torch

from hyperion.engines import Record, Work, plain, planted, unequal
from hyperion.engines.observer import Observer
from hyperion.engines.planted import PLANTED
from hyperion.processes import process_group

pytestmark = pytest.mark.slow
# Other weights or rows also change the first loss and the first gradient.
CONSEQUENCES = {"first loss", "gradient scale"}
FURTHER = {
    "loss is a sum": ("gradient reduction",),
    "bf16 weights": ("initial state",),
    "one step less": ("data order", "tokens counted"),
    # The second update with the same gradients makes their norm at the optimizer larger than the limit.
    "one step more": ("gradient clipping",),
}


def observed(work: Work, folder, train, **options) -> Record:
    return Record.of(train(work, Observer(work, "test", (), folder), **options))


@pytest.fixture(scope="module")
def reference(tiny_work, tmp_path_factory) -> Record:
    return observed(tiny_work, tmp_path_factory.mktemp("reference"), plain.train)


@pytest.fixture(scope="module")
def shifted(tiny_work) -> dict[int, float]:
    return plain.first_losses(tiny_work)


@pytest.mark.parametrize("unfairness", PLANTED)
def test_each_planted_unfairness_is_named(unfairness, tiny_work, tmp_path, reference, shifted):
    with process_group():
        record = observed(tiny_work, tmp_path, planted.train, unfairness=unfairness)
    names = {difference.name for difference in unequal(tiny_work, record, reference, shifted)}
    assert names - CONSEQUENCES == {PLANTED[unfairness], *FURTHER.get(unfairness, ())}


def test_the_clean_twin_is_equal_work(tiny_work, tmp_path, reference, shifted):
    record = observed(tiny_work, tmp_path, planted.train, unfairness="")
    assert unequal(tiny_work, record, reference, shifted) == []
    assert record.losses == reference.losses


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({}, None),
        ({"amsgrad": None, "decoupled_weight_decay": None}, None),  # a record of an earlier version
        ({"optimizer": "torch.optim.adam.Adam"}, None),  # its option says that the decay is decoupled
        ({"optimizer": "torch.optim.adam.Adam", "decoupled_weight_decay": None}, "torch.optim.adam.Adam of unknown weight decay"),
        ({"decoupled_weight_decay": False}, "torch.optim.adamw.AdamW with L2 in the gradient"),
        ({"optimizer": "deepspeed.ops.adam.fused_adam.FusedAdam"}, None),
        ({"optimizer": "torch.optim.sgd.SGD"}, "torch.optim.sgd.SGD"),
        ({"amsgrad": True}, "torch.optim.adamw.AdamW with AMSGrad"),
    ],
)
def test_other_implementations_of_the_optimizer_are_equal_and_other_algorithms_are_not(changes, seen, tiny_work, reference):
    record = replace(reference, groups=[replace(group, **changes) for group in reference.groups])
    found = [str(difference) for difference in unequal(tiny_work, record, reference)]
    assert found == ([] if seen is None else [f"optimizer: {seen} instead of AdamW"])


# Optimizers of PyTorch that can update every tensor of a Llama without a closure, by the options that they need.
OPTIMIZERS: dict[str, dict] = {
    "SGD": {},
    "Adagrad": {},
    "Adadelta": {},
    "Adafactor": {},  # eps is a pair, and there are no betas
    "RMSprop": {},
    "Rprop": {"weight_decay": False},
    "ASGD": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "Adam": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_other_optimizer_is_named_and_none_ends_the_run(name, tiny_work, tmp_path, reference, monkeypatch):
    def other(work: Work, model, **how) -> torch.optim.Optimizer:
        groups = work.parameter_groups(model)
        if OPTIMIZERS[name].get("weight_decay") is False:
            groups = [{"params": group["params"]} for group in groups]
        return getattr(torch.optim, name)(groups, lr=work.learning_rate)

    monkeypatch.setattr(Work, "adamw", other)
    record = Record.of(json.loads(json.dumps(observed(tiny_work, tmp_path, plain.train).as_dict())))
    assert record.optimizer_steps == tiny_work.steps
    found = {difference.name: difference for difference in unequal(tiny_work, record, reference)}
    assert found["optimizer"].seen.startswith("torch.optim.") and f".{name}" in found["optimizer"].seen
    assert found["optimizer"].expected == "AdamW"
    assert set(found) <= {"optimizer", "betas", "eps", "weight decay"}  # options that the other optimizer has with other values


def test_an_optimizer_that_computes_its_own_rate_is_named(tiny_work, tmp_path, reference, monkeypatch):
    from transformers.optimization import Adafactor

    monkeypatch.setattr(Work, "adamw", lambda work, model: Adafactor(work.parameter_groups(model)))  # its rate is None
    record = observed(tiny_work, tmp_path, plain.train)
    named = {difference.name: str(difference) for difference in unequal(tiny_work, record, reference)}
    assert named["optimizer"] == "optimizer: transformers.optimization.Adafactor instead of AdamW"
    assert {group.learning_rates for group in record.groups} == {()} and {group.betas for group in record.groups} == {()}


def test_a_norm_that_was_not_measured_in_a_later_step_is_no_difference(tiny_work, reference):
    record = replace(reference, norms=[*reference.norms[:2], None, None])
    assert unequal(tiny_work, record, reference) == []
    (found,) = unequal(tiny_work, replace(record, norms=[*reference.norms[:2], None, 1e-3]), reference)
    assert str(found).startswith("later gradients: norm 0.001 in step 4")


@pytest.mark.parametrize(
    ("factors", "names"),
    [
        ((1.015, 1.015, 1.015, 1.015), []),
        ((1.03, 1.0, 1.0, 1.0), ["gradient scale"]),
        ((1.0, 1.0, 1.03, 1.0), ["later gradients"]),
        ((1.0, 0.97, 1.0, 1.0), ["later gradients"]),
    ],
)
def test_norms_of_fp32_differ_by_at_most_two_percent(factors, names, tiny_work, reference):
    norms = [factor * norm for factor, norm in zip(factors, reference.norms, strict=True)]
    assert [difference.name for difference in unequal(tiny_work, replace(reference, norms=norms), reference)] == names


@pytest.mark.parametrize(
    ("factor", "names"), [(1.04, []), (1.1, ["no decay on matrices"]), (0.96, []), (0.9, ["decay on norms"])]
)
def test_elements_without_decay_differ_by_at_most_their_padding(factor, names, tiny_work, reference):
    def padded(factor: float) -> Record:
        sizes = {False: factor * 1e6, True: 1e9}  # so many elements have decay that the others hardly change the sum
        groups = [replace(group, elements=sizes[group.weight_decay > 0]) for group in reference.groups]
        return replace(reference, groups=groups)

    found = unequal(tiny_work, padded(factor), padded(1.0))
    assert [difference.name for difference in found] == names


@pytest.mark.parametrize(("factor", "names"), [(1.04, []), (0.96, []), (1.1, ["updated elements"]), (0.9, ["updated elements"])])
def test_updated_elements_differ_by_at_most_their_padding(factor, names, tiny_work, reference):
    groups = [replace(group, elements=factor * group.elements) if group.weight_decay else group for group in reference.groups]
    padded, exact = replace(reference, groups=groups), reference
    assert [difference.name for difference in unequal(tiny_work, padded, exact)] == names


@pytest.mark.parametrize(("factor", "names"), [(1 + 5e-6, []), (1 + 3e-5, ["first loss"]), (1 - 3e-5, ["first loss"])])
def test_the_first_loss_of_fp32_differs_by_rounding_only(factor, names, tiny_work, reference):
    losses = [factor * reference.losses[0], *reference.losses[1:]]
    assert [difference.name for difference in unequal(tiny_work, replace(reference, losses=losses), reference)] == names


def test_a_label_shift_is_seen_in_bf16_too(tiny_work, tmp_path):
    work = replace(tiny_work, dtype="bf16")
    reference, shifted = observed(work, tmp_path / "reference", plain.train), plain.first_losses(work)
    with process_group():
        for unfairness in ("", "labels not shifted", "labels shifted twice"):
            record = observed(work, tmp_path / "planted", planted.train, unfairness=unfairness)
            names = {difference.name for difference in unequal(work, record, reference, shifted)}
            assert names - CONSEQUENCES == ({"label shift"} if unfairness else set())
            assert ("first loss" in {difference.name for difference in unequal(work, record, reference)}) == bool(unfairness)


@pytest.mark.parametrize("series", ["losses", "norms", "clipped_norms"])
def test_numbers_that_are_not_finite_are_named(series, tiny_work, reference):
    values = [*getattr(reference, series)]
    values[2] = float("nan")
    found = unequal(tiny_work, replace(reference, **{series: values}), reference)
    assert [difference.name for difference in found] == ["not finite"] and "in step 3" in found[0].seen


@pytest.mark.parametrize(("elements", "names"), [(16, []), (17, ["reduction dtype"])])
def test_only_small_reductions_have_another_dtype(elements, names, tiny_work, reference):
    record = replace(reference, reduced={"bfloat16": elements, "float32": 1000})
    assert [difference.name for difference in unequal(tiny_work, record, reference)] == names


def test_equal_work_with_other_rounding_is_accepted(tiny_work, tmp_path, reference, shifted):
    whole = replace(tiny_work, micro_batches=1)
    record = observed(whole, tmp_path, plain.train, fused=True, foreach=False)
    assert record.losses != reference.losses
    assert unequal(tiny_work, record, reference, shifted) == []


def test_the_record_states_what_the_run_did(tiny_work, reference):
    assert reference.rows == [list(range(4 * step, 4 * step + 4)) for step in range(4)]
    assert reference.counted_tokens == 4 * 4 * 16 and reference.optimizer_steps == 4
    decayed, others = reference.groups
    model = tiny_work.load_model()
    assert decayed.elements == sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert others.elements == sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert decayed.amsgrad is False and decayed.decoupled_weight_decay is True
    assert decayed.dtype == "float32" and decayed.betas == (0.9, 0.95) and decayed.learning_rates == (1e-3,)
    assert all(norm <= 1.0001 for norm in reference.clipped_norms) and reference.norms[0] > 1
    assert reference.reduced == {}
    assert torch.isfinite(torch.tensor(reference.losses)).all()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("name", "option", "other"), [("weight decay", "weight_decay", 0.05), ("betas", "betas", (0.8, 0.95)), ("eps", "eps", 1e-6)]
)
def test_an_option_that_has_its_value_in_a_part_of_the_steps_only_is_named(
    name, option, other, late, tiny_work, tmp_path, monkeypatch
):
    """The last of the four steps has the right value and the others have another one, or the reverse (`late`)."""
    adamw = Work.adamw

    def scheduled(work: Work, model) -> torch.optim.Optimizer:
        optimizer = adamw(work, model)
        matrices = optimizer.param_groups[0]
        first, last = (matrices[option], other) if late else (other, matrices[option])
        values = iter([first, first, last])
        matrices[option] = first
        optimizer.register_step_post_hook(lambda *_: matrices.update({option: next(values, matrices[option])}))
        return optimizer

    reference = observed(tiny_work, tmp_path / "reference", plain.train)
    monkeypatch.setattr(Work, "adamw", scheduled)
    record = observed(tiny_work, tmp_path, plain.train)
    assert name in {difference.name for difference in unequal(tiny_work, record, reference)}
    assert sum(group.elements for group in record.groups) == sum(group.elements for group in reference.groups)
