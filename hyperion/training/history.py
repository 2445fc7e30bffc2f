"""What a training run leaves behind: the loss of every step, one record an epoch, and one of each rank's part of it."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import torch


@dataclass(frozen=True)
class EpochRecord:
    """One pass over the training data (the last one may be cut short by the planned number of steps), of all ranks
    together or of one rank's part.

    Attributes:
        epoch: from 1.
        step: optimizer steps of the whole run when it ended.
        steps: optimizer steps of this epoch.
        loss: mean of the steps' training losses, nats per token or image.
        learning_rate: of its last step.
        items: tokens or images that were trained on, padding not counted.
        time_s: wall time of the timed steps, loading included, evaluation and checkpoints not; the device was
            synchronised at both ends.
        timed_steps: steps within time_s: all but the first ones of a process, which warm up.
        items_per_s: items of the timed steps per second; None when no step was timed.
        peak_memory_metric: 'peak_memory_gib' (tensors on an accelerator) or 'peak_rss_gib' (the whole process on a
            CPU).
        peak_memory_gib: the peak over the epoch's steps; None when this system cannot tell.
        evaluation: numbers of the held-out split after the epoch, None when the plan has none here; all ranks'.
        waited_s: seconds of time_s for which the loop waited for the loader; on an accelerator the host's, which may pass
            while the device still works.
        rank: whose part this is: losses, items and times of this rank alone, since it last began with another number
            of ranks. None for all ranks together: their global losses, all their items, the time and the memory of the
            rank that took most.
    """

    epoch: int
    step: int
    steps: int
    loss: float
    learning_rate: float
    items: int
    time_s: float
    timed_steps: int
    items_per_s: float | None
    peak_memory_metric: str
    peak_memory_gib: float | None
    evaluation: dict[str, float] | None
    rank: int | None = None
    waited_s: float = 0.0

    @property
    def waiting_share(self) -> float | None:
        """Share of the timed steps spent waiting for the loader; None when no step was timed."""
        return self.waited_s / self.time_s if self.timed_steps else None


@dataclass
class History:
    """All epochs of a run, also those before it was interrupted and resumed; the same on every rank.

    Attributes:
        item: 'token' or 'image'.
        losses: training loss of each optimizer step, of the whole batch.
        epochs: one record an epoch.
        resumed_at: steps at which the run was resumed from a checkpoint.
        rank_epochs: one record an epoch and rank, in this order. Where the ranks' parts hold equally many items in each
            step, an epoch's loss is mean_over_ranks of its records.
    """

    item: str
    losses: list[float] = field(default_factory=list)
    epochs: list[EpochRecord] = field(default_factory=list)
    resumed_at: list[int] = field(default_factory=list)
    rank_epochs: list[EpochRecord] = field(default_factory=list)

    def add_epoch(
        self, parts: Sequence[EpochRecord], loss: float, earlier_items: int, evaluation: dict[str, float] | None
    ) -> EpochRecord:
        """Add an epoch from the records of all ranks.

        Args:
            loss: mean of the steps' global losses.
            earlier_items: items of the epoch that no rank's record holds, because another number of ranks saw them.

        Returns:
            The record of all ranks together.
        """
        self.rank_epochs.extend(parts)
        time_s = max(part.time_s for part in parts)
        rates = [None if part.items_per_s is None else part.items_per_s * (part.time_s / time_s) for part in parts]
        peaks = [part.peak_memory_gib for part in parts]
        whole = replace(
            parts[0],
            rank=None,
            steps=parts[0].step - (self.epochs[-1].step if self.epochs else 0),
            loss=loss,
            items=earlier_items + sum(part.items for part in parts),
            time_s=time_s,
            waited_s=max(part.waited_s for part in parts),
            items_per_s=None if None in rates else math.fsum(rates),
            peak_memory_gib=None if None in peaks else max(peaks),
            evaluation=evaluation,
        )
        self.epochs.append(whole)
        return whole

    def state_dict(self) -> dict:
        """For a checkpoint; the losses keep every bit."""
        return {
            "item": self.item,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "epochs": [asdict(record) for record in self.epochs],
            "resumed_at": self.resumed_at,
            "rank_epochs": [asdict(record) for record in self.rank_epochs],
        }

    @classmethod
    def from_state_dict(cls, state: dict) -> "History":
        """The history that state_dict described."""
        epochs, rank_epochs = ([EpochRecord(**record) for record in state[key]] for key in ("epochs", "rank_epochs"))
        return cls(state["item"], state["losses"].tolist(), epochs, list(state["resumed_at"]), rank_epochs)


def mean_over_ranks(parts: Sequence[EpochRecord]) -> float:
    """Mean loss of the ranks' records of one epoch, each weighted with its items."""
    return math.fsum(part.loss * part.items for part in parts) / sum(part.items for part in parts)
