"""Helper classes of the training loop. They handle requests to stop, decide when losses are read, and measure epochs.

A batch system sends SIGTERM some time before it ends a job. SIGTERM sets a flag. The ranks then agree to stop after the same
step, and the training loop saves a checkpoint and raises `Interrupted`, whose exit code is `EXIT_CODE`.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyperion.checkpoints import rank_and_size
from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure import PeakMemoryRegion

EXIT_CODE = 75  # EX_TEMPFAIL in <sysexits.h>, "try again later": a batch system can start the job again
SYNC_STEPS = 20
SYNC_S = 5.0
UNTIMED_STEPS = 3  # these first steps are slower: they allocate memory, choose kernels and fill caches


class Interrupted(HyperionError):
    """Raised when SIGTERM stops training. If a checkpoint was saved, the next call of `train` resumes from it."""

    exit_code = EXIT_CODE


class StopFlag:
    """Context manager in which SIGTERM sets `requested` instead of ending the process.

    The previous handler is restored on exit. Python can install signal handlers only in the main thread. In other threads,
    `requested` remains False and SIGTERM has its previous effect.

    Attributes:
        requested: True if SIGTERM was received.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "StopFlag":
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._previous = signal.signal(signal.SIGTERM, self._set)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, self._previous)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def watch(self, batches: Iterable, must_stop: Callable[[], bool] | None = None) -> Iterator:
        """Yield the batches, and raise Interrupted when a stop is requested. Use it for work that can be repeated.

        Args:
            batches: the batches to yield.
            must_stop: function that is called before each batch and returns True to stop. Use it if all ranks must stop
                before the same batch. By default `requested` is read.
        """
        for batch in batches:
            if self.requested if must_stop is None else must_stop():
                raise Interrupted(
                    "SIGTERM was received during the evaluation", where="training", next_step="start again to resume"
                )
            yield batch


class Pulse:
    """Schedule for reading losses: the number of steps between two reads. At each read, the ranks also agree whether to stop.

    Reading losses waits for the device, so the additional small all-reduce takes little time. On a CPU losses are read after
    every step. On one accelerator they are read every SYNC_STEPS steps. On several accelerators they are read more often if
    SYNC_STEPS steps of the slowest rank would take longer than SYNC_S seconds. As a result, all ranks receive a request to
    stop within about SYNC_S seconds, or after one step if a step takes longer.

    Args:
        device: the device that trains.

    Attributes:
        steps: number of steps between reads.
    """

    def __init__(self, device: Device):
        self.device = device
        self.ranks = rank_and_size()[1]
        self.steps = SYNC_STEPS if device.kind != "cpu" and self.ranks == 1 else 1
        self.start()

    def start(self) -> None:
        """Start measuring the time per step, for example after an evaluation or a checkpoint."""
        self._since = time.perf_counter()

    def agree(self, stop: bool, fault: bool, steps: int) -> tuple[bool, bool]:
        """Return (any_stop, any_fault): True if any rank passes True. All ranks must call this method after the same step.

        Args:
            stop: True if this rank was requested to stop.
            fault: True if this rank found an error.
            steps: number of steps since the last call.
        """
        now = time.perf_counter()
        step_s, self._since = (now - self._since) / max(steps, 1), now
        if self.ranks == 1:
            return stop, fault
        values = torch.tensor([stop, fault, step_s], dtype=torch.float64, device=self.device.torch_device)
        # The maximum of 0 and 1 is a logical "or", and the maximum of the times is the slowest rank. So one collective is
        # enough.
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        any_stop, any_fault, slowest_s = values.tolist()
        if self.device.kind != "cpu":
            # All ranks compute the interval from the same number, so their next read comes after the same step.
            self.steps = max(1, min(SYNC_STEPS, int(SYNC_S / slowest_s)))
        return bool(any_stop), bool(any_fault)


class EpochMeter:
    """Measures the time, the items and the peak memory of the steps of an epoch.

    Steps are measured between start() and pause(). Both can be called several times in an epoch.

    Args:
        device: the device that trains.
        warmed_up: True if this process has already trained. In this case the first steps are also timed.
    """

    def __init__(self, device: Device, warmed_up: bool = False):
        self.device = device
        self.untimed_left = 0 if warmed_up else UNTIMED_STEPS
        self.items: int | Tensor = 0
        self.timed_items: int | Tensor = 0
        self.timed_steps, self.time_s, self.waited_s = 0, 0.0, 0.0
        self.metric = ""
        self.gib: float | None = None
        self.reserved_gib: float | None = None
        self.wall_s = self._started = 0.0
        self._region: PeakMemoryRegion | None = None
        self._since: float | None = None

    def start(self) -> None:
        """Start measuring steps."""
        self._region = PeakMemoryRegion(self.device)
        self._region.__enter__()
        self._started = time.perf_counter()
        self._start_clock()

    def count(self, items: Tensor) -> None:
        """Add one step.

        Args:
            items: number of items in the step.
        """
        self.items = self.items + items
        if self._since is not None:
            self.timed_items, self.timed_steps = self.timed_items + items, self.timed_steps + 1
        else:
            # The clock starts when the last warm-up step has been counted.
            self.untimed_left -= 1
            self._start_clock()

    def waiting(self, batches: Iterable) -> Iterator:
        """Yield the batches. If steps are timed, add the time that the loop waits for each batch to `waited_s`."""
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
        """Wait for the device and stop measuring. If measuring has already stopped, do nothing."""
        if self._region is None:
            return
        self._region.__exit__(None, None, None)  # waits for the device
        self.wall_s += time.perf_counter() - self._started
        if self._since is not None:
            self.time_s += time.perf_counter() - self._since
        peak, reserved_gib = self._region.peak, self._region.reserved_gib
        self._region, self._since = None, None
        self.metric = peak.metric
        self.gib = peak.gib if self.gib is None or peak.gib is None else max(self.gib, peak.gib)
        if reserved_gib is not None:
            self.reserved_gib = max(reserved_gib, self.reserved_gib or 0.0)

    def results(self) -> dict[str, Any]:
        """Return a dict with the fields of EpochRecord that this class measures."""
        timed_items = int(self.timed_items)
        return {
            "items": int(self.items),
            "time_s": self.time_s,
            "waited_s": self.waited_s,
            "timed_steps": self.timed_steps,
            "items_per_s": timed_items / self.time_s if self.timed_steps else None,
            "peak_memory_metric": self.metric,
            "peak_memory_gib": self.gib,
            "reserved_memory_gib": self.reserved_gib,
            "wall_s": self.wall_s,
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
            "reserved_gib": self.reserved_gib,
            "wall_s": self.wall_s,
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue from the sums of a checkpoint. The new process has its own warm-up steps, which are not timed."""
        # `untimed_left` is not in the state, so the new process has warm-up steps again.
        for name, value in state.items():
            setattr(self, name, value)

    def _start_clock(self) -> None:
        if self.untimed_left == 0:
            if self.device.kind != "cpu":
                torch.cuda.synchronize(self.device.torch_device)
            self._since = time.perf_counter()
