"""Predict rates as data-sheet ceilings times the efficiency that a reference machine reached for work of the same size.

A ceiling is an upper bound on a rate: no measurement may exceed it. A prediction is the expected rate and may be too high or too
low. It comes from a curve that gives the time of a call:

    time = overhead + a * (seconds of the arithmetic at its ceiling) + b * (seconds of the traffic at its ceiling)

The traffic is the number of bytes that the call reads and writes. For small arrays and matrices, the rate is low because of the
overhead. For large ones, it approaches a constant share of the ceiling.

The curves in efficiency.toml are fitted to reference runs (`hyperion.commands.efficiency_fit`). A curve is used only on devices
of the same architecture. If a run has its own rows of square products or memory streams, its later predictions use a curve fitted
to these rows instead. A prediction's interval contains the measured rate in about 80 % of cases.
"""

import functools
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hyperion.chapter.context import Context, Forecast
from hyperion.chapter.rows import bandwidth_limit, datasheet_ceilings, gemm_limit, link_limit, product_bytes
from hyperion.errors import HyperionError, not_none
from hyperion.forms import read_form
from hyperion.hardware import Device
from hyperion.measure import FORMATS, OPERATIONS, REDUCTIONS, Ceilings, Collective, format_of
from hyperion.measure.fits import fit_nonnegative
from hyperion.results import Row
from hyperion.results.rows import idle_rows

CURVES_FILE = Path(__file__).with_name("efficiency.toml")
PRODUCT, STREAM, REPEATED, PEER_COPY, COLLECTIVE = "product", "stream", "repeated stream", "copy between GPUs", "collective"
# Kinds of rates whose ceiling is computed from the run's measured ceilings. Their curves have no overhead.
# TRAINING_STEP is a step that is compiled or captured in a graph, and EAGER_STEP one that the host launches kernel by kernel.
TRAINING_STEP, EAGER_STEP, REFERENCE_STEP = "training step", "eager training step", "step of a reference model"
STEP_PRODUCTS = "products of a step"
# Kinds of curves fitted to the rows of the run itself. Their spread was measured on a reference run.
OWN_PRODUCT, OWN_STREAM = "own product", "own stream"
# Minimum number of sizes for such a curve, because a curve has three unknowns.
_OWN_SIZES = 3


@dataclass(frozen=True)
class Work:
    """Work of one call, such as a matrix product or a copy, with the times that it would take at the ceilings.

    Args:
        amount: amount of work in 10¹² FLOP or 10⁹ bytes. The rate is this amount divided by the time.
        arithmetic_s: time of the arithmetic at its ceiling, in seconds.
        traffic_s: time of the traffic at its ceiling, in seconds.
    """

    amount: float
    arithmetic_s: float
    traffic_s: float


@dataclass(frozen=True)
class Curve:
    """Curve that predicts the time of one kind of work on one architecture.

    Args:
        arch: architecture of the device, such as "sm_90".
        kind: kind of measurement, for example PRODUCT.
        name: number format of a matrix product, operation of a stream, or name of a collective. "" if the kind has only one
            curve.
        overhead_s: time that does not depend on the size, in seconds.
        arithmetic: seconds per second of arithmetic at the ceiling.
        traffic: seconds per second of traffic at the ceiling.
        spread: a measured rate lies between predicted / (1 + spread) and predicted * (1 + spread) in about 80 % of cases.
        points: number of rows that the curve was fitted to.
        source: reference run and its commit.
    """

    arch: str
    kind: str
    name: str
    overhead_s: float
    arithmetic: float
    traffic: float
    spread: float
    points: int
    source: str

    def time_s(self, work: Work) -> float:
        """Return the expected time of a call in seconds.

        It is never shorter than the time of the traffic at its ceiling. The curve alone could give a shorter time: it is fitted
        to matrix products whose traffic partly overlaps with arithmetic, so its factor `traffic` may be less than 1.
        """
        fitted = self.arithmetic * work.arithmetic_s + self.traffic * work.traffic_s
        return self.overhead_s + max(fitted, work.traffic_s)

    def rate(self, work: Work) -> float:
        """Return the expected rate of a call: the amount of its work divided by the expected time."""
        return work.amount / self.time_s(work)

    def __str__(self) -> str:
        terms = [f"{self.overhead_s * 1e6:.3g} us"] if self.overhead_s else []
        terms += [f"{self.arithmetic:.3g} x the arithmetic's time"] if self.arithmetic else []
        terms += [f"{self.traffic:.3g} x the traffic's time"] if self.traffic else []
        return f"{' + '.join(terms)}, fitted to {self.source}"


