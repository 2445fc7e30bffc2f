"""The exercise of chapter 2.2 on training loops that mark themselves: one sound loop, and four broken the ways loops break."""

from collections.abc import Callable, Sequence

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.chapter.exercises import mutation_score

Batch = tuple[Tensor, Tensor]


class Loop:
    """The four decisions of a training loop that decide whether its numbers mean anything."""

    def pairs(self, tokens_BT: Tensor) -> Batch:
        """Inputs and targets [B, T - 1] for a model that predicts the token after each one it has read."""
        return tokens_BT[:, :-1], tokens_BT[:, 1:]

    def accumulate(self, model: nn.Module, parts: Sequence[Batch]) -> None:
        """Leave in the parameters' `.grad` the gradient of the mean loss over all examples of all parts.

        Args:
            model: inputs [B, ...] to logits [B, classes].
            parts: (inputs, targets [B]), not all of the same length.
        """
        examples = sum(len(targets) for _, targets in parts)
        for inputs, targets in parts:
            (F.cross_entropy(model(inputs), targets, reduction="sum") / examples).backward()

    def evaluate(self, model: nn.Module, batches: Sequence[Batch]) -> float:
        """Mean loss over all examples, of the model as it would be used; it is in training mode before and after."""
        model.eval()
        with torch.no_grad():
            losses = [F.cross_entropy(model(inputs), targets, reduction="none") for inputs, targets in batches]
        model.train()
        return torch.cat(losses).mean().item()

    def choose(self, epochs: Sequence[dict[str, float]]) -> int:
        """Which epoch's model to report, from the losses of each: {"valid": ..., "test": ...}."""
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
    return mutation_score(my_check, Loop(), mutants)
