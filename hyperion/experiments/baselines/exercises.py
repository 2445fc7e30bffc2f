"""Exercises for chapter 2.2: checks that accept a correct model or training loop, and reject faulty ones."""

import math
from collections.abc import Callable, Sequence
from typing import cast

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.chapter.exercises import Question, mutation_score
from hyperion.models import TransformerConfig, TransformerLM

NATS_BELOW_THE_FLOOR = Question(math.log(200) - 3.9, "the lowest possible loss is the entropy of the tokens, ln 200")

Batch = tuple[Tensor, Tensor]


class _UnmaskedLM(nn.Module):
    """A TransformerLM that sees the future: each output position also depends on the mean over the whole sequence."""

    def __init__(self, model: TransformerLM):
        super().__init__()
        self.model = model

    def forward(self, inputs_BT: Tensor) -> Tensor:
        logits_BTV = self.model(inputs_BT)
        return logits_BTV + logits_BTV.mean(dim=1, keepdim=True)


class _ShiftedLM(_UnmaskedLM):
    """A model whose logits are shifted by one position: the logits at position t depend on the token at t + 1."""

    def forward(self, inputs_BT: Tensor) -> Tensor:
        return torch.roll(self.model(inputs_BT), shifts=-1, dims=1)


def judge_leak_check(my_check: Callable[[nn.Module], bool]) -> pd.DataFrame:
    """Test the reader's check of whether a language model can see future tokens.

    Args:
        my_check: function that takes a model and returns True if the logits at position t do not depend on any token after t. The
            model maps int64 ids of shape (B, 16), with a vocabulary of 32, to logits of shape (B, 16, 32).

    Returns:
        The table of `mutation_score`.
    """
    torch.manual_seed(0)
    # Without dropout, the logits of a correct model depend only on its inputs.
    model = TransformerLM(TransformerConfig(vocab_size=32, context=16, width=32, heads=2, layers=1)).eval()
    return mutation_score(
        my_check, model, {"attention without a mask": _UnmaskedLM(model), "logits shifted by one position": _ShiftedLM(model)}
    )


class Loop:
    """A correct training loop, reduced to four methods. A mistake in any of them changes the reported losses."""

    def pairs(self, tokens_BT: Tensor) -> Batch:
        """Return (inputs, targets), each of shape [B, T - 1], for a model that predicts the next token at each position.

        Args:
            tokens_BT: token ids of shape [B, T].
        """
        return tokens_BT[:, :-1], tokens_BT[:, 1:]

    def accumulate(self, model: nn.Module, parts: Sequence[Batch]) -> None:
        """Add the gradient of the mean loss over all examples of all parts to each parameter's `.grad`.

        Args:
            model: model that maps inputs of shape [B, ...] to logits of shape [B, classes].
            parts: parts of a batch, as pairs of inputs [B, ...] and targets [B]. B may differ between parts.
        """
        examples = sum(len(targets) for _, targets in parts)
        for inputs, targets in parts:
            (F.cross_entropy(model(inputs), targets, reduction="sum") / examples).backward()

    def evaluate(self, model: nn.Module, batches: Sequence[Batch]) -> float:
        """Return the mean loss over all examples of all batches, computed in evaluation mode.

        The model is in training mode before and after the call.
        """
        model.eval()
        with torch.no_grad():
            losses = [F.cross_entropy(model(inputs), targets, reduction="none") for inputs, targets in batches]
        model.train()
        return torch.cat(losses).mean().item()

    def choose(self, epochs: Sequence[dict[str, float]]) -> int:
        """Return the index of the epoch whose model is reported.

        Args:
            epochs: the losses of each epoch on the validation and test splits: {"valid": loss, "test": loss}.
        """
        return min(range(len(epochs)), key=lambda epoch: epochs[epoch]["valid"])


class _Unshifted(Loop):
    def pairs(self, tokens_BT: Tensor) -> Batch:
        return tokens_BT[:, :-1], tokens_BT[:, :-1]


class _MeanOfMeans(Loop):
    def accumulate(self, model: nn.Module, parts: Sequence[Batch]) -> None:
        for inputs, targets in parts:
            (F.cross_entropy(model(inputs), targets) / len(parts)).backward()


class _TrainMode(Loop):
    def evaluate(self, model: nn.Module, batches: Sequence[Batch]) -> float:
        with torch.no_grad():
            return torch.cat([F.cross_entropy(model(x), y, reduction="none") for x, y in batches]).mean().item()


class _ChosenByTest(Loop):
    def choose(self, epochs: Sequence[dict[str, float]]) -> int:
        return min(range(len(epochs)), key=lambda epoch: epochs[epoch]["test"])


def judge_loop_check(my_check: Callable[[Loop], bool]) -> pd.DataFrame:
    """Test the reader's check of training loops: it must accept `Loop` and reject four faulty loops.

    Args:
        my_check: function that takes a Loop and returns True if each of its four methods does what its docstring says.
    """
    mutants = {
        "targets not shifted: the model only has to copy": _Unshifted(),
        "accumulation averages the means of the parts": _MeanOfMeans(),
        "evaluation in training mode": _TrainMode(),
        "the epoch is chosen by the test set": _ChosenByTest(),
    }
    return mutation_score(cast(Callable[[object], bool], my_check), Loop(), mutants)
