"""The record of a training run: the loss of every step, and time, items and memory of every epoch, in total and per rank."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hyperion.hardware import Device
from hyperion.measure import PeakMemoryRegion

UNTIMED_STEPS = 3  # the first steps of a process allocate memory, choose kernels and fill caches


@dataclass(frozen=True)
class EpochRecord:
    """One pass over the training data, of all ranks together or of one rank. The plan may end the last one early.

    Attributes:
        epoch: number of the epoch, from 1.
        step: optimizer steps of the whole run at the end of the epoch.
        steps: optimizer steps of this epoch.
        loss: mean training loss of its steps, nats per token or image.
        learning_rate: of its last step.
        items: tokens or images trained on, without padding.
        time_s: wall time of the timed steps, including loading, without evaluation and checkpoints; the device is
            synchronised at both ends.
        timed_steps: steps in time_s: all except the first ones of a process, which warm up.
        items_per_s: items of the timed steps per second; None if no step was timed.
        peak_memory_metric: 'peak_memory_gib' (tensors on an accelerator) or 'peak_rss_gib' (the whole process on a
            CPU).
        peak_memory_gib: peak over the steps of the epoch; None if the system does not report it.
        evaluation: metrics of the held-out split after the epoch, None if it was not evaluated; the same on all ranks.
        waited_s: seconds of time_s in which the loop waited for the loader. On an accelerator this is time of the host;
            the device may be busy meanwhile.
        rank: the rank whose losses, items and times these are, since the run last changed its number of ranks. None for
            all ranks together: global losses, the sum of items, and time and memory of the rank with the largest.
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
        """Share of the timed steps spent waiting for the loader; None if no step was timed."""
        return self.waited_s / self.time_s if self.timed_steps else None


@dataclass
class History:
    """All epochs of a run, including those before an interruption; the same on every rank.

    Attributes:
        item: 'token' or 'image'.
        losses: training loss of each optimizer step, over the whole batch.
        epochs: one record per epoch.
        resumed_at: steps at which the run resumed from a checkpoint.
        rank_epochs: one record per epoch and rank, in this order. If all ranks have equally many items in each step, the
            loss of an epoch is mean_over_ranks of its records.
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
            parts: the records of all ranks.
            loss: mean of the global losses of the steps.
            earlier_items: items of the epoch in no rank's record, because another number of ranks trained on them.
            evaluation: metrics of the held-out split.

        Returns:
            The record of all ranks together.
        """
        self.rank_epochs.extend(parts)
        time_s = max(part.time_s for part in parts)
        rates = [part.items_per_s * (part.time_s / time_s) for part in parts if part.items_per_s is not None]
        peaks = [part.peak_memory_gib for part in parts if part.peak_memory_gib is not None]
        whole = replace(
            parts[0],
            rank=None,
            steps=parts[0].step - (self.epochs[-1].step if self.epochs else 0),
            loss=loss,
            items=earlier_items + sum(part.items for part in parts),
            time_s=time_s,
            waited_s=max(part.waited_s for part in parts),
            items_per_s=math.fsum(rates) if len(rates) == len(parts) else None,
            peak_memory_gib=max(peaks) if len(peaks) == len(parts) else None,
            evaluation=evaluation,
        )
        self.epochs.append(whole)
        return whole

    def state_dict(self) -> dict:
        """Return the state for a checkpoint; losses are stored bit for bit."""
        return {
            "item": self.item,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "epochs": [asdict(record) for record in self.epochs],
            "resumed_at": self.resumed_at,
            "rank_epochs": [asdict(record) for record in self.rank_epochs],
        }

    @classmethod
    def from_state_dict(cls, state: dict) -> "History":
        """Return the history that state_dict stored."""
        epochs, rank_epochs = ([EpochRecord(**record) for record in state[key]] for key in ("epochs", "rank_epochs"))
        return cls(state["item"], state["losses"].tolist(), epochs, list(state["resumed_at"]), rank_epochs)


def mean_over_ranks(parts: Sequence[EpochRecord]) -> float:
    """Return the mean loss of the ranks' records of one epoch, weighted by items."""
    return math.fsum(part.loss * part.items for part in parts) / sum(part.items for part in parts)


class EpochMeter:
    """Sums time, items and peak memory of an epoch's steps between start() and pause(), called any number of times.

    Args:
        warmed_up: True to time the first steps too, because this process has trained before.
    """

    def __init__(self, device: Device, warmed_up: bool = False):
        self.device = device
        self.untimed_left = 0 if warmed_up else UNTIMED_STEPS
        self.items: int | Tensor = 0
        self.timed_items: int | Tensor = 0
        self.timed_steps, self.time_s, self.waited_s = 0, 0.0, 0.0
        self.metric = ""
        self.gib: float | None = None
        self._region: PeakMemoryRegion | None = None
        self._since: float | None = None

    def start(self) -> None:
        """Start counting steps."""
        self._region = PeakMemoryRegion(self.device)
        self._region.__enter__()
        self._start_clock()

    def count(self, items: Tensor) -> None:
        """Count one step with `items` items."""
        self.items = self.items + items
        if self._since is not None:
            self.timed_items, self.timed_steps = self.timed_items + items, self.timed_steps + 1
        else:
            self.untimed_left -= 1
            self._start_clock()

    def waiting(self, batches: Iterable) -> Iterator:
        """Yield the batches, and add the time that the loop waits for each to `waited_s` once steps are timed."""
        batches = iter(batches)
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            if self._since is not None:
                self.waited_s += time.perf_counter() - started
            if batch is None:
                return
            yield batch

    def pause(self) -> None:
        """Wait for the device and stop counting; a second call does nothing."""
        if self._region is None:
            return
        self._region.__exit__(None, None, None)  # synchronises
        if self._since is not None:
            self.time_s += time.perf_counter() - self._since
        peak, self._region, self._since = self._region.peak, None, None
        self.metric = peak.metric
        self.gib = peak.gib if self.gib is None or peak.gib is None else max(self.gib, peak.gib)

    def results(self) -> dict[str, Any]:
        """Return the fields of EpochRecord that are measured here."""
        timed_items = int(self.timed_items)
        return {
            "items": int(self.items),
            "time_s": self.time_s,
            "waited_s": self.waited_s,
            "timed_steps": self.timed_steps,
            "items_per_s": timed_items / self.time_s if self.timed_steps else None,
            "peak_memory_metric": self.metric,
            "peak_memory_gib": self.gib,
        }

    def state_dict(self) -> dict:
        """Return the sums so far, for a checkpoint within an epoch."""
        return {
            "items": int(self.items),
            "timed_items": int(self.timed_items),
            "timed_steps": self.timed_steps,
            "time_s": self.time_s,
            "waited_s": self.waited_s,
            "metric": self.metric,
            "gib": self.gib,
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue from the stored sums; the new process warms up again."""
        for name, value in state.items():
            setattr(self, name, value)

    def _start_clock(self) -> None:
        if self.untimed_left == 0:
            if self.device.kind != "cpu":
                torch.cuda.synchronize(self.device.torch_device)
            self._since = time.perf_counter()
