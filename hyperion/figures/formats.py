"""Format numbers with the digits that their measurement supports."""

import math

_DIGITS = 4


def number(value: float | None, digits: int = _DIGITS) -> str:
    """Return `value` with `digits` significant digits and thousands separators, "" for None."""
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
    """Return `value` to the second digit of its interval's width; further digits are noise."""
    decimals = _decimals(value, low, high)
    return number(value) if value is None or decimals is None else f"{value:,.{decimals}f}"


def interval(value: float | None, low: float | None, high: float | None) -> str:
    """Return a confidence interval as "low – high", with the decimals of `number_within`."""
    if low is None or high is None:
        return ""
    decimals = _decimals(value, low, high)
    if decimals is None:
        return f"{number(low)} – {number(high)}"
    return f"{low:,.{decimals}f} – {high:,.{decimals}f}"


def percent(fraction: float | None, signed: bool = False) -> str:
    """Return a fraction in percent with one decimal, "" for None."""
    if fraction is None:
        return ""
    return f"{100 * fraction:{'+' if signed else ''}.1f}"


def quoted_value(value: float, unit: str) -> str:
    """Return a value with its unit for a sentence; fractions in percent."""
    if unit == "fraction":
        # Below this 0.0 % would be left.
        return f"{percent(value)} %" if value == 0 or abs(value) >= 5e-4 else f"{value:.1e}"
    shown = f"{number(value / 1e6)} M" if abs(value) >= 1e6 else number(value)
    return shown + {"1": "", "perplexity": "", "ratio": " ×"}.get(unit, f" {unit}")


def items(count: float) -> str:
    """Return a count for an axis: "20 M", "1.5 k", "512"."""
    for size, mark in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= size:
            return f"{count / size:g}{mark}"
    return f"{count:g}"


def byte_size(count: float) -> str:
    """Return bytes in the largest binary unit that gives at least 1: "64 B", "4 KiB", "1.5 GiB"."""
    for size, mark in ((2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB")):
        if count >= size:
            return f"{count / size:.3g}{mark}"
    return f"{count:.4g} B"


def memory_unit(gib: list[float]) -> tuple[float, str]:
    """Return (units in a GiB, the unit's name): MiB where all values are below half a GiB."""
    return (1.0, "GiB") if max(gib, default=1.0) >= 0.5 else (1024.0, "MiB")


def _decimals(value: float | None, low: float | None, high: float | None) -> int | None:
    """Return the decimals for a value and its interval, None without an interval or for a tiny value."""
    if value is None or low is None or high is None or high <= low or abs(value) < 1e-4:
        return None
    # Between three and six significant digits: a narrow interval needs no more, a wide one no fewer.
    magnitude = math.floor(math.log10(abs(value)))
    return max(0, 2 - magnitude, min(1 - math.floor(math.log10(high - low)), 5 - magnitude))
