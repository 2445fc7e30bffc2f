"""Figures of single matrix products: best shape of each number format, effect of operand data, and gap to the peak.

The last table compares the same products in several launches.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.errors import not_none
from hyperion.figures.material import Material, measured, number
from hyperion.figures.style import COLOURS, INK, MARKERS, MUTED, absences, add_notes, errors_of, look, new_figure, write_at
from hyperion.results import Row, Run

_BEST, _DATA = "best_products", "operand_data"
# Metrics for the ratio of two rates: "speedup" if they were timed in alternation, "rate_ratio" if one after the other.
_RATIOS = ("speedup", "rate_ratio")
_BAR = 0.56
_TURNS = {"alone": COLOURS[0], "in turn": COLOURS[5]}
_ERROR = {"ecolor": INK, "elinewidth": 1.0}
_LOST, _GAINED, _UNEXPLAINED = COLOURS[1], COLOURS[2], COLOURS[6]
_UNCHANGED = 1e-3  # the bar of a factor that differs from 1 by less than this would be invisible


def best_products(material: Material) -> Figure | None:
    """Draw two panels about the fastest matrix product of each number format.

    The first panel shows its rate and the format's limit. The second panel shows the shares of the limit that the fastest product
    and the given shapes reach.
    """
    rows = material.of(_BEST, metric="gemm_tflops")
    fastest = measured(row for row in rows if row.variant == "fastest found")
    if not fastest:
        return None
    limited = any(row.limit is not None for row in fastest)
    figure, panels = new_figure(
        "The fastest product of each format", material.machine(_BEST), 2 if limited else 1, height=1.9 + 0.42 * len(fastest)
    )
    given = measured(row for row in rows if row.variant == "given shape")
    places = {row.dtype: place for place, row in enumerate(fastest)}
    _draw_fastest(panels[0], fastest)
    if limited:
        _draw_shares(panels[1], fastest)
    _draw_given(panels[-1], given, places, _share if limited else (lambda row: row.value))
    _name_lines(panels, list(places))
    add_notes(figure, [*_searches(fastest), *absences(rows, _dtype_and_shape, lambda row: row.dtype)])
    return figure


def operand_data(material: Material) -> Figure | None:
    """Plot the TFLOPS of one matrix product for several kinds of operand data.

    Each kind of data has two timings: one in which calls with all kinds of data alternate, and one with this kind only. Power and
    clock are shown if they could be read.
    """
    rows = material.of(_DATA)
    rates = [row for row in rows if row.metric == "gemm_tflops"]
    if not measured(rates):
        return None
    alone = [row for row in measured(rates) if row.params["timed"] == "alone"]
    states = [
        (column, title)
        for column, title in (("power_w", "Power, W"), ("clock_mhz", "Clock, MHz"))
        if any(getattr(row, column) is not None for row in alone)
    ]
    params, dtype = rates[0].params, rates[0].dtype
    places = {data: place for place, data in enumerate(dict.fromkeys(row.variant for row in rates))}
    figure, panels = new_figure(
        f"One matrix product with different data: {params['m']}³ in {dtype}", material.machine(_DATA), 1 + len(states), height=3.9
    )
    _draw_rates(panels[0], measured(rates), places, [row for row in rows if row.metric in _RATIOS])
    for axes, (column, title) in zip(panels[1:], states, strict=True):
        _draw_state(axes, alone, places, column, title)
    _name_lines(panels, list(places))
    add_notes(figure, _data_notes(rows, rates, states) + absences(rates, _dtype_and_shape, lambda row: row.dtype))
    return figure


@dataclass(frozen=True)
class _Peak:
    tflops: float
    source: str


@dataclass(frozen=True)
class _Factor:
    name: str
    factor: float | None
    tflops: float
    reason: str


@dataclass(frozen=True)
class GapRows:
    """Gap between the peak and the measured rate of one matrix product, read from the rows of `gemm_gap`.

    Args:
        dtype: number format of the matrix product.
        product: label with the dimensions and dtype of the matrix product.
        peak: data-sheet peak with its source.
        measured_tflops: measured rate in TFLOPS.
        factors: factors that reduce the peak to the measured rate, in drawing order.
    """

    dtype: str
    product: str
    peak: _Peak
    measured_tflops: float
    factors: tuple[_Factor, ...]


def gaps_of(rows: list[Row]) -> list[GapRows]:
    """Return one gap for each number format.

    It is the gap of the fastest matrix product found by the search or, without a search, of the fastest square product.
    """
    wholes: dict[str, Row] = {}
    for row in measured(rows):
        if row.params.get("step") == 0 and (row.dtype not in wholes or row.params["of"] != "gemm"):
            wholes[row.dtype] = row
    return [_gap_of(whole, rows) for whole in wholes.values()]


def gemm_gap(material: Material, dtype: str = "") -> Figure | None:
    """Draw waterfall charts of the gap between the peak and the measured rate of a matrix product.

    Each bar shows by how much one factor, such as the clock, changes the rate.

    Args:
        material: material of the run.
        dtype: number format to draw, with explanations of all factors. An empty string draws all formats side by side, without
            explanations.
    """
    rows = material.of("gemm_gap", metric="share")
    gaps = [gap for gap in gaps_of(rows) if dtype in ("", gap.dtype)]
    if not gaps:
        return None
    machine = material.machine("gemm_gap")
    if len(gaps) == 1:
        return gap_waterfall(gaps[0], machine, gaps[0].product, [] if dtype else _without_gap(gaps, rows))
    columns = 2 if len(gaps) <= 4 else 3
    lines = -(-len(gaps) // columns)
    figure, panels = new_figure("From the peak to the measured rate", machine, columns, lines=lines, height=1.1 + 2.1 * lines)
    for axes, gap in zip(panels, gaps, strict=False):
        _draw_waterfall(axes, gap, plain=True)
        axes.set_title(gap.product)
    for axes in panels[len(gaps) :]:
        axes.set_visible(False)
    add_notes(figure, _shared_notes(gaps, rows))
    return figure


def gap_waterfall(gap: GapRows, machine: str, product: str, more: Sequence[str] = ()) -> Figure:
    """Draw a bar for the peak, a bar for the effect of each known factor, and a bar for the measured rate.

    Args:
        gap: gap between the peak and the measured rate of one product.
        machine: name of the machine, for the title.
        product: name of the matrix product for the title, for example "matmul 4096 x 4096 x 4096 bf16".
        more: additional notes, shown with the notes about the factors.
    """
    known = [step for step in gap.factors if step.factor is not None]
    figure, (axes,) = new_figure(f"From the peak to the measured rate: {product}", machine, height=1.5 + 0.46 * (len(known) + 2))
    _draw_waterfall(axes, gap)
    add_notes(figure, [*_notes(gap), *more])
    return figure


def _name_lines(panels: list[Axes], names: list[str]) -> None:
    """Give all panels the same ticks on the vertical axis, and label them on the left of the first panel."""
    for place, axes in enumerate(panels):
        axes.set_yticks(range(len(names)), names if place == 0 else [""] * len(names))
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)


def _draw_fastest(axes: Axes, fastest: list[Row]) -> None:
    """Draw a bar for the highest rate of each format and an outline for its limit.

    Write the rate and the shape at the end of the bar.
    """
    for place, row in enumerate(fastest):
        if row.limit is not None:
            axes.barh(place, row.limit, _BAR + 0.14, facecolor="none", edgecolor=MUTED, linewidth=0.9)
        axes.barh(place, not_none(row.value), _BAR, xerr=errors_of([row]), error_kw=_ERROR, color=look(row.dtype)["color"])
        _write(axes, _end(row), place, f"{number(row.value)}  at {_shape(row)}")
    outlined = "; outline: limit" if any(row.limit is not None for row in fastest) else ""
    unit = "TFLOPS (int8: TOPS)" if any(row.dtype == "int8" for row in fastest) else "TFLOPS"
    axes.set(
        xlim=(0, 1.62 * max(_end(row) for row in fastest)),
        title=f"Fastest product found, with its M × N × K{outlined}",
        xlabel=f"{unit}, median with 95 % interval",
    )


def _draw_shares(axes: Axes, fastest: list[Row]) -> None:
    for place, row in enumerate(fastest):
        share = _share(row)
        if share is None:
            _write(axes, 0, place, "no limit known")
            continue
        axes.barh(place, share, _BAR, color=look(row.dtype)["color"], alpha=0.45)
        _write(axes, 100, place, f"{share:.0f} % of {number(row.limit)}")
    axes.axvline(100, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.set(xlim=(0, 128), xticks=range(0, 101, 20), xlabel="% of the limit at the maximum clock")


def _draw_given(axes: Axes, given: list[Row], places: dict[str, int], position_of: Callable[[Row], float | None]) -> None:
    """Draw the measured rates of the given shapes, for example the shapes of a Transformer layer.

    A shape M x N x K has its own marker, drawn once for each number format in which it was measured. The legend above the panel
    explains the markers.

    Args:
        axes: panel with one horizontal line for each number format.
        given: rows of the given shapes.
        places: a dict that maps each number format to the vertical position of its line.
        position_of: function that takes a row and returns the horizontal position of its marker, or None to draw no marker.
    """
    for position, name in enumerate(dict.fromkeys(row.params["shape"] for row in given)):
        points = [r for r in given if r.params["shape"] == name and r.dtype in places and position_of(r) is not None]
        if points:
            axes.plot(
                [not_none(position_of(row)) for row in points],
                [places[row.dtype] for row in points],
                linestyle="none",
                color="white",
                markeredgecolor=INK,
                marker=MARKERS[position % len(MARKERS)],
                markersize=6.5,
                zorder=4,
                label=f"{name} ({_shape(points[0])})",
            )
    if axes.get_legend_handles_labels()[1]:
        axes.set_title("")
        axes.legend(ncols=1, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, fontsize=8, handletextpad=0.2)


def _draw_rates(axes: Axes, rates: list[Row], places: dict[str, int], ratios: list[Row]) -> None:
    over_usual = {(row.variant, row.params["timed"]): row.value for row in ratios}
    width = _BAR / 2 + 0.08
    for side, (timed, colour) in zip((-0.5, 0.5), _TURNS.items(), strict=True):
        for row in (row for row in rates if row.params["timed"] == timed):
            place = places[row.variant] + side * width
            value = not_none(row.value)
            axes.barh(place, value, width, xerr=errors_of([row]), error_kw=_ERROR, color=colour)
            ratio = over_usual.get((row.variant, timed))
            _write(axes, row.ci_high or value, place, number(value) + (f"  ×{ratio:.3f}" if ratio else ""))
        axes.barh(0, 0, color=colour, label=timed)
    axes.set(xlabel="TFLOPS, median with 95 % interval", xlim=(0, 1.5 * max(row.ci_high or not_none(row.value) for row in rates)))
    axes.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)


def _draw_state(axes: Axes, alone: list[Row], places: dict[str, int], column: str, title: str) -> None:
    known = [(places[row.variant], getattr(row, column)) for row in alone if getattr(row, column) is not None]
    for place, value in known:
        axes.barh(place, value, _BAR, color=_TURNS["alone"])
        _write(axes, value, place, f"{value:,.0f}")
    axes.set(title=title, xlabel="timed alone, median of the samples", xlim=(0, 1.28 * max(value for _, value in known)))


def _write(axes: Axes, x: float, y: float, text: str) -> None:
    write_at(axes, text, (x, y), (5, 0), va="center", fontsize=8, color=INK)


def _end(row: Row) -> float:
    """Return the rightmost position drawn for a row: that of its value, its interval or its limit."""
    return max(not_none(row.value), row.ci_high or 0, row.limit or 0)


def _shape(row: Row) -> str:
    return "×".join(str(row.params[name]) for name in "mnk")


def _dtype_and_shape(row: Row) -> str:
    return f"{row.dtype} {row.params.get('shape', '')}".strip()


def _share(row: Row) -> float | None:
    """Return the rate of a row as a percentage of its limit, or None if its value or limit is missing."""
    return None if row.fraction_of_limit is None else 100 * row.fraction_of_limit


def _searches(fastest: list[Row]) -> list[str]:
    """Return a list with one note: how many shapes of its grid each search timed."""
    extents: dict[str, list[str]] = {}
    for row in fastest:
        seen, shapes = row.params["seen"], row.params["shapes"]
        extent = row.dtype if seen == shapes else f"{row.dtype} {seen} of {shapes}"
        extents.setdefault(row.params["stopped"], []).append(extent)
    ends = "; ".join(f"{', '.join(names)}: {stopped}" for stopped, names in extents.items())
    return [f"Shapes timed: {ends}. A search ranks shapes by a few samples. Only the finalists are measured and verified."]


def _data_notes(rows: list[Row], rates: list[Row], states: list[tuple[str, str]]) -> list[str]:
    ratios = [row for row in rows if row.metric in _RATIOS]
    notes = [
        "In turn: calls with different data are interleaved, so that all data run at the same clock. Alone: each kind runs "
        "at the clock that its power allows."
        + (f" ×: speed relative to {ratios[0].params['over']} data, timed in the same way." if ratios else "")
    ]
    limits = {row.limit: row.limit_source.partition(":")[0] for row in measured(rates) if row.limit is not None}
    notes += [f"Limit at the maximum clock: {number(limit)} TFLOPS ({path})." for limit, path in limits.items()]
    shown = [column for column, _ in states]
    if "power_w" not in shown:
        energies = (row.value_reason.removeprefix("no power: ") for row in rows if row.metric == "energy_j_per_tflop")
        notes.append(f"Power is not shown: {next(energies, '') or 'it could not be read'}.")
    if "clock_mhz" not in shown:
        notes.append("The clock is not shown, because the system does not report it.")
    return notes


def _gap_of(whole: Row, rows: list[Row]) -> GapRows:
    same = {name: whole.params[name] for name in ("of", "m", "n", "k")}
    steps = [
        row for row in rows if row.dtype == whole.dtype and same.items() <= row.params.items() and row.params.get("step", 0) > 0
    ]
    peak = _Peak(whole.params["peak_tflops"], whole.limit_source)
    factors, rate = [], float(peak.tflops)
    for row in sorted(steps, key=lambda row: row.params["step"]):
        rate *= 1.0 if row.value is None else row.value
        factors.append(_Factor(row.variant, row.value, rate, row.value_reason or row.limit_source))
    product = f"{' x '.join(str(same[side]) for side in 'mnk')} {whole.dtype}"
    return GapRows(whole.dtype, product, peak, not_none(whole.value) * peak.tflops, tuple(factors))


def _shared_notes(gaps: list[GapRows], rows: list[Row]) -> list[str]:
    """Return notes about unknown factors and about number formats without a waterfall. Formats with the same reason share a note.

    A waterfall is a chart in which each bar shows by how much one factor changes the rate.
    """
    notes = [
        "The first bar is the peak of the data sheet. Each next bar is the change by one known limit. The rest is unexplained."
    ]
    skipped: dict[str, list[str]] = {}
    for gap in gaps:
        for step in (step for step in gap.factors if step.factor is None):
            skipped.setdefault(f"{step.name} ({step.reason})", []).append(gap.dtype)
    for what, dtypes in skipped.items():
        of = "" if len(dtypes) == len(gaps) else f" of {', '.join(dtypes)}"
        notes.append(f"Unknown, and therefore part of the unexplained factor{of}: {what}.")
    return notes + _without_gap(gaps, rows)


def _without_gap(gaps: list[GapRows], rows: list[Row]) -> list[str]:
    """Return one note for each reason why number formats have no waterfall. The note names these formats."""
    absent: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.variant == "measured / peak" and row.value is None and row.dtype not in {gap.dtype for gap in gaps}:
            absent.setdefault(row.value_reason, {})[row.dtype] = None
    return [f"{', '.join(dtypes)}: {reason}." for reason, dtypes in absent.items()]


def _draw_waterfall(axes: Axes, gap: GapRows, plain: bool = False) -> None:
    """Draw a waterfall: one bar for the peak, one for each known factor, and one for the measured rate.

    If `plain` is True, omit units and explanations because the panel is small.
    """
    known = [step for step in gap.factors if step.factor is not None]
    unit = "" if plain else " TFLOPS"
    _bar(axes, 0, 0, gap.peak.tflops, INK, number(gap.peak.tflops) + unit)
    before = gap.peak.tflops
    for place, step in enumerate(known, 1):
        _step(axes, place, before, step, last=step is gap.factors[-1], unchanged="× 1" if plain else "× 1, not a limit here")
        before = step.tflops
    _bar(axes, len(known) + 1, 0, gap.measured_tflops, COLOURS[0], number(gap.measured_tflops) + unit)
    names = ["data sheet", *(step.name for step in known), "measured"]
    axes.set_yticks(range(len(names)), names)
    highest = max([gap.peak.tflops, gap.measured_tflops, *(step.tflops for step in known)])
    axes.set(xlabel="TFLOPS", xlim=(0, (1.45 if plain else 1.3) * highest), ylim=(len(names) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)


def _bar(axes: Axes, place: int, low: float, high: float, colour: str, text: str) -> None:
    axes.barh(place, high - low, left=low, height=0.58, color=colour)
    write_at(axes, text, (high, place), (5, 0), va="center", fontsize=8.5, color=INK)


def _step(axes: Axes, place: int, before: float, step: _Factor, last: bool, unchanged: str) -> None:
    factor = not_none(step.factor)
    colour = _UNEXPLAINED if last else _GAINED if factor > 1 else _LOST
    text = f"× {factor:.3f}" if abs(factor - 1) > _UNCHANGED else unchanged
    low, high = sorted((before, step.tflops))
    _bar(axes, place, low, high, colour, text)
    for x, end in ((before, place - 1), (step.tflops, place + 1)):  # thin lines connect the bars
        axes.plot([x, x], [place, end], color=MUTED, linewidth=0.7, zorder=0.8)


def _notes(gap: GapRows) -> list[str]:
    notes = [f"Data sheet: {gap.peak.source}."]
    notes += [f"{step.name.capitalize()}: {step.reason}." for step in gap.factors if step.factor is not None]
    skipped = [f"{step.name} ({step.reason})" for step in gap.factors if step.factor is None]
    if skipped:
        notes.append(f"Unknown, and therefore part of the unexplained factor: {', '.join(skipped)}.")
    return notes


def repeated_products(launches: Iterable[Run]) -> pd.DataFrame:
    """Return a table that compares the rates of the same matrix products in several launches (repeated runs).

    The table gives the median rate over the launches. It also gives the 10th and 90th percentile of the samples in a launch, each
    as the median over the launches. Two columns give a coefficient of variation (standard deviation divided by the mean): one for
    all launches, and one for the launches on the same GPU, relative to the mean of that GPU.
    """
    rates: dict[tuple[str, int], list[tuple[str, float, float, float]]] = defaultdict(list)
    for run in launches:
        if "01_hardware_exploration/gemm" not in run.experiments():
            continue
        gpus = str(sorted(str(gpu.get("uuid")) for gpu in (run.information().get("environment") or {}).get("gpus") or []))
        samples = run.samples("01_hardware_exploration", "gemm").groupby(["dtype", "params"])["time_s"]
        for row in run.rows("01_hardware_exploration", "gemm"):
            if row.metric == "gemm_tflops" and row.value is not None and row.params["cache"] == "cold":
                times = samples.get_group((row.dtype, json.dumps(row.params, sort_keys=True)))
                work = 2 * row.params["m"] * row.params["n"] * row.params["k"] / 1e12
                low, high = (work / float(np.quantile(times, share)) for share in (0.9, 0.1))
                rates[row.dtype, row.params["n"]].append((gpus, row.value, low, high))
    lines = []
    for (dtype, n), found in rates.items():
        values = np.array([value for _, value, _, _ in found])
        lines.append(
            {
                "format": dtype,
                "M = N = K": f"{n}",
                "launches": str(len(values)),
                "GPUs": str(len({gpu for gpu, _, _, _ in found})),
                "median TFLOPS": number(float(np.median(values))),
                "10th to 90th percentile in a launch": " to ".join(
                    number(float(np.median(ends))) for ends in ([low for *_, low, _ in found], [high for *_, high in found])
                ),
                "variation of all launches": f"{100 * values.std(ddof=1) / values.mean():.2f} %" if len(values) > 1 else "",
                "variation on the same GPU": _variation_within((gpu, value) for gpu, value, _, _ in found),
            }
        )
    return pd.DataFrame(lines)


def _variation_within(launches: Iterable[tuple[str, float]]) -> str:
    """Return the coefficient of variation of values on the same GPU, pooled over the GPUs, or "" if no GPU has two values."""
    groups: dict[str, list[float]] = defaultdict(list)
    for gpu, value in launches:
        groups[gpu].append(value)
    relative = np.concatenate([np.array(values) / np.mean(values) - 1 for values in groups.values()])
    freedom = len(relative) - len(groups)
    return f"{100 * math.sqrt(float((relative**2).sum()) / freedom):.2f} %" if freedom else ""
