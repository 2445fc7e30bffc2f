"""What `measure.time` and `measure.compare` answer: frozen, printed in a few lines, drawn, and stored as rows."""

import functools
import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hyperion.hardware import Device
from hyperion.measure.api.outputs import Difference
from hyperion.measure.clock.timing import LEAST_SAMPLES, RELATIVE_INTERVAL, Timing
from hyperion.measure.clock.units import estimate_text, seconds_text
from hyperion.results import Estimate, Row, ratio_estimate
from hyperion.results.statistics import CONFIDENCE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The bootstrap's interval of a median is too narrow for fewer samples.
LEAST_FOR_THE_BOOTSTRAP = 30


class Answer:
    """Shows itself in words in a notebook, and hands its row over."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _row(self, place: dict, metric: str, value: float, about: dict, **columns) -> Row:
        """A valid row at a place: columns of the caller come on top of the answer's own, params beside its own."""
        given = dict(place)
        row = Row(metric=metric, value=value, params=about | (given.pop("params", None) or {}), **(columns | given))
        row.validate()
        return row


@dataclass(frozen=True, repr=False)
class TimeAnswer(Answer):
    """One function's time.

    Args:
        label: what the function is called.
        timing: the raw samples in seconds, and how they were taken.
        device: where.
        minimum_samples: how many were asked for.
        notes: what is to be known of the output; they say nothing against the time.
    """

    label: str
    timing: Timing
    device: Device
    minimum_samples: int = LEAST_SAMPLES
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def estimate(self) -> Estimate:
        """Median seconds of a call with its 95 % interval: by the bootstrap; of fewer than 30 samples never narrower than by
        order statistics, which hold for any distribution."""
        estimate, samples = self.timing.estimate, self.timing.samples_s
        if len(samples) >= LEAST_FOR_THE_BOOTSTRAP:
            return estimate
        low, high = _order_interval(samples, CONFIDENCE)
        return Estimate(estimate.value, min(low, estimate.ci_low), max(high, estimate.ci_high), estimate.n)

    @property
    def verdict(self) -> str:
        """Whether the median may be believed, and if not, why."""
        doubts = _doubts(self.timing, self.estimate, self.minimum_samples)
        return "settled" if not doubts else "not settled: " + "; ".join(doubts)

    def __str__(self) -> str:
        low, high = np.quantile(self.timing.samples_s, [0.05, 0.95])
        return (
            f"{self.label}: {estimate_text(self.estimate)}, {cache_of(self.timing)} cache, {self.device.name}\n"
            f"{self.verdict}; 90 % of the samples lie in {seconds_text(low)} … {seconds_text(high)}"
            + "".join(f"\nnote: {note}" for note in self.notes)
        )

    def row(self, *, notebook: str, experiment: str, variant: str, **columns) -> Row:
        """The time as a row of `call_time_s`. Other columns of `Row` (dtype, limit, limit_source, params …) come on top."""
        place = {"notebook": notebook, "experiment": experiment, "variant": variant, **columns}
        interval = {"n": self.estimate.n, "ci_low": self.estimate.ci_low, "ci_high": self.estimate.ci_high}
        reason = "" if columns.get("limit") is not None else "no limit: what the function must do is not known"
        return self._row(
            place,
            "call_time_s",
            self.estimate.value,
            {"cache": cache_of(self.timing)},
            limit_source=reason,
            **interval,
            **state_of_device(self.timing),
        )

    def plot(self) -> "Figure":
        """The raw samples in the order taken, with their median and its interval."""
        from hyperion.measure.api.pictures import draw_samples

        return draw_samples({self.label: self.timing}, self.device.name, self.verdict)


