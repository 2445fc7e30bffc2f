"""The short training of a language model that the parity, resharding and failure experiments repeat and compare."""

import numpy as np

from hyperion.chapter.context import Context
from hyperion.chapter.ranks import RankOptions, ranks_of
from hyperion.workloads.recipes import Recipe, Strategy


class ShortTrainingOptions(RankOptions):
    """Options of the three experiments.

    Args:
        model: configuration of a TransformerLM by name.
        sequence_length: tokens of one example.
        batch_size: examples of one step, over all ranks together.
        learning_rate: largest learning rate.
    """

    model: str
    sequence_length: int
    batch_size: int
    learning_rate: float

    def rank_count(self, context: Context) -> int:
        """Return the number of ranks, see `ranks_of`."""
        return ranks_of(context, self, self.batch_size)

    def recipe(self, strategy: Strategy, steps: int, checkpoint_every: int | None = None) -> Recipe:
        """Return a recipe in float32, in which a parity check is strict, without evaluation."""
        return Recipe(
            task="language",
            model=self.model,
            strategy=strategy,
            precision="fp32",
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            steps=steps,
            learning_rate=self.learning_rate,
            weight_decay=0.1,
            evaluation_batches=0,
            checkpoint_every=checkpoint_every,
        )


def largest_relative_difference(losses: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest relative difference between two loss curves, step by step."""
    return float(np.max(np.abs(losses / expected - 1)))
