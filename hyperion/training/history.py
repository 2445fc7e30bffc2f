"""What a training run leaves behind: the loss of every step and one record an epoch."""

from dataclasses import asdict, dataclass, field

import torch


@dataclass(frozen=True)
class EpochRecord:
    """One pass over the training data (the last one may be cut short by the planned number of steps).

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
        evaluation: numbers of the held-out split after the epoch, None when the plan has none here.
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


@dataclass
class History:
    """All epochs of a run, also those before it was interrupted and resumed.

    Attributes:
        item: 'token' or 'image'.
        losses: training loss of each optimizer step.
        epochs: one record an epoch.
        resumed_at: steps at which the run was resumed from a checkpoint.
    """

    item: str
    losses: list[float] = field(default_factory=list)
    epochs: list[EpochRecord] = field(default_factory=list)
    resumed_at: list[int] = field(default_factory=list)

    def state_dict(self) -> dict:
        """For a checkpoint; the losses keep every bit."""
        return {
            "item": self.item,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "epochs": [asdict(record) for record in self.epochs],
            "resumed_at": self.resumed_at,
        }

    @classmethod
    def from_state_dict(cls, state: dict) -> "History":
        """The history that state_dict described."""
        epochs = [EpochRecord(**record) for record in state["epochs"]]
        return cls(state["item"], state["losses"].tolist(), epochs, list(state["resumed_at"]))
