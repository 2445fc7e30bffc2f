"""Faults that are injected into a training run at an exact point of a step.

A step has several phases, such as the forward and the backward pass. A point within a phase at which a fault can occur is called
a moment. Most phases have one moment per operator that PyTorch dispatches. The phases "loader" and "save" call few operators, so
they have one moment per Python function call and per return. A signal can thus arrive in the middle of a backward pass, or
between two file renames of a save. The same seed reproduces the fault at the same moment.
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
_CALLS = ("loader", "save")  # phases whose moments are calls and returns of Python functions instead of operators
_STATE = ("optimizer", "save")  # phases in which a NaN is written into weights or optimizer state
_DISK_BYTES = 4096  # maximum file size on the simulated full disk; longer writes fail


@dataclass(frozen=True)
class TrainingFault:
    """One fault of one run.

    Attributes:
        kind: one of KINDS. For a power cut, the process receives SIGKILL, and then the caller damages its files with `cut_off`.
        phase: one of PHASES.
        step: number of the optimizer step, counted from 1. For an evaluation or a save, the number of the preceding step.
        moment: position of the fault within the phase, from 0 (start) to 1 (end).
    """

    kind: str
    phase: str
    step: int
    moment: float


@dataclass
class Phases:
    """Injects a fault into a training run, or only counts the moments (possible points of a fault) in each phase.

    Args:
        engine: training engine.
        fault: fault to inject. If None, moments are only counted.
        moments: a dict that maps each phase to two counts from a run without a fault: all moments, and moments whose operator
            returns floating-point numbers.
        mark: path of a file. When the fault occurs, the number of finished steps is written there, because the fault may end the
            process.

    Attributes:
        counted: a dict like `moments`, with the counts of this run.
        struck: whether the fault has occurred.
    """

    engine: TorchEngine
    fault: TrainingFault | None
    moments: dict[str, list[int]]
    mark: Path
    counted: dict[str, list[int]] = field(default_factory=dict)
    struck: bool = False

    def plant(self, batches: Any) -> None:
        """Replace the function of each phase by a wrapper that counts moments and injects the fault.

        Args:
            batches: batches of the training run.
        """
        engine = cast(Any, self.engine)
        engine.summed_loss = self._watched("forward", engine.summed_loss)
        engine.scaler.backward = self._watched("backward", engine.scaler.backward)
        engine.scaler.step = self._watched("optimizer", engine.scaler.step)
        engine.evaluate = self._watched("evaluation", engine.evaluate)
        batches.next_batch = self._watched("loader", batches.next_batch)
        loop.write_run = self._watched("save", loop.write_run)

    def _watched(self, phase: str, function: Callable) -> Callable:
        def watched(*args: Any) -> Any:
            # `engine.steps` counts finished steps: evaluation and save belong to the step just finished, all other phases to the
            # next one.
            step = self.engine.steps + (phase not in ("evaluation", "save"))
            fault = self.fault
            now = fault is not None and not self.struck and (fault.phase, fault.step) == (phase, step)
            if not now and (fault is not None or phase in self.counted):
                return function(*args)
            # In most phases a NaN replaces a number in an operator's result, so the operator must return floating-point numbers.
            # In the phases in _STATE, a NaN is written into weights or optimizer state. These always exist, so any moment is
            # possible.
            numbers_only = now and not_none(fault).kind == "NaN" and phase not in _STATE and phase not in _CALLS
            at = 1 + int(not_none(fault).moment * self.moments[phase][numbers_only]) if now else None
            moments = _Moments(at, numbers_only, self._strike)
            with _calls(moments) if phase in _CALLS else moments:
                result = function(*args)
            self.counted.setdefault(phase, [moments.count, moments.numbers])
            if now and not self.struck:  # a NaN in a loaded batch, or the phase had fewer moments than in the counted run
                self._strike(result)
            return result

        return watched

    def _strike(self, result: Any) -> None:
        """Inject the fault.

        Args:
            result: value returned by the operator or the phase, or None if the moment is a call or return of a Python function.
        """
        fault = not_none(self.fault)
        if self.struck or fault.kind == "NaN" and not self._poison(result):
            return
        self.struck = True
        # Written before the signal, because after SIGKILL the process runs no more code.
        self.mark.write_text(str(self.engine.steps))
        if fault.kind == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault.kind in ("SIGKILL", "power cut"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "full disk":
            # A file-size limit makes every longer write fail, as on a full disk, without filling the disk.
            resource.setrlimit(resource.RLIMIT_FSIZE, (_DISK_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    @torch.no_grad()
    def _poison(self, result: Any) -> bool:
        """Set one number to NaN in `result`, the weights or the optimizer state.

        Return False if there is no floating-point number that can be changed.
        """
        fault = not_none(self.fault)
        if fault.phase in _STATE:
            states = [value for state in self.engine.optimizer.state.values() for value in state.values()]
            result = [*self.engine.model.parameters(), *states]
        tensors = _float_tensors(result)
        if not tensors:
            return False
        # Different digits of the same random number choose the tensor and the element.
        chosen = tensors[int(fault.moment * 1e6) % len(tensors)]
        place = int(fault.moment * 1e9) % chosen.numel()
        chosen[tuple(int(index) for index in torch.unravel_index(torch.tensor(place), chosen.shape))] = float("nan")
        return True


class _Moments(TorchDispatchMode):
    """Counts the moments of a phase and calls `strike` at every moment from number `at` on.

    Args:
        at: number of the moment, counted from 1. If None, moments are only counted.
        numbers_only: if True, `at` counts only operators that return floating-point numbers.
        strike: function that takes the operator's result and injects the fault.
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
    """Context manager in which every call and return of a Python function in this thread counts as a moment."""
    sys.setprofile(lambda frame, event, argument: moments.tick())
    try:
        yield
    finally:
        sys.setprofile(None)


def _float_tensors(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in a nested result whose elements can be overwritten individually."""
    if isinstance(value, Tensor):
        # An expanded dimension has stride 0: one write would change many elements.
        return [value] if value.is_floating_point() and value.numel() and 0 not in value.stride() else []
    return [tensor for item in value for tensor in _float_tensors(item)] if isinstance(value, tuple | list) else []


def cut_off(folder: Path, random: np.random.Generator) -> str:
    """Damage the files in a checkpoint folder as a power cut may damage them.

    All unfinished files and one file of the newest checkpoint are truncated. The checkpoint file is truncated because a disk may
    report data as written while they are only in its cache. A power cut loses these data.

    Returns:
        Path of the truncated checkpoint file, relative to `folder`.
    """
    unfinished = [path for place in folder.glob(".unfinished-*") for path in place.rglob("*") if path.is_file()]
    newest = max(folder.glob("step-*"))
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    chosen = files[random.integers(len(files))]
    for path in [*unfinished, chosen]:
        os.truncate(path, int(random.integers(max(1, path.stat().st_size))))
    return str(chosen.relative_to(folder))
