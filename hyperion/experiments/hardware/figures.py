"""Figures of matrix products, memory streams and the roofline, and the table of all hardware figures (PLOTS)."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.errors import not_none
from hyperion.experiments.hardware import figures_memory, figures_models, figures_products, figures_workloads
from hyperion.experiments.hardware.figures_memory import add_share_axis, element_bytes
from hyperion.experiments.hardware.sentences import copies_of_one_size, formats_of_one_peak, memory_levels, square_beside_search
from hyperion.figures.material import VISIBLE, Material, Panel, Plot, Quote, items, measured, number, values
from hyperion.figures.published import published_bandwidth, published_gemm
from hyperion.figures.style import (
    INK,
    MUTED,
    SUMMARY_LETTERING,
    absences,
    add_notes,
    errors_of,
    limit_line,
    log_ticks,
    look,
    new_figure,
    spread_labels,
    write_at,
)
from hyperion.figures.tables import concatenated
from hyperion.results import Row

_DOT = {"linestyle": "none", "marker": ".", "markersize": 6, "color": "white", "markeredgecolor": INK, "zorder": 4}
# For each stream: FLOPs per element, and number of arrays read or written.
_STREAMS = {"copy": (0, 2), "scale": (1, 2), "add": (1, 3), "triad": (2, 3)}


def gemm(material: Material, published: bool = False) -> Figure | None:
    """Plot the TFLOPS of matrix products by size, with one curve for each dtype.

    The first panel also shows the limit of each dtype. A second panel shows the rates as shares of these limits.

    Args:
        published: whether to add dashed curves with the published results of an MI250X, labelled as another machine.
    """
    rows = gemm_rows(material)
    if not measured(rows):
        return None
    limited = any(row.fraction_of_limit is not None for row in rows)
    figure, panels = new_figure("Matrix product rate by size", material.machine("gemm"), 2 if limited else 1)
    positions = {size: x for x, size in enumerate(sorted({_size(row) for row in measured(rows)}))}
    _draw_rates(panels[0], rows, positions)
    notes = _draw_published(panels[0], positions) if published else []
    notes += _name_dots(panels[-1], _slowed(measured(rows)))
    panels[0].set(yscale="log", ylabel="TFLOPS, median with 95 % interval")
    log_ticks(panels[0].yaxis)
    # The legend is above the panel because the curves of many formats leave no free corner.
    legend = panels[0].legend(
        ncols=6, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, columnspacing=0.9, handlelength=1.6, fontsize=8
    )
    if limited:
        legend.set_in_layout(False)  # the legend is wider than its panel and would push the panels apart
        _draw_shares(panels[1], rows, positions)
    for axes in panels:
        axes.set_xticks(range(len(positions)), [_size_label(size) for size in positions])
        axes.set_xlabel("M = N = K" if all(len(set(size[1:])) == 1 for size in positions) else "M × N × K")
    add_notes(figure, notes + absences(rows, lambda row: row.dtype))
    return figure


def gemm_cross_check(material: Material) -> Figure | None:
    """Plot the rate measured by this library divided by the rate measured by a plain loop. The value is 1 if both agree."""
    rows = measured(material.of("gemm", metric="speedup"))
    if not rows:
        return None
    figure, (axes,) = new_figure("The harness against a plain loop", material.machine("gemm"), height=3.2)
    rows = sorted(rows, key=_size)
    axes.axhline(1, color=MUTED, linewidth=1.2)
    axes.errorbar(range(len(rows)), values(rows), errors_of(rows), linestyle="none", **look(rows[0].dtype))
    axes.set_xticks(range(len(rows)), [_size_label(_size(row)) for row in rows])
    axes.margins(x=0.1, y=0.25)
    axes.set(xlabel="M = N = K", ylabel="rate, harness / plain loop", title=f"{rows[0].dtype}, medians with 95 % interval")
    notes = [
        "Both ways of timing use warm caches. At 1 they agree. The plain loop also times launches and synchronisation, so small "
        "products have values above 1."
    ]
    add_notes(figure, notes)
    return figure


def bandwidth(material: Material, published: bool = False) -> Figure | None:
    """Plot the GB/s of each operation by array size, with the memory bandwidth limit.

    Args:
        published: whether to add dashed curves with the published results of an MI250X, labelled as another machine.
    """
    rows = material.of("bandwidth", metric="bandwidth_gb_s")
    if not measured(rows):
        return None
    figure, (axes,) = new_figure("Memory bandwidth by array size", material.machine("bandwidth"))
    for position, (series, points) in enumerate(_series(measured(rows))):
        points = sorted(points, key=lambda row: row.params["elements"])
        x = [row.params["elements"] for row in points]
        axes.errorbar(x, values(points), errors_of(points), label=series, **look(series.split(",")[0], position))
    limits = {row.limit: row.limit_source for row in rows if row.limit is not None}
    for limit, source in limits.items():
        limit_line(axes, limit, f"limit {number(limit)} GB/s ({source.partition(':')[0]})", MUTED)
    notes = _draw_published_streams(axes) if published else []
    axes.set(xscale="log", ylabel="GB/s, median with 95 % interval", ylim=(0, None))
    axes.set_xlabel(f"elements per array, {rows[0].dtype}")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.06)
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    ticks = sorted({row.params["elements"] for row in measured(rows)})
    axes.set_xticks(ticks, [items(tick) for tick in ticks])
    axes.minorticks_off()
    # The legend is above the panel. Streams from a cache can have any rate, so no corner is guaranteed to be free.
    axes.legend(ncols=5, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    if len(limits) == 1:
        add_share_axis(axes, next(iter(limits)))
    add_notes(figure, notes + absences(rows, lambda row: items(row.params["elements"])))
    return figure


def roofline(material: Material) -> Figure | None:
    """Plot the measured ceilings, and each matrix product and stream at its arithmetic intensity."""
    products = [row for row in measured(gemm_rows(material)) if row.params.get("cache") != "hot"]
    streams = [r for r in measured(material.of("bandwidth", metric="bandwidth_gb_s")) if r.params.get("cache") != "hot"]
    largest = max((row.params["elements"] for row in streams), default=0)
    streams = [row for row in streams if row.params["elements"] == largest]
    if not products or not streams:
        return None
    figure, (axes,) = new_figure("Roofline", material.machine("gemm"), height=4.8)
    slope = max(values(streams))
    ends = 0.03, max(3e3, 2 * max(gemm_intensity(row) for row in products))
    labels = _draw_roofs(axes, products, slope, ends)
    for dtype in dict.fromkeys(row.dtype for row in products):
        points = [row for row in products if row.dtype == dtype]
        axes.plot([gemm_intensity(p) for p in points], values(points), linestyle="none", **look(dtype))
    for operation in dict.fromkeys(row.variant for row in streams if stream_intensity(row)):
        points = [row for row in streams if row.variant == operation]
        x = [stream_intensity(point) for point in points]
        y = [rate * intensity / 1e3 for rate, intensity in zip(values(points), x, strict=True)]
        axes.plot(x, y, linestyle="none", markerfacecolor="none", label=f"stream {operation}", **look(operation))
    axes.set(
        xscale="log", yscale="log", xlim=ends, xlabel="arithmetic intensity, FLOP per byte of memory traffic", ylabel="TFLOPS"
    )
    log_ticks(axes.xaxis)
    log_ticks(axes.yaxis)
    axes.legend(loc="lower right")
    spread_labels(axes, labels)
    dotted = "Dotted lines: datasheet limits. " if any(row.limit is not None for row in products) else ""
    notes = [
        f"Solid lines: ceilings measured in this run. {dotted}Filled marks: matrix products. Hollow: "
        f"streams over {items(largest)} elements. Smaller streams are not shown, because a cache may serve them. Copies are not "
        "shown, because they do no arithmetic."
    ]
    add_notes(figure, notes)
    return figure


def gemm_rows(material: Material) -> list[Row]:
    """Return the rows of the square matrix products, without the rows of the plain-loop comparison."""
    return [row for row in material.of("gemm", metric="gemm_tflops") if "plain_loop_calls" not in row.params]


def gemm_intensity(row: Row) -> float:
    """Return the arithmetic intensity of a matrix product in FLOP per byte.

    A matrix product takes 2·M·N·K FLOP. Each of its three matrices is read or written once.

    Source: Williams, Waterman, Patterson, Roofline, CACM 52 (2009) 65-76.
    """
    m, n, k = (row.params[name] for name in "mnk")
    return 2 * m * n * k / (element_bytes(row.dtype) * (m * k + k * n + m * n))


def stream_intensity(row: Row) -> float:
    """Return the arithmetic intensity of a memory stream in FLOP per byte. It is 0 for a copy."""
    flops, arrays = _STREAMS[row.variant]
    return flops / (arrays * element_bytes(row.dtype))


def _size(row: Row) -> tuple[int, int, int, int]:
    m, n, k = (row.params[name] for name in "mnk")
    return m * n * k, m, n, k


def _size_label(size: tuple[int, int, int, int]) -> str:
    return str(size[1]) if len(set(size[1:])) == 1 else "×".join(map(str, size[1:]))


def _series(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Return (label, rows) for each variant. Rows with warm caches form a separate entry."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        hot = ", hot cache" if row.params.get("cache") == "hot" else ""
        groups.setdefault(row.variant + hot, []).append(row)
    return list(groups.items())


def _draw_rates(axes: Axes, rows: list[Row], positions: dict) -> None:
    several, slowed = len({row.variant for row in measured(rows)}) > 1, _slowed(measured(rows))
    limits: dict[float, list[str]] = {}
    for dtype in dict.fromkeys(row.dtype for row in measured(rows)):
        for series, points in _series(row for row in measured(rows) if row.dtype == dtype):
            points = sorted(points, key=_size)
            style = _series_style(dtype, series)
            label = None if "hot" in series else f"{dtype} {series}" if several else dtype
            x = [positions[_size(p)] + _aside(rows, dtype) for p in points]
            axes.errorbar(x, values(points), errors_of(points), label=label, **style)
            _dot_slowed(axes, x, values(points), points, slowed)
        for limit in {row.limit for row in rows if row.dtype == dtype and row.limit is not None}:
            limits.setdefault(limit, []).append(dtype)
    if any(row.params.get("cache") == "hot" for row in measured(rows)):
        axes.plot([], [], color=MUTED, marker="o", markerfacecolor="none", linestyle=":", label="warm caches")
    for limit, dtypes in limits.items():
        limit_line(axes, limit, f"{', '.join(dtypes)} limit {number(limit)}", look(dtypes[0])["color"])


def _aside(rows: list[Row], dtype: str) -> float:
    """Return a small horizontal offset for the dtype, so that curves at the same height do not hide each other."""
    dtypes = list(dict.fromkeys(row.dtype for row in measured(rows)))
    return 0.03 * (dtypes.index(dtype) - (len(dtypes) - 1) / 2)


def _series_style(dtype: str, series: str) -> dict[str, Any]:
    """Return matplotlib style arguments for a curve. Curves for warm caches are dotted and have hollow markers."""
    return look(dtype) | ({"markerfacecolor": "none", "linestyle": ":"} if "hot" in series else {})


def _draw_shares(axes: Axes, rows: list[Row], positions: dict) -> None:
    slowed = _slowed(measured(rows))
    for dtype in dict.fromkeys(row.dtype for row in measured(rows)):
        for series, points in _series(r for r in rows if r.dtype == dtype and r.fraction_of_limit is not None):
            points = sorted(points, key=_size)
            style = _series_style(dtype, series)
            x = [positions[_size(p)] + _aside(rows, dtype) for p in points]
            shares = [100 * not_none(p.fraction_of_limit) for p in points]
            axes.plot(x, shares, **style)
            _dot_slowed(axes, x, shares, points, slowed)
    axes.set(ylim=(0, 105), title="Share of the limit", ylabel="% of limit")
    limit_line(axes, 100, "", MUTED)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="lower right")


def _slowed(rows: list[Row]) -> list[Row]:
    """Return the rows whose rate is too low because the device lowered its clock or other processes used CPU cores.

    A row is returned if it has a throttle reason and at least one of these conditions holds: the row is marked busy, it has no
    clock reading, or its clock is more than the fraction `VISIBLE` below the highest clock of all rows.
    """
    highest = max((row.clock_mhz for row in rows if row.clock_mhz is not None), default=0)
    low = [row for row in rows if row.busy or row.clock_mhz is None or row.clock_mhz < (1 - VISIBLE) * highest]
    return [row for row in low if row.throttle not in (None, "none")]


def _dot_slowed(axes: Axes, x: list[float], y: list[float], points: list[Row], slowed: list[Row]) -> None:
    """Draw a dot inside the marker of each point that `_slowed` selected."""
    places = [place for place, row in enumerate(points) if row in slowed]
    axes.plot([x[place] for place in places], [y[place] for place in places], **_DOT)


def _name_dots(axes: Axes, slowed: list[Row]) -> list[str]:
    """Add a legend entry for the dots.

    Return a list with a note about the dots, or an empty list if there are none.
    """
    if not slowed:
        return []
    reasons = sorted({reason for row in slowed for reason in (row.throttle or "").split("+")} - {"none"})
    axes.plot([], [], label=", ".join(reason.removeprefix("sw_").replace("_", " ") for reason in reasons), **_DOT)
    if reasons == ["busy"]:
        return ["Dots: other processes used more than a tenth of the cores, so these rates are too low."]
    note = f"Dots: the device lowered its clock by more than {100 * VISIBLE:.0f} %"
    known = [(row.clock_mhz, row) for row in slowed if row.clock_mhz is not None]
    if known:
        clock_mhz, lowest = min(known, key=lambda pair: pair[0])
        note += f". The lowest clock was {clock_mhz:,.0f} MHz ({lowest.dtype} at {_size_label(_size(lowest))})"
    return [note + ". Limits are computed at the maximum clock."]


def _draw_published(axes: Axes, positions: dict) -> list[str]:
    table = published_gemm()
    for dtype, points in table.groupby("dtype", sort=False):
        known = [
            (positions[(n**3, n, n, n)], tflops)
            for n, tflops in zip(points["n"], points["tflops"], strict=True)
            if (n**3, n, n, n) in positions
        ]
        if known:
            style = look(str(dtype)) | {"linestyle": "--", "alpha": 0.55, "markerfacecolor": "none", "linewidth": 1.2}
            axes.plot(*zip(*known, strict=True), **style)
    # This is a note, because another legend entry would need a second line, and the legend would then cover the title.
    return [f"Dashed with hollow marks: MI250X as published, other machine. {table.attrs['title']}: {table.attrs['defects']}."]


def _draw_published_streams(axes: Axes) -> list[str]:
    table = published_bandwidth()
    axes.plot(
        table["elements"],
        table["gb_s"],
        linestyle="--",
        color=MUTED,
        marker="o",
        markerfacecolor="none",
        alpha=0.7,
        label="add, MI250X as published",
    )
    return [f"Dashed with hollow marks: MI250X as published, other machine. {table.attrs['title']}: {table.attrs['defects']}."]


def _draw_roofs(axes: Axes, products: list[Row], slope_gb_s: float, ends: tuple[float, float]) -> list[tuple]:
    """Draw the ceilings of the roofline: the bandwidth, and the rate of the fastest matrix product in each format.

    Return the labels for the right edge of the panel, as (y, text, colour).
    """
    labels, highest = [], 0.0
    for dtype in dict.fromkeys(row.dtype for row in products):
        best = max((row for row in products if row.dtype == dtype), key=lambda row: not_none(row.value))
        top, colour = not_none(best.value), look(dtype)["color"]
        highest = max(highest, top)
        axes.plot([top * 1e3 / slope_gb_s, ends[1]], [top] * 2, color=colour, linewidth=1.6)
        if best.limit is not None:
            axes.plot([best.limit * 1e3 / slope_gb_s, ends[1]], [best.limit] * 2, color=colour, linestyle=":", linewidth=1.1)
        labels.append((top, f"{dtype} {number(top)}", colour))
    ridge = highest * 1e3 / slope_gb_s
    axes.plot([ends[0], ridge], [ends[0] * slope_gb_s / 1e3, highest], color=INK, linewidth=1.6)
    write_at(axes, f"{number(slope_gb_s)} GB/s measured", (1.2, 1.2 * slope_gb_s / 1e3), (-6, 4), ha="right", fontsize=8.5)
    return labels


def summary_panels(material: Material) -> list[Panel]:
    """Return panels with the matrix products by size, the bandwidth by size, and the roofline."""
    products, streams = _summary_rows(material)
    wanted = (
        (_draw_products, products),
        (_draw_streams, streams),
        (_draw_roofline, products + streams if products and streams else []),
    )
    return [Panel(rows[0].experiment, functools.partial(draw, rows=rows)) for draw, rows in wanted if rows]


def summary_notes(material: Material) -> list[str]:
    """Return a note with the labelled rates whose samples were not steady, if there are any."""
    labelled: dict[str, Row] = {}
    for rows, name, size in zip(_summary_rows(material), ("dtype", "variant"), ("m", "elements"), strict=True):
        labelled |= {getattr(row, name): row for row in sorted(rows, key=lambda row: row.params[size])}
    unsteady = [name for name, row in labelled.items() if material.steadiness(row).startswith("no")]
    return [f"The labelled rates of these were not steady: {', '.join(unsteady)}."] if unsteady else []


def _summary_rows(material: Material) -> tuple[list[Row], list[Row]]:
    """Return the rows of square matrix products and those of the memory bandwidth, both with cold caches."""
    squares = [row for row in measured(gemm_rows(material)) if row.params["m"] == row.params["n"] == row.params["k"]]
    products = [row for row in squares if row.params.get("cache") != "hot"]
    streams = [r for r in measured(material.of("bandwidth", metric="bandwidth_gb_s")) if r.params.get("cache") != "hot"]
    return products, streams


def _draw_products(axes: Axes, rows: list[Row]) -> None:
    sizes = sorted({row.params["m"] for row in rows})
    labels = []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        points = sorted((row for row in rows if row.dtype == dtype), key=lambda row: row.params["m"])
        style = look(dtype)
        axes.plot([sizes.index(p.params["m"]) for p in points], values(points), **style)
        last = points[-1]
        share = "" if last.fraction_of_limit is None else f" · {100 * last.fraction_of_limit:.0f} %"
        labels.append((not_none(last.value), f"{dtype} {number(last.value, 3)}{share}", style["color"]))
    for limit in sorted({row.limit for row in rows if row.limit is not None}):
        names = dict.fromkeys(row.dtype for row in rows if row.limit == limit)
        limit_line(axes, limit, f"{', '.join(names)} limit", look(next(iter(names)))["color"], SUMMARY_LETTERING - 2)
    axes.set(yscale="log", title=f"Matrix products, TFLOPS{_shares(rows)}", xlabel="M = N = K")
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.margins(y=0.12)
    log_ticks(axes.yaxis)
    spread_labels(axes, labels, gap_points=SUMMARY_LETTERING + 2, size=SUMMARY_LETTERING - 1)


def _draw_streams(axes: Axes, rows: list[Row]) -> None:
    labels = []
    for operation in dict.fromkeys(row.variant for row in rows):
        points = sorted((row for row in rows if row.variant == operation), key=lambda row: row.params["elements"])
        style = look(operation)
        axes.plot([p.params["elements"] for p in points], values(points), **style)
        last = points[-1]
        share = "" if last.fraction_of_limit is None else f" · {100 * last.fraction_of_limit:.0f} %"
        labels.append((not_none(last.value), f"{operation} {number(last.value, 3)}{share}", style["color"]))
    for limit in {row.limit for row in rows if row.limit is not None}:
        limit_line(axes, limit, f"limit {number(limit)} GB/s", MUTED, SUMMARY_LETTERING - 2)
    axes.set(xscale="log", title=f"Memory bandwidth, GB/s{_shares(rows)}")
    axes.set_xlabel(f"elements per array, {rows[0].dtype}")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: items(value))
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    spread_labels(axes, labels, gap_points=SUMMARY_LETTERING + 2, size=SUMMARY_LETTERING - 1)


def _draw_roofline(axes: Axes, rows: list[Row]) -> None:
    products = [row for row in rows if row.metric == "gemm_tflops"]
    streams = [row for row in rows if row.metric == "bandwidth_gb_s"]
    largest = max(row.params["elements"] for row in streams)
    streams = [row for row in streams if row.params["elements"] == largest]
    slope = max(values(streams))
    ends, labels = (0.05, 2 * max(gemm_intensity(row) for row in products)), []
    for dtype in dict.fromkeys(row.dtype for row in products):
        points = [row for row in products if row.dtype == dtype]
        top, style = max(values(points)), look(dtype)
        axes.plot([top * 1e3 / slope, ends[1]], [top, top], color=style["color"])
        axes.plot([gemm_intensity(p) for p in points], values(points), linestyle="none", **style)
        labels.append((top, f"{dtype} ridge {number(top * 1e3 / slope, 3)}", style["color"]))
    highest = max(values(products))
    axes.plot([ends[0], highest * 1e3 / slope], [ends[0] * slope / 1e3, highest], color=INK)
    for row in filter(stream_intensity, streams):
        x = stream_intensity(row)
        axes.plot([x], [not_none(row.value) * x / 1e3], linestyle="none", markerfacecolor="none", **look(row.variant))
    middle = math.sqrt(0.2 * highest * 1e3 / slope)
    write_at(axes, f"{number(slope)} GB/s", (middle, middle * slope / 1e3), (-6, 3), ha="right", fontsize=SUMMARY_LETTERING - 1)
    axes.set(xscale="log", yscale="log", xlim=ends, title="Roofline as measured, TFLOPS", xlabel="FLOP per byte")
    log_ticks(axes.xaxis)
    log_ticks(axes.yaxis)
    spread_labels(axes, labels, gap_points=SUMMARY_LETTERING + 2, size=SUMMARY_LETTERING - 1)


def _shares(rows: list[Row]) -> str:
    return " · % of limit" if any(row.fraction_of_limit is not None for row in rows) else ""


def headlines(rows: list[Row], is_steady: Callable[[Row], bool]) -> Iterator[Quote]:
    """Yield the largest square matrix product of each dtype, and the copy of the largest arrays.

    The fastest shape differs between launches. A median over launches must not mix shapes.
    """
    for row in _largest_squares(rows):
        m = row.params["m"]
        yield Quote(f"matrix product, {m:,} × {m:,}, {row.dtype}, cold caches", row)
    copies = [r for r in rows if (r.experiment, r.metric, r.variant) == ("bandwidth", "bandwidth_gb_s", "copy")]
    # Only the largest arrays are used, because smaller ones may come from a cache.
    largest = max((row.params["elements"] for row in copies), default=0)
    for row in copies:
        if row.params["elements"] == largest:
            yield Quote(f"memory copy, {row.dtype}, largest arrays", row)


def _largest_squares(rows: list[Row]) -> list[Row]:
    """Return the largest square product of each dtype. Those of `best_products` are used only for dtypes that `gemm` lacks."""
    largest: dict[str, Row] = {}
    for experiment, variant in (("gemm", "torch.mm"), ("best_products", "finalist")):
        measured = set(largest)
        for row in rows:
            is_product = (row.experiment, row.variant, row.metric) == (experiment, variant, "gemm_tflops")
            if not is_product or "plain_loop_calls" in row.params or row.dtype in measured:
                continue
            m, n, k = (row.params[name] for name in "mnk")
            if m == n == k and (row.dtype not in largest or m > largest[row.dtype].params["m"]):
                largest[row.dtype] = row
    return list(largest.values())


def explanations(experiment: str, rows: list[Row]) -> list[str]:
    """Return Markdown sentences that explain results of an experiment, in particular differences from other experiments.

    Args:
        experiment: name of the experiment.
        rows: all rows of the run that have a value.
    """
    own = [row for row in rows if row.experiment == experiment]
    if experiment == "gemm":
        return formats_of_one_peak(own)
    if experiment == "best_products":
        found = [row for row in own if row.variant == "fastest found"]
        compared = [square_beside_search(rows, dtype) for dtype in dict.fromkeys(row.dtype for row in found)]
        return [*compared, *formats_of_one_peak(found)]
    if experiment == "memory_levels":
        return memory_levels(own)
    return [copies_of_one_size(rows)] if experiment == "stream_formats" else []


def flat_tables(runs: Sequence[Sequence[Row]]) -> dict[str, pd.DataFrame]:
    """Return a dict that maps file paths to flat tables.

    One table contains the square matrix products with cold caches. The other contains the memory stream z = x + y in fp32.
    """
    return {
        "hardware/precision_results.csv": concatenated(_precision_table(rows) for rows in runs),
        "hardware/bandwidth_results.csv": concatenated(_bandwidth_table(rows) for rows in runs),
    }


def _precision_table(rows: Iterable[Row]) -> pd.DataFrame:
    lines = []
    for row in rows:
        if (row.experiment, row.metric, row.params.get("cache")) != ("gemm", "gemm_tflops", "cold"):
            continue
        size = row.params["n"]
        if size == row.params["m"] == row.params["k"]:
            time_s = None if row.value is None else 2 * size**3 / (row.value * 1e12)
            lines.append((size, row.dtype.upper(), time_s, row.value))
    return pd.DataFrame(lines, columns=["Size", "Precision", "Time (s)", "TFLOPS"])


def _bandwidth_table(rows: Iterable[Row]) -> pd.DataFrame:
    chosen = ("bandwidth", "add", "bandwidth_gb_s", "fp32", "cold")
    found = [r for r in rows if (r.experiment, r.variant, r.metric, r.dtype, r.params.get("cache")) == chosen]
    lines = [(row.params["elements"] / 1e6, row.value) for row in found]
    return pd.DataFrame(lines, columns=["Size (M elements)", "Bandwidth (GB/s)"])


TITLES = {
    "gemm": "Matrix products",
    "bandwidth": "Memory bandwidth",
    "roofline": "Roofline",
    "best_products": "The fastest product of each format",
    "operand_data": "The data of the operands",
    "memory_levels": "Caches and memory",
    "stream_formats": "Streams by number format",
    "transfers": "Copies between memories",
    "launch_cost": "Cost of a kernel launch",
    "model_products": "Matrix products of our models",
    "gemm_gap": "From the peak to the measured rate",
    "fp64_kernels": "Kernels in double precision",
    "mapped_memory": "Memory that host and device share",
}

PLOTS = (
    Plot(
        "gemm",
        "gemm",
        "Rate by size and number format, and its share of the format's limit at the maximum clock.",
        gemm,
        published=True,
    ),
    Plot(
        "gemm_cross_check",
        "gemm",
        "The same matrix products timed by the harness and by a plain loop, interleaved.",
        gemm_cross_check,
    ),
    Plot("bandwidth", "bandwidth", "Bytes read and written per second, by operation and array size.", bandwidth, published=True),
    Plot(
        "roofline",
        "roofline",
        "Left of the ridge point, memory limits the rate. Right of it, arithmetic limits the rate.",
        roofline,
    ),
    Plot(
        "best_products",
        "best_products",
        "Share of each format's limit that the best shape and the given shapes reach.",
        figures_products.best_products,
    ),
    Plot(
        "operand_data",
        "operand_data",
        "The same matrix product with different data: all at the same clock, and each at the clock that its own power allows.",
        figures_products.operand_data,
    ),
    Plot(
        "memory_levels",
        "memory_levels",
        "Bytes per second by working set. If nothing else limits the kernel, the rate falls where a cache becomes too small.",
        figures_memory.memory_levels,
    ),
    Plot(
        "stream_formats",
        "stream_formats",
        "Streams over the same number of bytes in every number format, with the limit of the memory.",
        figures_memory.stream_formats,
    ),
    Plot(
        "transfers",
        "transfers",
        "Copies between host and device by size, with pinned and pageable memory, and copies from each GPU to each other GPU.",
        figures_memory.transfers,
    ),
    Plot(
        "launch_cost",
        "launch_cost",
        "Time of a launch, and the size above which a copy takes longer than its launch.",
        figures_memory.launch_cost,
    ),
    Plot(
        "gemm_gap",
        "gemm_gap",
        "From the data sheet's peak to the fastest matrix product: the factor of each known limit, and the unexplained factor.",
        figures_products.gemm_gap,
    ),
    Plot(
        "model_products",
        "model_products",
        "Rates of the matrix products of our models and of the fastest matrix product, and the peak of the data sheet.",
        figures_models.model_products,
    ),
    Plot(
        "products_roofline",
        "model_products",
        "The matrix products of each model at their arithmetic intensity. It shows which of them are limited by memory.",
        figures_models.products_roofline,
    ),
    Plot(
        "fp64_kernels",
        "fp64_kernels",
        "Least possible bytes per second of Fourier transforms and of a stencil in double precision.",
        figures_workloads.fp64_kernels,
    ),
    Plot(
        "mapped_memory",
        "mapped_memory",
        "Rates at which a kernel reads and writes memory that the host can access, too.",
        figures_workloads.mapped_memory,
    ),
)
