"""Explain why the measured rate of a matrix product is lower than the peak in the data sheet.

The result is a list of factors whose product is the measured rate divided by the peak. Four factors belong to known limits:
clock, tiles, memory and launch. Each of them is the rate with this limit divided by the rate without it. The last factor,
"unexplained", is the part of the gap that the known limits do not explain.

If the last factor is above 1, the matrix product was faster than the other factors allow, so one of these factors is too low. For
example, the clock was read at another time, or the device can exceed the peak.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, isfinite, prod

from hyperion.errors import HyperionError
from hyperion.hardware import Device, gemm_path, lookup
from hyperion.hardware.specs import load_specifications
from hyperion.measure.products.dispatch import Product

# Sizes (rows, columns) of the output tiles that one compute unit computes, in the BLAS libraries of NVIDIA and AMD.
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))


@dataclass(frozen=True)
class Tiling:
    """The output of a matrix product, divided into tiles of one size.

    Args:
        tile: rows and columns of a tile.
        tiles: total number of tiles, over all parts of K and all products of the batch.
        waves: number of waves. In a wave, each compute unit computes one tile. In the last wave, some units may be idle.
        share: FLOPs of the matrix product divided by the FLOPs that all units could execute in these waves, 0 to 1.

    Source: NVIDIA, Matrix Multiplication Background User's Guide, sections on tile and wave quantization.
    """

    tile: tuple[int, int]
    tiles: int
    waves: int
    share: float

    def __str__(self) -> str:
        return f"{self.tiles} tiles of {self.tile[0]} x {self.tile[1]} in {self.waves} wave{'' if self.waves == 1 else 's'}"


def tile(m: int, n: int, batch: int, units: int, tile: tuple[int, int], splits: int = 1) -> Tiling:
    """Divide the output of a matrix product, of shape [batch, m, n], into tiles for `units` compute units.

    Args:
        splits: number of parts into which K is split. Each part is computed as a separate tile, and the partial tiles are summed.
    """
    rows, columns = tile
    tiles = batch * ceil(m / rows) * ceil(n / columns) * splits
    # All tiles take the same time, so a wave with one tile takes as long as a wave with a tile for every unit.
    waves = ceil(tiles / units)
    return Tiling(tile, tiles, waves, batch * m * n * splits / (waves * units * rows * columns))


def best_tiling(m: int, n: int, units: int, batch: int = 1, tolerance: float = 0.0) -> Tiling:
    """Return the tiling with the largest share, among the tile sizes of `TILES`. K is not split.

    Args:
        tolerance: largest loss in `Tiling.share` that is accepted for a larger tile. Larger tiles are preferred because they load
            fewer bytes per FLOP.
    """
    tilings = [tile(m, n, batch, units, size) for size in TILES]
    least = max(tiling.share for tiling in tilings) - tolerance
    return max((tiling for tiling in tilings if tiling.share >= least), key=lambda tiling: (prod(tiling.tile), tiling.share))


UNEXPLAINED = "unexplained"
_LARGER_TILE = 0.03  # libraries use a larger tile if it lowers `Tiling.share` by at most about this value


@dataclass(frozen=True)
class NominalPeak:
    """The peak rate in a data sheet.

    Args:
        tflops: peak in 10¹² FLOP/s.
        clock_mhz: clock frequency for which the data sheet states the peak. None if it does not give the clock.
        units: number of compute units of the device. None if unknown.
        source: source of the peak.
    """

    tflops: float
    clock_mhz: float | None
    units: int | None
    source: str


@dataclass(frozen=True)
class GapFactor:
    """One factor between the peak and the measured rate.

    Args:
        name: name of the limit.
        factor: the rate with this limit divided by the rate without it. None if it is unknown. The effect of an unknown factor is
            part of the last factor of a gap.
        tflops: the rate with this limit and all limits before it, in 10¹² FLOP/s.
        reason: how the factor is computed, or why it is unknown.
    """

    name: str
    factor: float | None
    tflops: float
    reason: str


@dataclass(frozen=True)
class Gap:
    """The factors that reduce the peak to the measured rate.

    The last factor, `UNEXPLAINED`, is the measured rate divided by the rate that the known limits allow. It is 1 if they explain
    the whole gap. The product of all known factors is `measured_tflops / peak.tflops`.
    """

    peak: NominalPeak
    measured_tflops: float
    factors: tuple[GapFactor, ...]

    def __str__(self) -> str:
        lines = [f"{self.peak.tflops:.4g} TFLOPS data sheet ({self.peak.source})"]
        for step in self.factors:
            factor = "skipped" if step.factor is None else f"x {step.factor:.3f}"
            lines.append(f"{factor:>8} {step.name}: {step.reason}")
        return "\n".join([*lines, f"{self.measured_tflops:.4g} TFLOPS measured"])


def nominal_peak(device: Device, dtype: str) -> tuple[NominalPeak | None, str]:
    """Return the peak in the data sheet for matrix products of this dtype.

    Returns:
        (peak, ""), or (None, the reason why there is no peak).
    """
    sheet, reason = lookup(device)
    if sheet is None:
        return None, reason
    path = gemm_path(dtype, device)
    peak = sheet.peak(path)
    if peak.nominal_tflops is None:
        return None, peak.reason or f"the data sheet gives no {path} peak"
    source = f"{path}; {peak.source}"
    if device.kind == "cpu":
        return NominalPeak(peak.nominal_tflops, device.nominal_clock_mhz, device.compute_units, source), ""
    entry = next(entry for entry in load_specifications().device if entry.name == sheet.name)
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
    """Explain the measured rate of one matrix product by the factors between the peak and this rate.

    Args:
        product: the matrix product.
        measured_tflops: its measured rate in 10¹² FLOP/s.
        peak: result of `nominal_peak` for the dtype of the product.
        clock_mhz: clock frequency of the compute units during the measurement. None if it could not be read.
        bandwidth_gb_s: measured memory bandwidth of the device in 10⁹ bytes/s. None if unknown.
        launch_time_s: launch overhead per call in seconds. None if the measured time does not include the overhead.

    Raises:
        HyperionError: a rate, clock, bandwidth or time is not a positive number.
    """
    given = {"measured_tflops": measured_tflops, "peak": peak.tflops, "clock_mhz": clock_mhz, "bandwidth_gb_s": bandwidth_gb_s}
    wrong = [name for name, value in given.items() if value is not None and not (isfinite(value) and value > 0)]
    if launch_time_s is not None and not (isfinite(launch_time_s) and launch_time_s >= 0):
        wrong.append("launch_time_s")
    if wrong:
        raise HyperionError(
            f"{' and '.join(wrong)} must be positive numbers", where="explain_gap", next_step="pass None for an unknown value"
        )
    factors: list[GapFactor] = []
    rate = peak.tflops
    for name, factor, reason in _known(product, peak, clock_mhz, bandwidth_gb_s, launch_time_s):
        # The factors for memory and launch depend on the rate that the previous factors allow.
        share = factor(rate) if callable(factor) else factor
        rate = rate if share is None else rate * share
        factors.append(GapFactor(name, share, rate, reason))
    # The remaining part of the ratio, so that the product of all factors gives the measured rate exactly.
    left = measured_tflops / peak.tflops / prod(step.factor for step in factors if step.factor is not None)
    return Gap(peak, measured_tflops, (*factors, GapFactor(UNEXPLAINED, left, measured_tflops, _residual(left))))


def _known(
    product: Product, peak: NominalPeak, clock_mhz: float | None, bandwidth_gb_s: float | None, launch_time_s: float | None
) -> Iterator[tuple[str, float | Callable[[float], float] | None, str]]:
    """Yield (name, factor, reason) for each known limit.

    Some factors depend on the rate that the previous factors allow. Such a factor is a function that takes this rate and returns
    the factor. An unknown factor is None.
    """
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
        # FLOP/byte times 10⁹ bytes/s, converted to 10¹² FLOP/s.
        roof = product.intensity * bandwidth_gb_s / 1e3
        allowed = f"{roof:,.0f}" if roof >= 1e4 else f"{roof:.4g}"
        reason = f"{product.intensity:.4g} FLOP/byte at {bandwidth_gb_s:.4g} GB/s allow {allowed} TFLOPS"
        yield "memory", lambda rate: min(1.0, roof / rate), reason
    if launch_time_s is None:
        yield "launch", None, "no launch time given"
    else:
        work = product.flops / 1e12
        reason = f"{launch_time_s * 1e6:.3g} us of waiting in addition to the work"
        # The rate with launch overhead is work / (work / rate + launch), so the factor is 1 / (1 + launch·rate / work).
        yield "launch", lambda rate: 1 / (1 + launch_time_s * rate / work), reason


def _residual(left: float) -> str:
    if left > 1:
        return "more was reached than the factors above allow: one of them is too low"
    return "no limit named here accounts for it"
