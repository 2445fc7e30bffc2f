"""Format times, FLOPs and bytes: four digits and a fitting prefix."""

from hyperion.results import Estimate
from hyperion.units import GIB, KIB, MIB

_SMALL = ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
_LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_BINARY = ((1024 * GIB, "Ti"), (GIB, "Gi"), (MIB, "Mi"), (KIB, "Ki"), (1, ""))


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
