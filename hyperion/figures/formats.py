"""Numbers as text: as many digits as the measurement carries, and no more."""

import math

_DIGITS = 4


def number(value: float | None, digits: int = _DIGITS) -> str:
    """`value` to `digits` significant digits, integers and large numbers with thousands marks, "" for None."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits - 2}e}"
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def number_within(value: float | None, low: float | None, high: float | None) -> str:
    """`value` to the digits that its interval leaves certain: two digits of the interval's width."""
    return f"{value:,.{_decimals(value, low, high)}f}" if _usable(value, low, high) else number(value)


def interval(value: float | None, low: float | None, high: float | None) -> str:
    """A confidence interval as "low – high", to the same digits as `number_within` gives the value."""
    if low is None or high is None:
        return ""
    if not _usable(value, low, high):
        return f"{number(low)} – {number(high)}"
    decimals = _decimals(value, low, high)
    return f"{low:,.{decimals}f} – {high:,.{decimals}f}"


def percent(fraction: float | None, signed: bool = False) -> str:
    """A fraction as percent: one decimal, "" for None."""
    if fraction is None:
        return ""
    return f"{100 * fraction:{'+' if signed else ''}.1f}"


def items(count: float) -> str:
    """A count for an axis: 20 M, 1.5 k, 512."""
    for size, mark in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= size:
            return f"{count / size:g}{mark}"
    return f"{count:g}"


def byte_size(count: float) -> str:
    """Bytes in the largest binary unit that leaves a number of at least 1: 64 B, 4 KiB, 1.5 GiB."""
    for size, mark in ((2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB")):
        if count >= size:
            return f"{count / size:.3g}{mark}"
    return f"{count:.4g} B"


def _usable(value: float | None, low: float | None, high: float | None) -> bool:
    return None not in (value, low, high) and high > low and abs(value) >= 1e-4


def _decimals(value: float, low: float, high: float) -> int:
    certain = 1 - math.floor(math.log10(high - low))
    # Neither does a very narrow interval make eight digits useful, nor a very wide one three digits useless.
    magnitude = math.floor(math.log10(abs(value)))
    return max(0, 2 - magnitude, min(certain, 5 - magnitude))


def memory_unit(gib: list[float]) -> tuple[float, str]:
    """Return (units in a GiB, the unit's name): MiB where all values are below half a GiB."""
    return (1.0, "GiB") if max(gib, default=1.0) >= 0.5 else (1024.0, "MiB")
