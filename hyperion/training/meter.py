"""Time, items and peak memory of an epoch's steps, with evaluation and checkpoints left out."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from hyperion.hardware import Device
from hyperion.measure import PeakMemoryRegion

UNTIMED_STEPS = 3  # the first steps of a process allocate, choose kernels and fill caches


class EpochMeter:
    """Runs from start() to pause(), any number of times, and sums up.

    Args:
        warmed_up: time from the first step on, as this process has trained before.
    """

    def __init__(self, device: Device, warmed_up: bool = False):
        self.device = device
        self.untimed_left = 0 if warmed_up else UNTIMED_STEPS
        self.items: int | Tensor = 0
        self.timed_items: int | Tensor = 0
        self.timed_steps, self.time_s, self.waited_s = 0, 0.0, 0.0
        self.metric, self.gib = "", None
        self._region: PeakMemoryRegion | None = None
        self._since: float | None = None

    def start(self) -> None:
        """From now on steps count."""
        self._region = PeakMemoryRegion(self.device)
        self._region.__enter__()
        self._start_clock()

    def count(self, items: Tensor) -> None:
        """One more step, with so many items."""
        self.items = self.items + items
        if self._since is not None:
            self.timed_items, self.timed_steps = self.timed_items + items, self.timed_steps + 1
        else:
            self.untimed_left -= 1
            self._start_clock()

    def waiting(self, batches: Iterable) -> Iterator:
        """The same batches; the time for which the loop waits for each counts as waiting, once steps are timed."""
        batches = iter(batches)
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            if self._since is not None:
                self.waited_s += time.perf_counter() - asked
            if batch is None:
                return
            yield batch

    def pause(self) -> None:
        """Wait for the device and stop; a second call does nothing."""
        if self._region is None:
            return
        self._region.__exit__(None, None, None)  # synchronises
        if self._since is not None:
            self.time_s += time.perf_counter() - self._since
        peak, self._region, self._since = self._region.peak, None, None
        self.metric = peak.metric
        self.gib = peak.gib if self.gib is None or peak.gib is None else max(self.gib, peak.gib)

    def results(self) -> dict[str, Any]:
        """The fields of EpochRecord that are measured here."""
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
        """Sums so far, for a checkpoint within an epoch."""
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
        """Go on summing from there; the new process warms up again."""
        for name, value in state.items():
            setattr(self, name, value)

    def _start_clock(self) -> None:
        if self.untimed_left == 0:
            if self.device.kind != "cpu":
                torch.cuda.synchronize(self.device.torch_device)
            self._since = time.perf_counter()
