"""The energy of a timed function, from the power that was read while its samples were taken."""

from dataclasses import dataclass

from hyperion.hardware import Telemetry
from hyperion.measure.clock.timing import Timing
from hyperion.results import Estimate

LEAST_READINGS = 3
LEAST_INTERVALS = 3


@dataclass(frozen=True)
class Energy:
    """The energy of one call: the power during sampling times the time of a call.

    The power is the median of all readings during sampling. With cold caches, the readings cover both the calls and the cache
    flushes. Drivers average the power over up to a second (NVML since Ampere), so the energy is less accurate if sampling was
    shorter. `counter_difference` compares the result with the energy counter of the device.

    Args:
        joules: median power times the time of a call, in joules. Its interval is computed from the interval of the time. None if
            the power is unknown.
        reason: reason why `joules` is None. "" if it is known.
        power_w: median power during sampling in watts.
        scope: the part of the hardware whose power was read. "device", or "module" if the reading includes both dies of an
            MI250X.
        counter_difference: E / (P·T) - 1, where E is the energy during sampling according to the energy counter, P is the median
            power, and T is the duration of sampling. None if the device has no energy counter.
    """

    joules: Estimate | None
    reason: str = ""
    power_w: float | None = None
    scope: str | None = None
    counter_difference: float | None = None

    def j_per_tflop(self, flops: float) -> Estimate | None:
        """Return the joules per 10¹² FLOPs of a call that executes `flops` FLOPs, or None if the energy is unknown."""
        return self._per(flops / 1e12)

    def j_per_gb(self, traffic_bytes: float) -> Estimate | None:
        """Return the joules per 10⁹ bytes of a call that moves `traffic_bytes` bytes, or None if the energy is unknown."""
        return self._per(traffic_bytes / 1e9)

    def _per(self, work: float) -> Estimate | None:
        return None if self.joules is None else self.joules.map(lambda joules: joules / work)


def energy_of(timing: Timing) -> Energy:
    """Return the energy of one call of a timed function. If the energy is unknown, the result contains the reason."""
    state = timing.telemetry
    reason = _missing_readings(state)
    if reason or state.power_w is None:
        return Energy(None, reason)
    power_w = state.power_w
    difference = None
    if state.energy_j is not None:
        difference = state.energy_j / (power_w * state.window_s) - 1
    joules = timing.estimate.map(lambda seconds: seconds * power_w)
    return Energy(joules, "", power_w, state.power_scope, difference)


def _missing_readings(state: Telemetry) -> str:
    """Return the reason why there are not enough power readings, or "" if there are enough."""
    if state.power_w is None:
        return f"no power: {state.unreadable.get('power_w', 'it was not read')}"
    if state.samples < LEAST_READINGS:
        return f"{state.samples} readings of power, {LEAST_READINGS} are needed: time it for longer"
    if state.window_s < LEAST_INTERVALS * state.interval_s or state.window_s <= 0:
        needed_s = LEAST_INTERVALS * state.interval_s
        return f"power was read over {state.window_s:.3g} s, {needed_s:.3g} s are needed: time it for longer"
    return ""
