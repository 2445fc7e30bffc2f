"""From the data sheet's peak to a measured rate, factor by factor: what the clock, the tiles, the memory and the launch take,
and what nothing here explains.

The factors multiply to measured / peak. Each is what a limit that is known leaves of the rate before it; the last one,
"unexplained", is whatever is still missing. Above 1 it says that more was reached than the factors before it allow: one of
them is too low, a clock read at another moment say, or a peak that the device may exceed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, isfinite, prod

from hyperion.errors import HyperionError
from hyperion.hardware import Device, gemm_path, lookup
from hyperion.hardware.specs import load_specifications
from hyperion.measure.products.product_formulas import Product

# Rows and columns of the output that one unit works on, as the BLAS libraries of both vendors choose them.
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))


@dataclass(frozen=True)
class Tiling:
    """A product cut into tiles of one size.

    Args:
        tile: rows and columns of a tile.
        tiles: how many there are, those of all splits and of a batch together.
        waves: rounds in which all units take a tile each; the last may leave most of them idle.
        share: of the device's arithmetic in these rounds, what goes into the output.
    """

    tile: tuple[int, int]
    tiles: int
    waves: int
    share: float

    def __str__(self) -> str:
        return f"{self.tiles} tiles of {self.tile[0]} x {self.tile[1]} in {self.waves} wave{'' if self.waves == 1 else 's'}"


def tile(m: int, n: int, batch: int, units: int, tile: tuple[int, int], splits: int = 1) -> Tiling:
    """Cut a product's output [batch, m, n] into tiles for `units` units.

    Args:
        splits: parts into which K is cut, each a tile of its own, to be added up afterwards.
    """
    rows, columns = tile
    tiles = batch * ceil(m / rows) * ceil(n / columns) * splits
    waves = ceil(tiles / units)
    return Tiling(tile, tiles, waves, batch * m * n * splits / (waves * units * rows * columns))


def best_tiling(m: int, n: int, units: int, batch: int = 1, tolerance: float = 0.0) -> Tiling:
    """Of the usual tile sizes the one that leaves least idle; K is not split.

    Args:
        tolerance: share that may be given up for a larger tile, which loads less for each product of two numbers.
    """
    tilings = [tile(m, n, batch, units, size) for size in TILES]
    least = max(tiling.share for tiling in tilings) - tolerance
    return max((tiling for tiling in tilings if tiling.share >= least), key=lambda tiling: (prod(tiling.tile), tiling.share))


UNEXPLAINED = "unexplained"
_LARGER_TILE = 0.03  # a library gives up about this share of the units for tiles that load less


@dataclass(frozen=True)
class NominalPeak:
    """What a data sheet promises.

    Args:
        clock_mhz: that the promise is made at, None where the vendor does not say.
        units: compute units of the device, None where unknown.
        source: where it comes from.
    """

    tflops: float
    clock_mhz: float | None
    units: int | None
    source: str


@dataclass(frozen=True)
class GapFactor:
    """One step down, or up, from the peak.

    Args:
        factor: rate after over rate before; None where it could not be told: its share is then in `unexplained`.
        tflops: the rate that is left after it.
        reason: how the factor comes about, or why there is none.
    """

    name: str
    factor: float | None
    tflops: float
    reason: str


@dataclass(frozen=True)
class Gap:
    """The way from peak to measured rate; the factors that are known multiply to `measured_tflops / peak.tflops`."""

    peak: NominalPeak
    measured_tflops: float
    factors: tuple[GapFactor, ...]

    @property
    def unexplained(self) -> float:
        """Measured over what the known limits allow: 1 where they explain everything."""
        return self.factors[-1].factor

    def __str__(self) -> str:
        lines = [f"{self.peak.tflops:.4g} TFLOPS data sheet ({self.peak.source})"]
        for step in self.factors:
            factor = "skipped" if step.factor is None else f"x {step.factor:.3f}"
            lines.append(f"{factor:>8} {step.name}: {step.reason}")
        return "\n".join([*lines, f"{self.measured_tflops:.4g} TFLOPS measured"])


def nominal_peak(device: Device, dtype: str) -> tuple[NominalPeak | None, str]:
    """(the data sheet's peak for products of this type, ''), or (None, why there is none)."""
    found, reason = lookup(device)
    if found is None:
        return None, reason
    path = gemm_path(dtype, device)
    peak = found.peak(path)
    if peak.nominal_tflops is None:
        return None, peak.reason or f"the data sheet gives no {path} peak"
    source = f"{path}; {peak.source}"
    if device.kind == "cpu":
        return NominalPeak(peak.nominal_tflops, device.nominal_clock_mhz, device.compute_units, source), ""
    entry = next(entry for entry in load_specifications().device if entry.name == found.name)
    return NominalPeak(peak.nominal_tflops, entry.paths[path].clock_mhz, entry.compute_units, source), ""


def explain_gap(
    product: Product,
    measured_tflops: float,
    peak: NominalPeak,
    *,
    clock_mhz: float | None = None,
    bandwidth_gb_s: float | None = None,
    launch_time_s: float | None = None,
) -> Gap:
    """Explain the rate of one product.

    Args:
        peak: of `nominal_peak`, for the product's dtype.
        clock_mhz: of the compute units while it ran, None where unreadable.
        bandwidth_gb_s: of memory, as measured on this device.
        launch_time_s: seconds of each call in which the units wait for its start; None where the time was taken without.

    Raises:
        HyperionError: a rate, clock, bandwidth or time that is none.
    """
    given = {"measured_tflops": measured_tflops, "peak": peak.tflops, "clock_mhz": clock_mhz, "bandwidth_gb_s": bandwidth_gb_s}
    wrong = [name for name, value in given.items() if value is not None and not (isfinite(value) and value > 0)]
    if launch_time_s is not None and not (isfinite(launch_time_s) and launch_time_s >= 0):
        wrong.append("launch_time_s")
    if wrong:
        raise HyperionError(
            f"{' and '.join(wrong)} must be positive numbers", where="explain_gap", next_step="pass None for what is unknown"
        )
    factors, rate = [], peak.tflops
    for name, factor, reason in _known(product, peak, clock_mhz, bandwidth_gb_s, launch_time_s):
        # The memory's and the launch's share depend on the rate that the factors before have left.
        share = factor(rate) if callable(factor) else factor
        rate = rate if share is None else rate * share
        factors.append(GapFactor(name, share, rate, reason))
    left = measured_tflops / peak.tflops / prod(step.factor for step in factors if step.factor is not None)
    return Gap(peak, measured_tflops, (*factors, GapFactor(UNEXPLAINED, left, measured_tflops, _residual(left))))


def _known(product: Product, peak: NominalPeak, clock_mhz, bandwidth_gb_s, launch_time_s) -> Iterator[tuple]:
    """(name, factor or a function of the rate before it, reason) of every factor but the residual."""
    if clock_mhz is None or peak.clock_mhz is None:
        yield "clock", None, "the clock was not readable" if clock_mhz is None else "the data sheet names no clock"
    else:
        yield ("clock", clock_mhz / peak.clock_mhz, f"{clock_mhz:.0f} MHz measured, {peak.clock_mhz:.0f} MHz in the data sheet")
    if peak.units is None:
        yield "tiles", None, "the number of compute units is unknown"
    else:
        tiling = best_tiling(product.m, product.n, peak.units, product.batch, _LARGER_TILE)
        yield "tiles", tiling.share, f"{tiling} over {peak.units} units"
    if bandwidth_gb_s is None:
        yield "memory", None, "no bandwidth was measured"
    else:
        roof = product.intensity * bandwidth_gb_s / 1e3
        allowed = f"{roof:,.0f}" if roof >= 1e4 else f"{roof:.4g}"
        reason = f"{product.intensity:.4g} FLOP/byte at {bandwidth_gb_s:.4g} GB/s allow {allowed} TFLOPS"
        yield "memory", lambda rate: min(1.0, roof / rate), reason
    if launch_time_s is None:
        yield "launch", None, "no launch time given"
    else:
        work = product.flops / 1e12
        reason = f"{launch_time_s * 1e6:.3g} us of waiting beside the work"
        yield "launch", lambda rate: 1 / (1 + launch_time_s * rate / work), reason


def _residual(left: float) -> str:
    if left > 1:
        return "more was reached than the factors above allow: one of them is too low"
    return "no limit named here accounts for it"
