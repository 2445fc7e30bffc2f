"""Time a step and its phases together.

The phases must add up to the step. If they do not, something runs outside of all phases, such as reading back the loss or
copying a batch, and the phases do not explain the time of the step.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.clock.clocks import device_clock
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, Timing, time_function
from hyperion.measure.clock.verify import Verification

PHASE_TOLERANCE = 0.05

Phase = Callable[[str], AbstractContextManager]


@dataclass(frozen=True)
class StepTiming:
    """The times of a step and its phases, from the same steps.

    Args:
        whole: the whole step.
        phases: phases by name in the order of the step; one sample for each sample of `whole`.
        verification: check that the phases add up to the step: the median over the steps of |sum / whole - 1|.
    """

    whole: Timing
    phases: dict[str, Timing]
    verification: Verification


def time_step(
    step: Callable[[Phase], object], device: Device, *, minimum_samples: int = MINIMUM_SAMPLES, time_limit_s: float = 5.0
) -> StepTiming:
    """Time a step and its phases with hot caches; warm-up, clock and number of samples as in `time_interleaved`.

    Args:
        step: does one step, each part of it in `with phase("name"):`. A phase that is entered twice in a step is summed.

    Raises:
        HyperionError: the step has no phases, or its phases change from step to step.
    """
    stamps = _Stamps(device)

    def marked() -> None:
        stamps.steps.append({})
        step(stamps.phase)

    whole = time_function(marked, device, cold=False, minimum_samples=minimum_samples, time_limit_s=time_limit_s, clock=stamps)
    seconds = stamps.seconds(len(whole.samples_s))
    phases = {name: replace(whole, samples_s=samples, warmup_s=()) for name, samples in seconds.items()}
    errors = np.abs(np.sum(list(seconds.values()), axis=0) / whole.samples_s - 1)
    verification = Verification(f"{' + '.join(phases)} = step", float(np.median(errors)), PHASE_TOLERANCE)
    return StepTiming(whole, phases, verification)


class _Stamps:
    """The device's clock, which also records pairs of stamps by phase for each sampled step.

    On a GPU the stamps are read only after the last step, because reading them would synchronise.
    """

    def __init__(self, device: Device):
        self._clock = device_clock(device)
        self.now, self.in_a_row = self._clock.now, self._clock.in_a_row
        self.steps: list[dict[str, list[tuple]]] = []

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        """Sample the device's clock, and drop the stamps of steps that it runs without timing them."""
        before = len(self.steps)
        samples = self._clock.sample(functions, flush, count)
        del self.steps[before : len(self.steps) - count * len(functions)]
        return samples

    @contextlib.contextmanager
    def phase(self, name: str):
        start = self._clock.stamp()
        yield
        self.steps[-1].setdefault(name, []).append((start, self._clock.stamp()))

    def seconds(self, count: int) -> dict[str, np.ndarray]:
        """Return the seconds of each phase in the last `count` steps; earlier steps were the warm-up."""
        steps = self.steps[-count:]
        names = list(steps[0])
        if not names or any(list(step) != names for step in steps):
            raise HyperionError(
                "the step has no phases" if not names else f"the phases differ between steps; first: {', '.join(names)}",
                where="time_step",
                next_step="put every part of the step into `with phase(name):`, with the same names in every step",
            )
        return {name: np.array([self._sum(step[name]) for step in steps]) for name in names}

    def _sum(self, pairs: list[tuple]) -> float:
        return sum(self._clock.seconds(*pair) for pair in pairs)
