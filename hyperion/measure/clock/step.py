"""A step timed in its parts: each phase by a pair of stamps of its own, the whole step by another, all within one step.

The sum of the phases must be the step. Where it is not, something runs outside of every phase (a loss read back, a batch
copied), and the phases do not tell where the time goes.
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
    """A step and its phases, sample by sample of the same steps.

    Args:
        whole: the step from begin to end.
        phases: each phase by name, in the order of the step; one sample for each sample of `whole`.
        verification: whether the phases add up to the step: the median over the steps of |sum / whole - 1|.
    """

    whole: Timing
    phases: dict[str, Timing]
    verification: Verification


def time_step(
    step: Callable[[Phase], object], device: Device, *, minimum_samples: int = MINIMUM_SAMPLES, time_limit_s: float = 5.0
) -> StepTiming:
    """Time a step and its phases with warm caches; warm-up, clock and number of samples as in `time_interleaved`.

    Args:
        step: does one step, each part of it within `with phase("its name"):`. A phase entered twice in a step is summed.

    Raises:
        HyperionError: the step has no phase, or not the same ones each time.
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
    """The device's clock, which also keeps pairs of stamps by phase, a dictionary for each step that it took a sample of. On
    an accelerator they are read only after the last step.
    """

    def __init__(self, device: Device):
        self._clock = device_clock(device)
        self.now, self.in_a_row = self._clock.now, self._clock.in_a_row
        self.steps: list[dict[str, list[tuple]]] = []

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        """The samples of the clock below; steps that it does before the first sample leave no stamps."""
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
        """Seconds of each phase in the last `count` steps: those before were the warm-up."""
        steps = self.steps[-count:]
        names = list(steps[0])
        if not names or any(list(step) != names for step in steps):
            raise HyperionError(
                "a step without phases" if not names else f"phases differ from step to step: {', '.join(names)} at first",
                where="time_step",
                next_step="put every part of the step into `with phase(name):`, the same ones each time",
            )
        return {name: np.array([self._sum(step[name]) for step in steps]) for name in names}

    def _sum(self, pairs: list[tuple]) -> float:
        return sum(self._clock.seconds(*pair) for pair in pairs)
