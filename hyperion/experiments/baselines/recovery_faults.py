"""Faults of a training run, planted at an exact moment of a phase of a step.

A moment is one operator that PyTorch dispatches, or one Python call in the phases that compute little (loader, save). So a
signal can arrive in the middle of a backward pass or between two renames of a save, and the same seed strikes there again.
"""

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hyperion.errors import not_none
from hyperion.training import TorchEngine, loop

PHASES = ("loader", "forward", "backward", "optimizer", "evaluation", "save")
KINDS = ("SIGTERM", "SIGKILL", "power cut", "NaN", "full disk")
_CALLS = ("loader", "save")  # phases whose moments are calls, not operators
_STATE = ("optimizer", "save")  # phases in which a NaN strikes weights and moments
_DISK_BYTES = 4096  # size of a file beyond which writes fail when the disk is full


@dataclass(frozen=True)
class TrainingFault:
    """One fault of one run.

    Attributes:
        kind: one of KINDS. A power cut is a SIGKILL here; the caller damages the files afterwards (`cut_off`).
        phase: one of PHASES.
        step: optimizer step, counted from 1; for an evaluation or a save the step that it follows.
        moment: position in the phase, from 0 to 1.
    """

    kind: str
    phase: str
    step: int
    moment: float


@dataclass
class Phases:
    """Plants a fault in a run, or counts the moments of each phase if there is none.

    Args:
        fault: the fault, None for an undisturbed run.
        moments: number of moments by phase in an undisturbed run: all, and those that return floating-point numbers.
        mark: file for the number of steps done when the fault strikes; it survives the process.
    """

    engine: TorchEngine
    fault: TrainingFault | None
    moments: dict[str, list[int]]
    mark: Path
    counted: dict[str, list[int]] = field(default_factory=dict)
    struck: bool = False

    def plant(self, batches: Any) -> None:
        """Wrap the functions of each phase of this engine and this loader, in this process."""
        engine = cast(Any, self.engine)
        engine.summed_loss = self._watched("forward", engine.summed_loss)
        engine.scaler.backward = self._watched("backward", engine.scaler.backward)
        engine.scaler.step = self._watched("optimizer", engine.scaler.step)
        engine.evaluate = self._watched("evaluation", engine.evaluate)
        batches.next_batch = self._watched("loader", batches.next_batch)
        loop.write_run = self._watched("save", loop.write_run)

    def _watched(self, phase: str, function: Callable) -> Callable:
        def watched(*args: Any) -> Any:
            step = self.engine.steps + (phase not in ("evaluation", "save"))
            fault = self.fault
            now = fault is not None and not self.struck and (fault.phase, fault.step) == (phase, step)
            if not now and (fault is not None or phase in self.counted):
                return function(*args)
            # A NaN replaces a number of an operator's result; in weights and optimizer state it can strike at any moment.
            numbers_only = now and not_none(fault).kind == "NaN" and phase not in _STATE and phase not in _CALLS
            at = 1 + int(not_none(fault).moment * self.moments[phase][numbers_only]) if now else None
            moments = _Moments(at, numbers_only, self._strike)
            with _calls(moments) if phase in _CALLS else moments:
                result = function(*args)
            self.counted.setdefault(phase, [moments.count, moments.numbers])
            if now and not self.struck:  # a NaN strikes a batch once it is loaded, and a phase may be shorter than before
                self._strike(result)
            return result

        return watched

    def _strike(self, result: Any) -> None:
        """Strike; `result` is the result of the operator or the phase, None for a call."""
        fault = not_none(self.fault)
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
        """Set one number to NaN: of a batch, of an operator's result, or of weights and optimizer state."""
        fault = not_none(self.fault)
        if fault.phase in _STATE:
            states = [value for state in self.engine.optimizer.state.values() for value in state.values()]
            result = [*self.engine.model.parameters(), *states]
        tensors = _float_tensors(result)
        if not tensors:
            return False
        chosen = tensors[int(fault.moment * 1e6) % len(tensors)]
        place = int(fault.moment * 1e9) % chosen.numel()
        chosen[tuple(int(index) for index in torch.unravel_index(torch.tensor(place), chosen.shape))] = float("nan")
        return True


class _Moments(TorchDispatchMode):
    """Counts moments and, from moment `at` on, calls `strike` with the operator's result.

    Args:
        at: moment, counted from 1; None for never.
        numbers_only: whether `at` counts only operators that return floating-point numbers.
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
        self.numbers += bool(_float_tensors(result))
        if self.at is not None and (self.numbers if self.numbers_only else self.count) >= self.at:
            self.strike(result)


@contextlib.contextmanager
def _calls(moments: _Moments) -> Iterator[None]:
    """Context in which every Python call and return of this thread is a moment."""
    sys.setprofile(lambda frame, event, argument: moments.tick())
    try:
        yield
    finally:
        sys.setprofile(None)


def _float_tensors(value: Any) -> list[Tensor]:
    """Return the floating-point tensors of a nested result that can be written element by element."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() and value.numel() and 0 not in value.stride() else []
    return [tensor for item in value for tensor in _float_tensors(item)] if isinstance(value, tuple | list) else []


def cut_off(folder: Path, random: np.random.Generator) -> str:
    """Damage files as a power cut may: truncate unfinished files and one file of the newest checkpoint, and return its name.

    That file stands for data that the disk reported as written but had only in its cache.
    """
    unfinished = [path for place in folder.glob(".unfinished-*") for path in place.rglob("*") if path.is_file()]
    newest = max(folder.glob("step-*"))
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    chosen = files[random.integers(len(files))]
    for path in [*unfinished, chosen]:
        os.truncate(path, int(random.integers(max(1, path.stat().st_size))))
    return str(chosen.relative_to(folder))
