"""Learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

import math
from dataclasses import dataclass

from hyperion.errors import HyperionError, require_number


@dataclass(frozen=True)
class WarmupCosine:
    """Linear warm-up to the peak, then half a cosine down to final_fraction of it; constant after total_steps.

    Attributes:
        peak: highest learning rate, reached at step warmup_steps (steps count from 1).
        warmup_steps: 0 starts at the peak.
        total_steps: step at which the rate is peak * final_fraction.
        final_fraction: 1 keeps the rate constant after the warm-up.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    final_fraction: float = 0.1

    def __post_init__(self):
        for name in ("warmup_steps", "total_steps"):
            require_number(name, getattr(self, name), "WarmupCosine", whole=True)
        require_number("peak", self.peak, "WarmupCosine", at_least=0)
        require_number("final_fraction", self.final_fraction, "WarmupCosine", at_least=0, at_most=1)
        if not 0 <= self.warmup_steps < self.total_steps:
            raise HyperionError(
                f"warmup_steps {self.warmup_steps} is not within 0 .. total_steps {self.total_steps} - 1",
                where="WarmupCosine",
                next_step="shorten the warm-up or train longer",
            )

    def __call__(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 1.

        Raises:
            HyperionError: a step below 1.
        """
        if step < 1:
            raise HyperionError(f"step is {step}", where="WarmupCosine", next_step="count steps from 1")
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * done)))
