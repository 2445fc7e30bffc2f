"""Clock, power, temperature and throttling of a device, now or over a region. What is unreadable is None, never 0."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

QUANTITIES = ("clock_mhz", "memory_clock_mhz", "power_w", "temperature_c", "throttle")


@dataclass(frozen=True)
class Telemetry:
    """One reading, or the medians of `samples` readings.

    throttle is 'none' or the slow-down reasons joined by '+'. power_scope is 'device', or 'module' where the reading
    covers both dies of an MI250X. unreadable names each missing quantity with its reason.

    energy_j is the device's own energy counter: since some moment in one reading, over the time between the first and the
    last reading in medians of several; None where there is no such counter. window_s is that time, interval_s what lay
    between two readings; 0 in a single reading.
    """

    clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: str | None = None
    power_scope: str | None = None
    unreadable: dict[str, str] = field(default_factory=dict)
    samples: int = 1
    energy_j: float | None = None
    window_s: float = 0.0
    interval_s: float = 0.0


Reader = Callable[[], Telemetry]


def unreadable(reason: str, samples: int = 1) -> Telemetry:
    """A reading without any value, for this reason."""
    return Telemetry(unreadable=dict.fromkeys(QUANTITIES, reason), samples=samples)


def from_raw(raw: dict[str, float | str | None], reason: str, power_scope: str = "device") -> Telemetry:
    """A reading from what a library returned; zeros and missing values become None with `reason`."""
    values: dict[str, Any] = {name: raw.get(name) or None for name in QUANTITIES}
    missing = {name: reason for name, value in values.items() if value is None}
    scope = power_scope if values["power_w"] else None
    energy_j = cast(float | None, raw.get("energy_j") or None)
    return Telemetry(**values, power_scope=scope, unreadable=missing, energy_j=energy_j)


def median_of(readings: list[Telemetry]) -> Telemetry:
    """Medians of the readable values of several readings; a quantity read at no moment keeps its reason."""
    if not readings:
        return unreadable("no reading was taken", samples=0)
    medians = {}
    for name in ("clock_mhz", "memory_clock_mhz", "power_w", "temperature_c"):
        values = [value for reading in readings if (value := getattr(reading, name)) is not None]
        medians[name] = statistics.median(values) if values else None
    states = [reading.throttle for reading in readings if reading.throttle is not None]
    reasons = sorted({reason for state in states for reason in state.split("+")} - {"none"})
    medians["throttle"] = ("+".join(reasons) or "none") if states else None
    reason_of = {name: why for reading in readings for name, why in reading.unreadable.items()}
    scopes = [reading.power_scope for reading in readings if reading.power_scope]
    return Telemetry(
        **medians,
        power_scope=scopes[0] if scopes else None,
        unreadable={name: reason_of[name] for name, value in medians.items() if value is None and name in reason_of},
        samples=len(readings),
        energy_j=_counted_between(readings[0].energy_j, readings[-1].energy_j),
    )


def _counted_between(first: float | None, last: float | None) -> float | None:
    """What a counter counted between two readings; None without a counter, or when it was reset in between."""
    return last - first if first is not None and last is not None and last > first else None
