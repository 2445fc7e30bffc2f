"""Joules of timed work: power read beside the samples, times their time, and the device's own counter to check it.

Power is the median of readings over the whole sampling, cache flushes between the calls included: of cold calls it is that
of call and flush together. A driver may average power over up to a second (NVML does since Ampere), so that work shorter
than that is told less surely; the counter, where there is one, says how far off the sum is.
"""

from dataclasses import dataclass

from hyperion.hardware import Telemetry
from hyperion.measure.clock.timing import Timing
from hyperion.results import Estimate

LEAST_READINGS = 3
LEAST_INTERVALS = 3


@dataclass(frozen=True)
class Energy:
    """Energy of one call.

    Args:
        joules: median power times the time of a call, with the interval of that time; None when it cannot be told.
        reason: why `joules` is None, else "".
        power_w: median power over the samples.
        scope: whose power it is: "device", or "module" where the reading covers both dies of an MI250X.
        counter_difference: the device's energy counter over the sampling, against median power times that time, minus 1;
            None without a counter.
    """

    joules: Estimate | None
    reason: str = ""
    power_w: float | None = None
    scope: str | None = None
    counter_difference: float | None = None

    def j_per_tflop(self, flops: float) -> Estimate | None:
        """Joules for 10¹² operations, of a call that does `flops`; None with the reason in `reason`."""
        return self._per(flops / 1e12)

    def j_per_gb(self, traffic_bytes: float) -> Estimate | None:
        """Joules for 10⁹ bytes, of a call that moves `traffic_bytes`; None with the reason in `reason`."""
        return self._per(traffic_bytes / 1e9)

    def _per(self, work: float) -> Estimate | None:
        return None if self.joules is None else self.joules.map(lambda joules: joules / work)


def energy_of(timing: Timing) -> Energy:
    """The energy of one call of a timed function, or why it cannot be told: no readable power, or too few readings of it."""
    state = timing.telemetry
    if reason := _too_little(state):
        return Energy(None, reason)
    difference = None
    if state.energy_j is not None:
        difference = state.energy_j / (state.power_w * state.window_s) - 1
    joules = timing.estimate.map(lambda seconds: seconds * state.power_w)
    return Energy(joules, "", state.power_w, state.power_scope, difference)


def _too_little(state: Telemetry) -> str:
    """Why these readings tell no energy, or ""."""
    if state.power_w is None:
        return f"no power: {state.unreadable.get('power_w', 'it was not read')}"
    if state.samples < LEAST_READINGS:
        return f"{state.samples} readings of power, {LEAST_READINGS} are needed: time it for longer"
    if state.window_s < LEAST_INTERVALS * state.interval_s or state.window_s <= 0:
        needed_s = LEAST_INTERVALS * state.interval_s
        return f"power was read over {state.window_s:.3g} s, {needed_s:.3g} s are needed: time it for longer"
    return ""
