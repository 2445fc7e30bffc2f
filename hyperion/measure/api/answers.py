"""The results of `measure.time` and `measure.compare`.

A result can be printed, drawn as a figure, and converted to a row (`hyperion.results.Row`).
"""

import functools
import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hyperion.hardware import ROW_DTYPES, Device
from hyperion.hardware.telemetry import BUSY
from hyperion.measure.api.outputs import Difference
from hyperion.measure.clock.timing import LEAST_SAMPLES, RELATIVE_INTERVAL, Timing
from hyperion.results import Estimate, Row, ratio_estimate
from hyperion.results.rows import make_row
from hyperion.results.statistics import CONFIDENCE, LEAST_FOR_THE_BOOTSTRAP, order_interval
from hyperion.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SMALL = ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
_LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_BINARY = ((1024 * GIB, "Ti"), (GIB, "Gi"), (MIB, "Mi"), (KIB, "Ki"), (1, ""))


class Answer:
    """Base class of the results of `time`, `compare`, `memory`, `flops` and `explain`. A notebook displays a result as text."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _row(self, place: dict, metric: str, value: float | None, about: dict, **columns: Any) -> Row:
        """Return a validated row.

        Args:
            place: columns given by the caller of the public method. They replace columns of the same name in `columns`. The entry
                "params" is added to `about`.
            metric, value: metric of the row, and its value.
            about: params of the row, such as the label of the function.
            columns: other columns of the row.
        """
        given = dict(place)
        params = about | (given.pop("params", None) or {})
        row = make_row(ROW_DTYPES, metric=metric, value=value, params=params, **(columns | given))
        row.validate()
        return row


@dataclass(frozen=True, repr=False)
class TimeAnswer(Answer):
    """The time of one function.

    Args:
        label: name of the function.
        timing: raw samples in seconds, and how they were taken.
        device: the device that ran the function.
        minimum_samples: the requested minimum number of samples.
        notes: remarks on the output of the function. They do not affect the time.
    """

    label: str
    timing: Timing
    device: Device
    minimum_samples: int = LEAST_SAMPLES
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def estimate(self) -> Estimate:
        """Median time of a call in seconds with its 95 % interval (see `hyperion.results.median_estimate`)."""
        return self.timing.estimate

    @property
    def verdict(self) -> str:
        """ "settled" if the median can be trusted. Otherwise "not settled" with the reasons."""
        doubts = _doubts(self.timing, self.estimate, self.minimum_samples)
        return "settled" if not doubts else "not settled: " + "; ".join(doubts)

    def __str__(self) -> str:
        low, high = np.quantile(self.timing.samples_s, [0.05, 0.95])
        return (
            f"{self.label}: {estimate_text(self.estimate)}, {cache_of(self.timing)} cache, {self.device.name}\n"
            f"{self.verdict}; 90 % of the samples lie in {seconds_text(low)} … {seconds_text(high)}"
            + "".join(f"\nnote: {note}" for note in self.notes)
        )

    def row(self, *, notebook: str, experiment: str, variant: str, **columns: Any) -> Row:
        """Return a row of the metric `call_time_s`. `columns` sets further columns of `Row` (dtype, limit, params …)."""
        place = {"notebook": notebook, "experiment": experiment, "variant": variant, **columns}
        reason = "" if columns.get("limit") is not None else "no limit: what the function must do is not known"
        return self._row(
            place,
            "call_time_s",
            self.estimate.value,
            {"cache": cache_of(self.timing)},
            limit_source=reason,
            **self.estimate.columns,
            **self.timing.telemetry.row_columns(),
        )

    def plot(self) -> "Figure":
        """Plot the raw samples in the order in which they were taken, with the median and its interval."""
        from hyperion.measure.api.display import draw_samples

        return draw_samples({self.label: self.timing}, self.device.name, self.verdict)


@dataclass(frozen=True, repr=False)
class ComparisonAnswer(Answer):
    """The comparison of two functions.

    Args:
        labels, timings: labels and timings of A and B. Sample i of A and sample i of B were taken in the same round.
        difference: the largest difference between the outputs over all compared calls. None if no call was compared.
        output_reason: reason why the outputs were not compared. "" if they were compared.
        minimum_samples: the requested minimum number of samples.
        notes: warnings about the outputs.
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
        """Speed of A divided by speed of B. A value above 1 means that A is faster.

        With fewer than 30 samples, the interval is extended so that it contains the interval computed from the order statistics
        of both functions.
        """
        a, b = (timing.samples_s for timing in self.timings)
        ratio = ratio_estimate(a, b)
        if len(a) >= LEAST_FOR_THE_BOOTSTRAP:
            return ratio
        # From 7 samples on, each interval contains its median with a probability of at least 97.5 %, so the probability that both
        # do is at least 95 %. With fewer samples, it is lower even for the ranges, and `verdict` says so.
        (low_a, high_a), (low_b, high_b) = (order_interval(samples, (1 + CONFIDENCE) / 2) for samples in (a, b))
        return Estimate(ratio.value, min(ratio.ci_low, low_b / high_a), max(ratio.ci_high, high_b / low_a), ratio.n)

    @property
    def output_error(self) -> float | None:
        """Relative Frobenius error of the outputs; None if they were not compared."""
        return None if self.difference is None else self.difference.error

    @property
    def output_tolerance(self) -> float | None:
        """Largest allowed `output_error`; None if the outputs were not compared."""
        return None if self.difference is None else self.difference.tolerance

    @property
    def outputs_agree(self) -> bool | None:
        """Whether the outputs agree; None if they were not compared."""
        return None if self.difference is None else self.difference.agrees

    @property
    def verdict(self) -> str:
        """Text that names the faster function, or says that there is no difference, if the interval of `ratio` contains 1."""
        (a, b), ratio = self.labels, self.ratio
        if ratio.ci_low > 1:
            return f"{a} is {_times(ratio)} faster than {b}"
        if ratio.ci_high < 1:
            return f"{b} is {_times(ratio.map(lambda speed: 1 / speed))} faster than {a}"
        return f"no difference shown: the speed of {a} is {_times(ratio)} that of {b}"

    @property
    def outputs(self) -> str:
        """One line of text about the comparison of the outputs."""
        if self.difference is None:
            return f"outputs not compared: {self.output_reason}"
        result = "outputs agree" if self.outputs_agree else "OUTPUTS DIFFER"
        difference = self.difference
        return (
            f"{result}: relative error {difference.error:.2g}, tolerance {difference.tolerance:.2g}; worst element "
            f"{difference.worst}, error {difference.element_error:.2g}, tolerance {difference.element_tolerance:.2g}"
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

    def row(self, *, notebook: str, experiment: str, variant: str, **columns: Any) -> Row:
        """Return a row of the metric `speedup`, which is the speed of A divided by the speed of B.

        The columns check, check_error and check_tolerance contain the comparison of the outputs.

        Raises:
            RowError: the outputs differ.
        """
        place = {"notebook": notebook, "experiment": experiment, "variant": variant, **columns}
        difference, check = self.difference, {}
        if difference is not None and difference.error <= difference.tolerance and not difference.agrees:
            check = {
                "check": "worst element of the outputs",
                "check_error": difference.element_error,
                "check_tolerance": difference.element_tolerance,
            }
        elif difference is not None:
            check = {
                "check": "relative error of the outputs",
                "check_error": difference.error,
                "check_tolerance": difference.tolerance,
            }
        about = {"a": self.labels[0], "b": self.labels[1], "cache": cache_of(self.timings[0])}
        reason = "" if columns.get("limit") is not None else "no limit: how slow B may be is not bounded"
        ratio = self.ratio
        return self._row(
            place,
            "speedup",
            ratio.value,
            about,
            **ratio.columns,
            limit_source=reason,
            **check,
            **self.timings[0].telemetry.row_columns(),
        )

    def plot(self) -> "Figure":
        """Plot the raw samples of both functions in the order in which they were taken, with their medians and intervals."""
        from hyperion.measure.api.display import draw_samples

        return draw_samples(dict(zip(self.labels, self.timings, strict=True)), self.device.name, self.verdict)


def cache_of(timing: Timing) -> str:
    """Return "cold" if the last-level cache was flushed before each sample, else "hot"."""
    return "cold" if timing.cold else "hot"


def _doubts(timing: Timing, estimate: Estimate | None, minimum_samples: int) -> list[str]:
    doubts = [timing.unsteady] if timing.unsteady else []
    taken = len(timing.samples_s)
    if taken < minimum_samples:
        doubts.append(f"only {taken} of {minimum_samples} samples fit into the time limit")
    # All samples lie on one side of the median with probability 2·2^-n.
    coverage = 1 - 2.0 ** (1 - taken)
    if coverage < CONFIDENCE:
        doubts.append(f"the range of {taken} samples contains the median with a probability of {100 * coverage:.0f} %, not 95 %")
    if estimate is not None and timing.stopped != "interval":
        half = (estimate.ci_high - estimate.ci_low) / 2 / estimate.value if estimate.value else 0.0
        if half > RELATIVE_INTERVAL:
            doubts.append(f"the interval is ±{100 * half:.2g} % at the time limit")
    if timing.telemetry.throttle == BUSY:
        doubts.append("other processes used more than a tenth of the cores")
    elif timing.telemetry.throttle not in (None, "none"):
        doubts.append(f"the device throttled ({timing.telemetry.throttle})")
    return doubts


def _times(ratio: Estimate) -> str:
    return f"{ratio.value:.4g} × (95 % CI {ratio.ci_low:.4g} … {ratio.ci_high:.4g})"


def time_scale(seconds: float) -> tuple[float, str]:
    """Return (seconds per unit, unit) for the largest of s, ms, µs and ns in which the time is at least 1."""
    factor, prefix = next((pair for pair in _SMALL if seconds >= pair[0]), _SMALL[-1])
    return factor, f"{prefix}s"


def seconds_text(seconds: float) -> str:
    """Format seconds: 0.0012345 -> '1.234 ms'."""
    factor, unit = time_scale(seconds)
    return f"{seconds / factor:.4g} {unit}"


def estimate_text(estimate: Estimate) -> str:
    """Format an estimate in seconds: '1.234 ms (95 % CI 1.230 … 1.238, n=64)'."""
    factor, unit = time_scale(estimate.value)
    low, high = estimate.ci_low / factor, estimate.ci_high / factor
    return f"{estimate.value / factor:.4g} {unit} (95 % CI {low:.4g} … {high:.4g}, n={estimate.n})"


def flops_text(flops: float) -> str:
    """Format FLOPs: 2e9 -> '2 GFLOP'."""
    factor, prefix = next((pair for pair in _LARGE if abs(flops) >= pair[0]), _LARGE[-1])
    return f"{flops / factor:.4g} {prefix}FLOP"


def bytes_scale(count: float) -> tuple[float, str]:
    """Return (bytes per unit, unit) for the largest binary unit in which the size is at least 1."""
    factor, prefix = next((pair for pair in _BINARY if abs(count) >= pair[0]), _BINARY[-1])
    return factor, f"{prefix}B"


def bytes_text(count: float) -> str:
    """Format bytes: 3 << 20 -> '3 MiB'."""
    factor, unit = bytes_scale(count)
    return f"{count / factor:.4g} {unit}"
