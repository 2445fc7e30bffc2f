"""Faults of a training run, planted at an exact moment: during which phase of which step, and how far into the phase.

A moment is one operator that PyTorch dispatches, or one call of Python in the phases that hardly compute (loader, save). So
a signal arrives in the middle of a backward pass or between two renames of a save, and the same seed strikes there again.
"""

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hyperion.training import TorchEngine, loop
from hyperion.training.loop import Batches

PHASES = ("loader", "forward", "backward", "optimizer", "evaluation", "save")
KINDS = ("SIGTERM", "SIGKILL", "power cut", "NaN", "full disk")
_CALLS = ("loader", "save")  # phases whose moments are calls, not operators
_STATE = ("optimizer", "save")  # phases in which a NaN strikes weights and moments
_DISK_BYTES = 4096  # what a file may still hold once the disk is full


@dataclass(frozen=True)
class Fault:
    """One fault of one run.

    Attributes:
        kind: of KINDS. A power cut is a SIGKILL here; whoever planted it damages the files afterwards.
        phase: of PHASES.
        step: during which optimizer step, counted from 1; of an evaluation or save the step it comes after.
        moment: how far into the phase, 0 to 1.
    """

    kind: str
    phase: str
    step: int
    moment: float


@dataclass
class Phases:
    """Lets a fault strike in a run, or counts the moments of each phase where none is planted.

    Args:
        fault: None for an undisturbed run.
        moments: of each phase as an undisturbed run counted them: all, and those that give numbers.
        mark: a file that says how many steps were done when the fault struck; it outlives the process.
    """

    engine: TorchEngine
    fault: Fault | None
    moments: dict[str, list[int]]
    mark: Path
    counted: dict[str, list[int]] = field(default_factory=dict)
    struck: bool = False

    def plant(self, batches: Batches) -> None:
        """Watch the phases of this engine and this loader, in this process."""
        engine = self.engine
        engine.summed_loss = self._watched("forward", engine.summed_loss)
        engine.scaler.backward = self._watched("backward", engine.scaler.backward)
        engine.scaler.step = self._watched("optimizer", engine.scaler.step)
        engine.evaluate = self._watched("evaluation", engine.evaluate)
        batches.next_batch = self._watched("loader", batches.next_batch)
        loop.write_run = self._watched("save", loop.write_run)

    def _watched(self, phase: str, function: Callable) -> Callable:
        def watched(*args: Any) -> Any:
            step = self.engine.steps + (phase not in ("evaluation", "save"))
            wanted = self.fault is not None and not self.struck and (self.fault.phase, self.fault.step) == (phase, step)
            if not wanted and (self.fault is not None or phase in self.counted):
                return function(*args)
            # A NaN can only strike where numbers come out; in weights and moments it can at any time.
            numbers_only = wanted and self.fault.kind == "NaN" and phase not in _STATE and phase not in _CALLS
            at = 1 + int(self.fault.moment * self.moments[phase][numbers_only]) if wanted else None
            moments = _Moments(at, numbers_only, self._strike)
            with _calls(moments) if phase in _CALLS else moments:
                result = function(*args)
            self.counted.setdefault(phase, [moments.count, moments.numbers])
            if wanted and not self.struck:  # a batch is poisoned when it is there, and a phase may be shorter than foreseen
                self._strike(result)
            return result

        return watched

    def _strike(self, result: Any) -> None:
        """At one moment; `result` is what the operator or the phase gave, None for a call."""
        fault = self.fault
        if self.struck or fault.kind == "NaN" and not self._poison(result):
            return
        self.struck = True
        self.mark.write_text(str(self.engine.steps))
        if fault.kind == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault.kind in ("SIGKILL", "power cut"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (_DISK_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    @torch.no_grad()
    def _poison(self, result: Any) -> bool:
        """One number becomes a NaN: of a batch, of an operator's result, or of the weights and moments themselves."""
        if self.fault.phase in _STATE:
            states = [value for state in self.engine.optimizer.state.values() for value in state.values()]
            result = [*self.engine.model.parameters(), *states]
        found = _numbers(result)
        if not found:
            return False
        chosen = found[int(self.fault.moment * 1e6) % len(found)]
        place = int(self.fault.moment * 1e9) % chosen.numel()
        chosen[tuple(int(index) for index in torch.unravel_index(torch.tensor(place), chosen.shape))] = float("nan")
        return True


class _Moments(TorchDispatchMode):
    """Counts moments, and from one of them on calls `strike` with what the operator gave.

    Args:
        at: that moment, counted from 1; None for never.
        numbers_only: count operators that give floating-point numbers to write into, for `at`.
    """

    def __init__(self, at: int | None, numbers_only: bool, strike: Callable[[Any], object]):
        super().__init__()
        self.at, self.numbers_only, self.strike = at, numbers_only, strike
        self.count = self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.tick(result)
        return result

    def tick(self, result: Any = None) -> None:
        self.count += 1
        self.numbers += bool(_numbers(result))
        if self.at is not None and (self.numbers if self.numbers_only else self.count) >= self.at:
            self.strike(result)


@contextlib.contextmanager
def _calls(moments: _Moments) -> Iterator[None]:
    """Every call and return of this thread is a moment."""
    sys.setprofile(lambda frame, event, argument: moments.tick())
    try:
        yield
    finally:
        sys.setprofile(None)


def _numbers(value: Any) -> list[Tensor]:
    """Tensors of a result, or of several, whose floating-point numbers can be written to one by one."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() and value.numel() and 0 not in value.stride() else []
    return [tensor for item in value for tensor in _numbers(item)] if isinstance(value, tuple | list) else []


def cut_off(folder: Path, random) -> str:
    """What a power cut may do to files that were not on the disk yet, or that a disk said it had: unfinished ones lose their
    ends, and so does one of the newest checkpoint. Returns that one's name.

    Args:
        random: numpy.random.Generator.
    """
    unfinished = [path for place in folder.glob(".unfinished-*") for path in place.rglob("*") if path.is_file()]
    newest = max(folder.glob("step-*"))
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    chosen = files[random.integers(len(files))]
    for path in [*unfinished, chosen]:
        os.truncate(path, int(random.integers(max(1, path.stat().st_size))))
    return str(chosen.relative_to(folder))
