"""Exercise for chapter 2.2: write a check that accepts a correct training loop and rejects four faulty ones."""

import math
from collections.abc import Callable, Sequence
from typing import cast

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.chapter.exercises import Question, mutation_score

NATS_BELOW_THE_FLOOR = Question(math.log(200) - 3.9, "the lowest possible loss is the entropy of the tokens, ln 200")

Batch = tuple[Tensor, Tensor]


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
