"""The self-marking exercise of chapter 2.2: check training loops, one correct and four with common faults."""

from collections.abc import Callable, Sequence
from typing import cast

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.chapter.exercises import mutation_score

Batch = tuple[Tensor, Tensor]


class Loop:
    """Four decisions of a training loop on which the meaning of its numbers depends."""

    def pairs(self, tokens_BT: Tensor) -> Batch:
        """Return inputs and targets [B, T - 1] for a model that predicts the next token at each position."""
        return tokens_BT[:, :-1], tokens_BT[:, 1:]

    def accumulate(self, model: nn.Module, parts: Sequence[Batch]) -> None:
        """Add the gradient of the mean loss over all examples of all parts to the parameters' `.grad`.

        Args:
            model: inputs [B, ...] to logits [B, classes].
            parts: (inputs, targets [B]), not all of the same length.
        """
        examples = sum(len(targets) for _, targets in parts)
        for inputs, targets in parts:
            (F.cross_entropy(model(inputs), targets, reduction="sum") / examples).backward()

    def evaluate(self, model: nn.Module, batches: Sequence[Batch]) -> float:
        """Return the mean loss over all examples in evaluation mode; the model is in training mode before and after."""
        model.eval()
        with torch.no_grad():
            losses = [F.cross_entropy(model(inputs), targets, reduction="none") for inputs, targets in batches]
        model.train()
        return torch.cat(losses).mean().item()

    def choose(self, epochs: Sequence[dict[str, float]]) -> int:
        """Return the epoch whose model to report, from the losses of each epoch: {"valid": ..., "test": ...}."""
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
    """Judge a check of training loops.

    Args:
        my_check: takes a Loop, returns True when each of its four methods does what its docstring says.
    """
    mutants = {
        "targets are not shifted: the model copies": _Unshifted(),
        "accumulation averages the parts' means": _MeanOfMeans(),
        "evaluation in training mode": _TrainMode(),
        "the epoch is chosen by the test set": _ChosenByTest(),
    }
    return mutation_score(cast(Callable[[object], bool], my_check), Loop(), mutants)