@dataclass(frozen=True)
class Expected:
    """Ceiling and prediction of a rate.

    Args:
        ceiling: limit of the rate, or None without a limit.
        estimate: prediction, or None if there is only a ceiling.
        low, high: 80 % interval of the prediction, or None without an interval.
        basis: how both were computed, or the reason why there is no prediction.
    """

    ceiling: float | None
    estimate: float | None
    low: float | None
    high: float | None
    basis: str

    def divided_by(self, factor: float, reason: str) -> "Expected":
        """Return the prediction divided by a factor, with the reason for it. The ceiling does not change."""
        low, estimate, high = (None if rate is None else rate / factor for rate in (self.low, self.estimate, self.high))
        basis = self.basis if estimate is None else f"{reason}; {self.basis}"
        return replace(self, low=low, estimate=estimate, high=high, basis=basis)

    def forecast(self, variant: str, metric: str, dtype: str = "", params: dict | None = None) -> Forecast:
        """Return the forecast of a row."""
        return Forecast(
            variant,
            metric,
            self.estimate,
            self.basis,
            dtype=dtype,
            params=params or {},
            ceiling=self.ceiling,
            low=self.low,
            high=self.high,
        )


def expected_product(context: Context, dtype: str, m: int, n: int, k: int) -> Expected:
    """Predict the TFLOPS of a matrix product.

    The prediction comes from this run's square matrix products if enough sizes were measured, otherwise from a reference run.
    """
    device = context.device
    limit, _ = gemm_limit(device, dtype)
    ceilings, basis = datasheet_ceilings(device, dtype)
    if ceilings is None:
        return Expected(limit, None, None, None, basis)
    curve = own_product_curve(context.upstream, device, dtype) or curve_of(device.arch, PRODUCT, format_of(dtype, device).name)
    return _expected(limit, curve, product_work(device, ceilings, dtype, m, n, k), basis)


def expected_stream(context: Context, operation: str, dtype: str, traffic_bytes: int) -> Expected:
    """Predict the GB/s of a memory stream.

    The prediction comes from this run's streams if enough sizes were measured, otherwise from a reference run. Arrays that may
    fit into a cache have no prediction, because the ceiling does not apply to them.
    """
    limit, basis = bandwidth_limit(context.device, traffic_bytes)
    if limit is None:
        return Expected(None, None, None, None, basis)
    curve = own_stream_curve(context.upstream, operation) or curve_of(context.device.arch, STREAM, stream_name(operation, dtype))
    return _expected(limit, curve, moved(traffic_bytes, limit), basis)


def expected_repeated_stream(device: Device, operation: str, traffic_bytes: int, limit: float | None, basis: str) -> Expected:
    """Predict the GB/s of repeated reads or copies of the same bytes.

    Args:
        device: device of the stream.
        operation: name of the operation, for example "copy".
        traffic_bytes: number of bytes that one call reads and writes.
        limit, basis: limit of the rate in GB/s and its source, or None and the reason why there is no limit.
    """
    if limit is None:
        return Expected(None, None, None, None, basis)
    return _expected(limit, curve_of(device.arch, REPEATED, operation), moved(traffic_bytes, limit), basis)