@dataclass(frozen=True, repr=False)
class ComparisonAnswer(Answer):
    """Two functions timed in turn.

    Args:
        labels, timings: of A and of B; sample i of A stands beside sample i of B.
        difference: of the outputs, the worst over all calls that were compared; None where none were.
        output_reason: why outputs were not compared, else "".
        minimum_samples: how many were asked for.
        notes: doubts about the outputs.
    """

    labels: tuple[str, str]
    timings: tuple[Timing, Timing]
    device: Device
    difference: Difference | None
    output_reason: str
    minimum_samples: int
    notes: tuple[str, ...]

    @functools.cached_property
    def ratio(self) -> Estimate:
        """Speed of A over B: above 1 where A is faster. Of fewer than 30 samples the interval is never narrower than that of
        both medians' order statistics."""
        a, b = (timing.samples_s for timing in self.timings)
        ratio = ratio_estimate(a, b)
        if len(a) >= LEAST_FOR_THE_BOOTSTRAP:
            return ratio
        # Both intervals hold at once with 95 % when each holds with 97.5 %.
        (low_a, high_a), (low_b, high_b) = (_order_interval(samples, (1 + CONFIDENCE) / 2) for samples in (a, b))
        return Estimate(ratio.value, min(ratio.ci_low, low_b / high_a), max(ratio.ci_high, high_b / low_a), ratio.n)

    @property
    def output_error(self) -> float | None:
        """Relative Frobenius distance of the outputs, None where they were not compared."""
        return None if self.difference is None else self.difference.error

    @property
    def output_tolerance(self) -> float | None:
        """How large `output_error` may be."""
        return None if self.difference is None else self.difference.tolerance

    @property
    def outputs_agree(self) -> bool | None:
        """None where they were not compared."""
        return None if self.difference is None else self.difference.agrees

    @property
    def verdict(self) -> str:
        """Who is faster, if the 95 % interval of the ratio excludes 1."""
        (a, b), ratio = self.labels, self.ratio
        if ratio.ci_low > 1:
            return f"{a} is {_times(ratio)} faster than {b}"
        if ratio.ci_high < 1:
            return f"{b} is {_times(ratio.map(lambda speed: 1 / speed))} faster than {a}"
        return f"no difference shown: {a} over {b} is {_times(ratio)}"

    @property
    def outputs(self) -> str:
        """What is known of the two outputs, in words."""
        if self.difference is None:
            return f"outputs not compared: {self.output_reason}"
        said = "outputs agree" if self.outputs_agree else "OUTPUTS DIFFER"
        found = self.difference
        return (
            f"{said}: relative error {found.error:.2g}, tolerance {found.tolerance:.2g}; worst element {found.worst}, error "
            f"{found.element_error:.2g}, tolerance {found.element_tolerance:.2g}"
        )

    def __str__(self) -> str:
        times = "; ".join(
            f"{label}: {estimate_text(timing.estimate)}" for label, timing in zip(self.labels, self.timings, strict=True)
        )
        doubts = [
            f"{label}: {doubt}"
            for label, timing in zip(self.labels, self.timings, strict=True)
            for doubt in _doubts(timing, None, self.minimum_samples)
        ]
        notes = "; ".join([self.outputs, f"{cache_of(self.timings[0])} cache, {self.device.name}", *doubts, *self.notes])
        return f"{self.verdict}\n{times}\n{notes}"

    def row(self, *, notebook: str, experiment: str, variant: str, **columns) -> Row:
        """A's speed over B's as a row of `speedup`; the outputs' error is its check.

        Raises:
            RowError: the outputs differ: a wrong answer has no speed.
        """
        place = {"notebook": notebook, "experiment": experiment, "variant": variant, **columns}
        found, check = self.difference, {}
        if found is not None and found.error <= found.tolerance and not found.agrees:
            check = {
                "check": "worst element of the outputs",
                "check_error": found.element_error,
                "check_tolerance": found.element_tolerance,
            }
        elif found is not None:
            check = {"check": "relative error of the outputs", "check_error": found.error, "check_tolerance": found.tolerance}
        about = {"a": self.labels[0], "b": self.labels[1], "cache": cache_of(self.timings[0])}
        reason = "" if columns.get("limit") is not None else "no limit: how slow B may be is not bounded"
        ratio = self.ratio
        return self._row(
            place,
            "speedup",
            ratio.value,
            about,
            n=ratio.n,
            ci_low=ratio.ci_low,
            ci_high=ratio.ci_high,
            limit_source=reason,
            **check,
            **state_of_device(self.timings[0]),
        )

    def plot(self) -> "Figure":
        """The raw samples of both in the order taken, with their medians and intervals."""
        from hyperion.measure.api.pictures import draw_samples

        return draw_samples(dict(zip(self.labels, self.timings, strict=True)), self.device.name, self.verdict)


def cache_of(timing: Timing) -> str:
    """ "cold" where the last-level cache was flushed before each sample, else "hot"."""
    return "cold" if timing.cold else "hot"


def state_of_device(timing: Timing) -> dict:
    """The device's state over the samples, as columns of a row."""
    seen = timing.telemetry
    return {"clock_mhz": seen.clock_mhz, "power_w": seen.power_w, "throttle": seen.throttle}


def _order_interval(samples: np.ndarray, confidence: float) -> tuple[float, float]:
    """The narrowest pair of order statistics that holds the median with that probability, whatever the distribution; the whole
    range where even that holds it less often.

    Source: Conover, Practical Nonparametric Statistics, 3rd edition, section 3.2.
    """
    ordered, n = np.sort(samples), len(samples)
    outside, place = 2.0 ** (1 - n), 0
    while place + 1 < n // 2 and outside + math.comb(n, place + 1) * 2.0 ** (1 - n) <= 1 - confidence:
        place += 1
        outside += math.comb(n, place) * 2.0 ** (1 - n)
    return float(ordered[place]), float(ordered[n - 1 - place])


def _doubts(timing: Timing, estimate: Estimate | None, minimum_samples: int) -> list[str]:
    doubts = [timing.unsteady] if timing.unsteady else []
    taken = len(timing.samples_s)
    if taken < minimum_samples:
        doubts.append(f"{taken} of {minimum_samples} samples fit into the time limit")
    coverage = 1 - 2.0 ** (1 - taken)
    if coverage < CONFIDENCE:
        doubts.append(f"the range of {taken} samples holds the median with {100 * coverage:.0f} %, not 95 %")
    if estimate is not None and timing.stopped != "interval":
        half = (estimate.ci_high - estimate.ci_low) / 2 / estimate.value if estimate.value else 0.0
        if half > RELATIVE_INTERVAL:
            doubts.append(f"the interval is still ±{100 * half:.2g} % at the time limit")
    if timing.telemetry.throttle not in (None, "none"):
        doubts.append(f"the device throttled ({timing.telemetry.throttle})")
    return doubts


def _times(ratio: Estimate) -> str:
    return f"{ratio.value:.4g} × (95 % CI {ratio.ci_low:.4g} … {ratio.ci_high:.4g})"
