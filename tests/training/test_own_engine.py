"""Engines of a user's own: what their methods return is checked in the first step, and their errors name the method."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.training import LanguageEngine, Precision, TorchEngine, TrainingPlan, train
from hyperion.training.memory_estimate import estimate_memory

CPU, FP32 = detect_cpu(), Precision("fp32", "test")
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
BATCH = {"x": X, "y": X[:, :1]}


def count(batch):
    return torch.full((), len(batch["x"]), dtype=torch.int64)


def squares(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"], reduction="none")


class Reg(TorchEngine):
    """A regression whose loss and count are those of two functions."""

    item = "sample"

    def __init__(self, loss=lambda model, batch: squares(model, batch).sum(), items=count, model=None, optimizer=None, **options):
        model = model or nn.Linear(8, 1)
        self.loss, self.items = loss, items
        super().__init__(model, optimizer or torch.optim.SGD(model.parameters(), 0.1), lambda step: 0.1, FP32, CPU, **options)

    def check_batch(self, batch):
        pass

    def count_items(self, batch):
        return self.items(batch)

    def summed_loss(self, batch):
        return self.loss(self.model, batch)

    def evaluate(self, batches):
        return {"loss": float(torch.cat([squares(self.model, batch).detach() for batch in batches]).mean())}


LOSSES = {
    "one loss per item": (squares, r"float32 \[4, 1\], and", "losses.sum()"),
    "a number": (lambda *given: squares(*given).sum().item(), "the loss is a float, and", "without .item()"),
    "a dict": (lambda *given: {"loss": squares(*given).sum()}, "the loss is a dict, and", "as a tensor"),
    "detached": (lambda *given: squares(*given).sum().detach(), r"float32 \[\] without gradient", "without detach()"),
    "an integer": (lambda *given: squares(*given).sum().long(), r"int64 \[\]", "the sum over all items"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_is_no_scalar_with_gradient_is_refused(case):
    loss, what, next_step = LOSSES[case]
    with pytest.raises(HyperionError, match=what) as caught:
        Reg(loss).train_step(BATCH)
    assert caught.value.where == "Reg.summed_loss" and next_step in caught.value.next_step


@pytest.mark.parametrize("mean", [F.mse_loss, F.huber_loss, lambda outputs, y: F.cross_entropy(outputs, y[:, 0].long() * 0)])
def test_a_mean_of_a_loss_function_is_refused_in_the_first_step(mean):
    engine = Reg(lambda model, batch: mean(model(batch["x"]), batch["y"]))
    weights = engine.model.weight.clone()
    with pytest.raises(HyperionError, match="the loss is a mean, computed by .*Loss.*Backward0") as caught:
        engine.train_step(BATCH)
    assert caught.value.where == "Reg.summed_loss" and "reduction='sum'" in caught.value.next_step
    assert engine.steps == 0 and torch.equal(engine.model.weight, weights)


def test_a_mean_over_a_batch_that_counts_as_one_item_is_accepted():
    engine = Reg(lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]), lambda batch: torch.ones((), dtype=torch.int64))
    mean = squares(engine.model, BATCH).mean().item()
    assert float(engine.train_step(BATCH).loss) == mean


COUNTS = {
    "float": (lambda batch: count(batch).float(), r"float32 \[\]"),
    "mask": (lambda batch: torch.ones((), dtype=torch.bool), r"bool \[\]"),
    "vector": (lambda batch: torch.ones(4, dtype=torch.int64), r"int64 \[4\]"),
    "Python number": (lambda batch: len(batch["x"]), "a int"),
    "0": (lambda batch: torch.zeros((), dtype=torch.int64), "the number of items in the first batch is 0"),
}


@pytest.mark.parametrize("case", COUNTS)
def test_a_count_that_is_no_positive_integer_is_refused(case):
    items, what = COUNTS[case]
    with pytest.raises(HyperionError, match=what) as caught:
        Reg(items=items).train_step(BATCH)
    assert caught.value.where == "Reg.count_items" and caught.value.next_step


def test_an_error_of_a_users_method_names_the_method_the_step_and_the_batch():
    engine = Reg()
    engine.train_step(BATCH)
    with pytest.raises(KeyError) as caught:
        engine.train_step({"inputs": [X, X.long()], "source": "web"})
    (note,) = caught.value.__notes__
    assert note == "raised in Reg.count_items, step 2, batch {inputs: (float32 [4, 8], int64 [4, 8]), source: str}"


@dataclass
class Pair:
    x: Tensor
    y: Tensor


@pytest.mark.parametrize(
    ("batch", "form"),
    [(Pair(X, X), "Pair"), ({"x": X, "y": X[:2]}, r"\{x: .* \[4, 8\], y: .* \[2, 8\]\}"), ({"x": X, "n": 3}, r".*n: int")],
)
def test_a_batch_that_cannot_be_split_is_refused(batch, form):
    def items(batch):
        return torch.ones((), dtype=torch.int64)

    with pytest.raises(HyperionError, match=f"the batch {form}.* cannot be split into 2 parts"):
        Reg(items=items, micro_batches=2).train_step(batch)


PARTS = {
    "class of an optimizer": (lambda m: {"optimizer": torch.optim.AdamW}, "the optimizer is the class AdamW"),
    "LBFGS": (lambda m: {"optimizer": torch.optim.LBFGS(m.parameters())}, "LBFGS.step needs a closure"),
    "frozen model": (
        lambda m: {"optimizer": torch.optim.SGD(m.requires_grad_(False).parameters())},
        "no parameter of the Linear",
    ),
    "model elsewhere": (
        lambda m: {"model": m.to("meta"), "optimizer": torch.optim.SGD(m.parameters())},
        "the parameter weight is on meta, but the engine computes on cpu",
    ),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_that_no_step_can_use_are_refused_at_once(case):
    make, what = PARTS[case]
    model = nn.Linear(8, 1)
    with pytest.raises(HyperionError, match=what) as caught:
        Reg(**{"model": model} | make(model))
    assert caught.value.where == "Reg" and caught.value.next_step


class OnlyInputs(nn.Embedding):
    def forward(self, inputs_BT):
        return super().forward(inputs_BT).sum(dim=-1)


def test_a_language_model_that_takes_no_targets_is_refused_with_its_signature():
    model = OnlyInputs(9, 4)
    engine = LanguageEngine(model, torch.optim.SGD(model.parameters()), lambda step: 0.1, FP32, CPU)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(HyperionError, match=r"OnlyInputs.forward\(inputs_BT\) does not take \(inputs_BT, targets_BT\)"):
        engine.train_step((tokens, tokens))


def test_a_validation_that_is_used_up_is_refused():
    held_out = iter([BATCH])
    with pytest.raises(HyperionError, match="validation returned no batches") as caught:
        train(Reg(), [BATCH], TrainingPlan(epochs=2), validation=lambda: held_out)
    assert caught.value.where == "evaluation after step 2" and "new" in caught.value.next_step


def test_an_error_of_a_users_evaluation_names_the_method():
    engine = Reg()
    with pytest.raises(KeyError) as caught:
        train(engine, [BATCH], TrainingPlan(steps=1), validation=lambda: [{"inputs": X}])
    assert caught.value.__notes__ == ["raised in Reg.evaluate, after step 1"]


READS = {
    "item()": lambda model, batch: squares(model, batch).sum() * squares(model, batch).sum().item(),
    "nonzero()": lambda model, batch: squares(model, {key: t[(t[:, 0] > 0).nonzero()[:, 0]] for key, t in batch.items()}).sum(),
    "mask": lambda model, batch: model(batch["x"])[batch["y"] > 0].sum(),
}


@pytest.mark.parametrize("case", READS)
def test_an_estimate_of_a_step_that_reads_a_value_is_refused(case):
    def make(device):
        return Reg(READS[case]), {"x": torch.randn(4, 8), "y": torch.randn(4, 1)}

    with pytest.raises(HyperionError, match="this step reads the value of a tensor") as caught:
        estimate_memory(make, CPU)
    assert "hyperion.measure.memory(" in caught.value.next_step


@pytest.mark.parametrize("made", [None, (1, 2, 3)])
def test_an_estimate_of_something_else_than_an_engine_and_a_batch_is_refused(made):
    with pytest.raises(HyperionError, match=f"make returned a {type(made).__name__}, and not a pair"):
        estimate_memory(lambda device: made, CPU)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([BATCH])


def test_a_validation_loader_of_unknown_length_is_evaluated():
    loader = torch.utils.data.DataLoader(Stream(), batch_size=None)
    history = train(Reg(), [BATCH], TrainingPlan(epochs=2), validation=lambda: loader)
    assert all(record.evaluation["loss"] > 0 for record in history.epochs)