def expected_busbw(device: Device, collective: Collective, ranks: int, message_bytes: int) -> Expected:
    """Predict the bus bandwidth of a collective in GB/s."""
    link, basis = link_limit(device, collective, ranks)
    if link is None:
        return Expected(None, None, None, None, basis)
    work = moved(message_bytes * collective.bus_factor(ranks), link)
    return _expected(link, curve_of(device.arch, COLLECTIVE, collective.name), work, f"the link's {link:g} GB/s ({basis})")


def expected_peer_copy(device: Device, copied_bytes: int, limit: float | None, basis: str) -> Expected:
    """Predict the GB/s of a copy from one GPU to another.

    Args:
        device: GPU that is copied from.
        copied_bytes: number of bytes to copy.
        limit, basis: rate of the link between the GPUs in GB/s and its source, or None and the reason why the rate is unknown.
    """
    if limit is None:
        return Expected(None, None, None, None, basis)
    return _expected(limit, curve_of(device.arch, PEER_COPY, ""), moved(copied_bytes, limit), basis)


def expected_share(device: Device, kind: str, ceiling: float, basis: str, name: str = "") -> Expected:
    """Predict a rate as its ceiling times the share of the ceiling that a reference machine reached.

    Args:
        device: device of the prediction.
        kind: TRAINING_STEP, EAGER_STEP or STEP_PRODUCTS.
        ceiling: ceiling of the rate, computed from this run's measured ceilings. The real rate is lower, because this computation
            omits part of the time.
        basis: how the ceiling was computed.
        name: name of the curve. Curves of EAGER_STEP are named after the number format.
    """
    return _expected(ceiling, curve_of(device.arch, kind, name), Work(ceiling, 1.0, 0.0), basis)


def with_interval(device: Device, kind: str, forecast: Forecast) -> Forecast:
    """Return a forecast with an added interval. The estimate does not change.

    The interval comes from the device's curve of this kind. Without such a curve, the forecast is returned unchanged.
    """
    curve = curve_of(device.arch, kind, "")
    if forecast.estimate is None or curve is None:
        return forecast
    low, high = forecast.estimate / (1 + curve.spread), forecast.estimate * (1 + curve.spread)
    return replace(forecast, low=low, high=high)


def product_work(device: Device, ceilings: Ceilings, dtype: str, m: int, n: int, k: int) -> Work:
    """Return the work of a matrix product. If the memory bandwidth is unknown, the traffic time is 0."""
    flops = 2 * m * n * k
    bandwidth = ceilings.bandwidth_gb_s
    traffic_s = product_bytes(device, dtype, m, n, k) / (bandwidth * 1e9) if bandwidth else 0.0
    return Work(flops / 1e12, flops / (ceilings.tflops * 1e12), traffic_s)


def moved(traffic_bytes: float, ceiling_gb_s: float) -> Work:
    """Return the work of moving bytes."""
    return Work(traffic_bytes / 1e9, 0.0, traffic_bytes / (ceiling_gb_s * 1e9))


def stream_name(operation: str, dtype: str) -> str:
    """Return the name of a stream's curve. Only the rate of a dot product depends on the number format."""
    return f"{operation} {dtype}" if operation == "dot" else operation


def own_product_curve(rows: Iterable[Row], device: Device, dtype: str) -> Curve | None:
    """Return a curve fitted to a run's square matrix products in one number format, or None if fewer than three sizes exist."""
    name = format_of(dtype, device).name
    ceilings, _ = datasheet_ceilings(device, dtype)
    squares = [row for row in rows if (row.experiment, row.metric, row.dtype) == ("gemm", "gemm_tflops", name)]
    squares = idle_rows([row for row in squares if row.value is not None and not row.hot])
    points = [] if ceilings is None else [product_point(device, ceilings, row) for row in squares]
    return _own_curve(OWN_PRODUCT, name, points)


