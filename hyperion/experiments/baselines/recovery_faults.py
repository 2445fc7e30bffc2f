"""Faults that are injected into a training run at an exact point of a step.

A step has several phases, and a phase is divided into moments. A moment is one operator that PyTorch dispatches. The phases
"loader" and "save" call few operators, so there a moment is one Python call or return. Thus a signal can arrive in the middle of
a backward pass, or between two file renames of a save. With the same seed, the fault occurs at the same moment again.
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
_CALLS = ("loader", "save")  # phases whose moments are Python calls instead of operators
_STATE = ("optimizer", "save")  # phases in which a NaN is written into weights or optimizer state
_DISK_BYTES = 4096  # largest size of a file on the simulated full disk; longer writes fail


@dataclass(frozen=True)
class TrainingFault:
    """One fault of one run.

    Attributes:
        kind: one of KINDS. For a power cut this process only receives SIGKILL; afterwards the caller damages files (`cut_off`).
        phase: one of PHASES.
        step: optimizer step, counted from 1. For an evaluation or a save, it is the step before.
        moment: position within the phase, from 0 (start) to 1 (end).
    """

    kind: str
    phase: str
    step: int
    moment: float


@dataclass
class Phases:
    """Injects a fault into a run. Without a fault it only counts the moments of each phase.

    Args:
        engine: engine of the training.
        fault: the fault, or None for a run without a fault.
        moments: two counts for each phase, taken from a run without a fault: the number of all moments, and the number of
            moments that return floating-point numbers.
        mark: file in which the number of finished steps is stored when the fault occurs, because the process may end then.
    """

    engine: TorchEngine
    fault: TrainingFault | None
    moments: dict[str, list[int]]
    mark: Path
    counted: dict[str, list[int]] = field(default_factory=dict)
    struck: bool = False

    def plant(self, batches: Any) -> None:
        """Wrap the function of each phase, so that the moments of its calls are counted."""
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
            # A NaN replaces a number in the result of an operator, so it needs an operator that returns floating-point numbers.
            # Weights and optimizer state always exist, so there a NaN can be written at any moment.
            numbers_only = now and not_none(fault).kind == "NaN" and phase not in _STATE and phase not in _CALLS
            at = 1 + int(not_none(fault).moment * self.moments[phase][numbers_only]) if now else None
            moments = _Moments(at, numbers_only, self._strike)
            with _calls(moments) if phase in _CALLS else moments:
                result = function(*args)
            self.counted.setdefault(phase, [moments.count, moments.numbers])
            if now and not self.struck:  # for a NaN in a loaded batch, or if the phase had fewer moments than counted
                self._strike(result)
            return result

        return watched

    def _strike(self, result: Any) -> None:
        """Inject the fault. `result` is the result of the operator or of the phase, or None if the moment is a Python call."""
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
        """Set one number to NaN, in `result` or in weights and optimizer state. Return False if there is no such number."""
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
    """Counts moments. From moment `at` on, it calls `strike` with the result of each operator.

    Args:
        at: number of the moment, counted from 1. None to only count.
        numbers_only: if True, `at` counts only operators that return floating-point numbers.
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
    """Within this context, every Python call and return of this thread is a moment."""
    sys.setprofile(lambda frame, event, argument: moments.tick())
    try:
        yield
    finally:
        sys.setprofile(None)


def _float_tensors(value: Any) -> list[Tensor]:
    """Return the floating-point tensors of a nested result whose single elements can be overwritten."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() and value.numel() and 0 not in value.stride() else []
    return [tensor for item in value for tensor in _float_tensors(item)] if isinstance(value, tuple | list) else []


def cut_off(folder: Path, random: np.random.Generator) -> str:
    """Damage files as a power cut may do.

    Truncate all unfinished files and one file of the newest checkpoint. A disk may report data as written while the data are
    only in its cache. The truncated file of the checkpoint represents such data.

    Returns:
        The path of the truncated file of the checkpoint, relative to `folder`.
    """
    unfinished = [path for place in folder.glob(".unfinished-*") for path in place.rglob("*") if path.is_file()]
    newest = max(folder.glob("step-*"))
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    chosen = files[random.integers(len(files))]
    for path in [*unfinished, chosen]:
        os.truncate(path, int(random.integers(max(1, path.stat().st_size))))
    return str(chosen.relative_to(folder))
