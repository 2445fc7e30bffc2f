"""A batch taken in parts is the same step as the whole batch: every item weighs the same, whatever part it is in."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyperion.data.packing import IGNORE_INDEX
from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.training import LanguageEngine, Precision, TorchEngine, adamw

BATCH, LENGTH, VOCABULARY = 7, 6, 11


class Bigram(nn.Module):
    """Float64 throughout; the loss of each token, 0 where it is padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 8, dtype=torch.float64)
        self.head = nn.Linear(8, VOCABULARY, dtype=torch.float64)

    def forward(self, inputs_BT, targets_BT):
        logits = self.head(torch.tanh(self.embedding(inputs_BT)))
        nll = F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        return nll.view_as(targets_BT)


class MeanOfMeans(LanguageEngine):
    """The usual mistake: each part's mean weighs the same, however many items the part has."""

    def summed_loss(self, batch):
        whole = (self.batch[1] != IGNORE_INDEX).sum()
        return super().summed_loss(batch) / self.count_items(batch) * whole / self.micro_batches


def batch_of(step: int):
    """Rows with 6, 5, 4 ... targets, the rest padding."""
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].clone()
    for row in range(BATCH):
        targets[row, max(1, LENGTH - row) :] = IGNORE_INDEX
    return tokens[:, :-1].contiguous(), targets


def trained(micro_batches: int, kind: type[TorchEngine] = LanguageEngine):
    """Weights and metrics of three steps."""
    model = Bigram()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False)
    engine = kind(
        model, optimizer, lambda step: 1e-2, Precision("fp32", "no autocast"), detect_cpu(), 0.1, micro_batches=micro_batches
    )
    metrics_of_steps = []
    for step in range(3):
        engine.batch = batch_of(step)
        metrics = engine.train_step(engine.batch)
        metrics_of_steps += [metrics.loss, metrics.gradient_norm, metrics.rank_loss, metrics.items.double()]
    return torch.cat([p.detach().flatten() for p in model.parameters()]), torch.stack(metrics_of_steps), engine.tokens_seen


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_parts_make_the_step_of_the_whole_batch(parts):
    weights, metrics_of_steps, seen = trained(1)
    found, also, same = trained(parts)
    torch.testing.assert_close(found, weights, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(also, metrics_of_steps, rtol=1e-12, atol=1e-14)
    assert same == seen == 3 * (6 + 5 + 4 + 3 + 2 + 1 + 1)


def test_a_mean_of_means_is_another_step():
    assert (trained(3, MeanOfMeans)[0] - trained(1)[0]).abs().max() > 1e-4


def test_there_is_one_update_a_batch_whatever_the_parts():
    model = Bigram()
    optimizer = adamw(model, 1e-2)
    engine = LanguageEngine(model, optimizer, lambda step: 1e-2, Precision("fp32", "test"), detect_cpu(), micro_batches=7)
    engine.train_step(batch_of(0))
    assert {int(state["step"]) for state in optimizer.state.values()} == {1} == {engine.steps}


def test_more_parts_than_examples_are_refused():
    with pytest.raises(HyperionError, match="7 examples cannot be split into 8 parts"):
        trained(8)