def own_stream_curve(rows: Iterable[Row], operation: str) -> Curve | None:
    """Return a curve fitted to a run's memory streams with one operation, or None if fewer than three sizes have a limit."""
    streams = [r for r in rows if (r.experiment, r.metric, r.variant) == ("bandwidth", "bandwidth_gb_s", operation)]
    streams = idle_rows([row for row in streams if row.value is not None and row.limit is not None and not row.hot])
    # A stream moves a fixed number of bytes per element, so its time follows from its rate.
    points = [stream_point(row) for row in streams]
    return _own_curve(OWN_STREAM, operation, points)


def product_point(device: Device, ceilings: Ceilings, row: Row) -> tuple[Work, float]:
    """Return (work, measured time in seconds) of a matrix product's row."""
    work = product_work(device, ceilings, row.dtype, *(row.params[size] for size in "mnk"))
    return work, work.amount / not_none(row.value)


def stream_point(row: Row) -> tuple[Work, float]:
    """Return (work, measured time in seconds) of a memory stream's row."""
    arrays = (OPERATIONS | REDUCTIONS)[row.variant].arrays
    work = moved(arrays * row.params["elements"] * FORMATS[row.dtype].bytes, not_none(row.limit))
    return work, work.amount / not_none(row.value)


def fit_times(points: Sequence[tuple[Work, float]]) -> tuple[float, float, float]:
    """Return (overhead in seconds, a, b) of the curve fitted to measured times by least squares of the relative errors.

    The three numbers are not negative. If all points have the same size, the overhead is 0, because it cannot be separated from
    the rest of the time.
    """
    seconds = np.array([time_s for _, time_s in points])
    one_size = len({work.amount for work, _ in points}) < 2
    columns = np.array([[0.0 if one_size else 1.0, work.arithmetic_s, work.traffic_s] for work, _ in points])
    overhead_s, a, b = fit_nonnegative(columns, seconds)
    return float(overhead_s), float(a), float(b)


def curve_of(arch: str, kind: str, name: str) -> Curve | None:
    """Return the stored curve of a kind of measurement on an architecture, or None if no reference run has measured it."""
    return _stored().get((arch, kind, name))


def read_curves(path: Path = CURVES_FILE) -> list[Curve]:
    """Return the curves in a file.

    Raises:
        HyperionError: the file is not valid TOML, or it does not contain a table of curves.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        return read_form(list[Curve], content.get("curve", []), path.name)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HyperionError(f"not valid TOML: {error}", where=path, next_step="restore the file from git") from error


@functools.cache
def _stored() -> dict[tuple[str, str, str], Curve]:
    return {(curve.arch, curve.kind, curve.name): curve for curve in read_curves()}


def _own_curve(kind: str, name: str, points: Sequence[tuple[Work, float]]) -> Curve | None:
    if len({work.amount for work, _ in points}) < _OWN_SIZES:
        return None
    # Without a reference run the spread is unknown, so the interval is a factor of 2 in both directions.
    spread = max((curve.spread for curve in _stored().values() if curve.kind == kind), default=1.0)
    return Curve("", kind, name, *fit_times(points), spread, len(points), "this run's own rows of chapter 1.1")


def _expected(ceiling: float | None, curve: Curve | None, work: Work, basis: str) -> Expected:
    if curve is None:
        basis = basis if ceiling is None else f"ceiling: {basis}"
        return Expected(ceiling, None, None, None, f"no reference run has a curve for it; {basis}")
    rate = curve.rate(work)
    # Without a ceiling, the times are those at nominal rates. On a CPU the real clock may exceed the nominal clock, so the
    # nominal rates are not ceilings.
    basis = f"{curve}; times at {'nominal rates' if ceiling is None else 'the ceiling'}: {basis}"
    return Expected(ceiling, rate, rate / (1 + curve.spread), rate * (1 + curve.spread), basis)
