"""Figures of the hardware chapters: matrix products, memory streams, and the roofline they span."""

from collections.abc import Callable, Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.experiments.hardware import figures_gap, figures_levels, figures_model_products, figures_products, figures_transfers
from hyperion.experiments.hardware.intensity import gemm_intensity, stream_intensity
from hyperion.figures.formats import items, number
from hyperion.figures.material import Material, measured
from hyperion.figures.plot import Plot
from hyperion.figures.published import published_bandwidth, published_gemm
from hyperion.figures.style import INK, MUTED, add_notes, errors_of, limit_line, log_ticks, look, new_figure, spread_labels
from hyperion.results import Row

_DOT = {"linestyle": "none", "marker": ".", "markersize": 6, "color": "white", "markeredgecolor": INK, "zorder": 4}
_FELT = 0.02  # a clock that is lower by less hardly shows in a rate


def gemm(material: Material, published: bool = False) -> Figure | None:
    """TFLOPS by size and dtype with each dtype's limit, and beside it the share of the limit.

    Args:
        published: draw the MI250X tables beside, dashed and marked as another machine's.
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
    # Above the panel: curves of many formats leave no free corner in it.
    legend = panels[0].legend(
        ncols=6, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, columnspacing=0.9, handlelength=1.6, fontsize=8
    )
    if limited:
        legend.set_in_layout(False)  # wider than its panel, it would push the panels apart
        _draw_shares(panels[1], rows, positions)
    for axes in panels:
        axes.set_xticks(range(len(positions)), [_size_label(size) for size in positions])
        axes.set_xlabel("M = N = K" if all(len(set(size[1:])) == 1 for size in positions) else "M × N × K")
    add_notes(figure, notes + _absences(rows, lambda row: row.dtype))
    return figure


def gemm_cross_check(material: Material) -> Figure | None:
    """The harness's rate over that of a plain timing loop, interleaved: 1 where both agree."""
    rows = measured(material.of("gemm", metric="speedup"))
    if not rows:
        return None
    figure, (axes,) = new_figure("The harness against a plain loop", material.machine("gemm"), height=3.2)
    rows = sorted(rows, key=_size)
    axes.axhline(1, color=MUTED, linewidth=1.2)
    axes.errorbar(range(len(rows)), [r.value for r in rows], errors_of(rows), linestyle="none", **look(rows[0].dtype))
    axes.set_xticks(range(len(rows)), [_size_label(_size(row)) for row in rows])
    axes.margins(x=0.1, y=0.25)
    axes.set(xlabel="M = N = K", ylabel="rate, harness / plain loop", title=f"{rows[0].dtype}, medians with 95 % interval")
    notes = [
        "1: both clocks agree, with warm caches. Above 1 the plain loop pays for launches and synchronisation, which weigh "
        "on small products and must vanish in large ones."
    ]
    add_notes(figure, notes)
    return figure


def bandwidth(material: Material, published: bool = False) -> Figure | None:
    """GB/s by array size and operation with the limit of the memory.

    Args:
        published: draw the MI250X table beside, dashed and marked as another machine's.
    """
    rows = material.of("bandwidth", metric="bandwidth_gb_s")
    if not measured(rows):
        return None
    figure, (axes,) = new_figure("Memory bandwidth by array size", material.machine("bandwidth"))
    for position, (series, points) in enumerate(_series(measured(rows))):
        points = sorted(points, key=lambda row: row.params["elements"])
        x = [row.params["elements"] for row in points]
        axes.errorbar(x, [row.value for row in points], errors_of(points), label=series, **look(series.split(",")[0], position))
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
    # Above the panel: streams that a cache serves can lie anywhere in it.
    axes.legend(ncols=5, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    if len(limits) == 1:
        limit = next(iter(limits))
        share = axes.secondary_yaxis("right", functions=(lambda y: 100 * y / limit, lambda y: y * limit / 100))
        share.set_ylabel("% of limit")
    add_notes(figure, notes + _absences(rows, lambda row: items(row.params["elements"])))
    return figure


def roofline(material: Material) -> Figure | None:
    """The measured ceilings, and every product and stream at its arithmetic intensity below them."""
    products = [row for row in measured(gemm_rows(material)) if row.params.get("cache") != "hot"]
    streams = [r for r in measured(material.of("bandwidth", metric="bandwidth_gb_s")) if r.params.get("cache") != "hot"]
    largest = max((row.params["elements"] for row in streams), default=0)
    streams = [row for row in streams if row.params["elements"] == largest]
    if not products or not streams:
        return None
    figure, (axes,) = new_figure("Roofline", material.machine("gemm"), height=4.8)
    slope = max(row.value for row in streams)
    ends = 0.03, max(3e3, 2 * max(gemm_intensity(row) for row in products))
    labels = _draw_roofs(axes, products, slope, ends)
    for dtype in dict.fromkeys(row.dtype for row in products):
        points = [row for row in products if row.dtype == dtype]
        axes.plot([gemm_intensity(p) for p in points], [p.value for p in points], linestyle="none", **look(dtype))
    for operation in dict.fromkeys(row.variant for row in streams if stream_intensity(row)):
        points = [row for row in streams if row.variant == operation]
        x, y = zip(*[(stream_intensity(p), p.value * stream_intensity(p) / 1e3) for p in points], strict=True)
        axes.plot(x, y, linestyle="none", markerfacecolor="none", label=f"stream {operation}", **look(operation))
    axes.set(
        xscale="log", yscale="log", xlim=ends, xlabel="arithmetic intensity, FLOP per byte of memory traffic", ylabel="TFLOPS"
    )
    log_ticks(axes.xaxis)
    log_ticks(axes.yaxis)
    axes.legend(loc="lower right")
    spread_labels(axes, labels)
    notes = [
        "Solid: ceilings measured in this run. Dotted: datasheet limits. Filled marks: matrix products. Hollow: streams over "
        f"{items(largest)} elements; smaller ones may owe their rate to a cache. A copy does no arithmetic and has no place here."
    ]
    add_notes(figure, notes)
    return figure


def gemm_rows(material: Material) -> list[Row]:
    """The product rates of the sweep; those of the cross-check with a plain loop belong to another figure."""
    return [row for row in material.of("gemm", metric="gemm_tflops") if "plain_loop_calls" not in row.params]


def _size(row: Row) -> tuple[int, int, int, int]:
    m, n, k = (row.params[name] for name in "mnk")
    return m * n * k, m, n, k


def _size_label(size: tuple[int, int, int, int]) -> str:
    return str(size[1]) if len(set(size[1:])) == 1 else "×".join(map(str, size[1:]))


def _series(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Rows by variant, those with a hot cache apart."""
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
            style = look(dtype) | ({"markerfacecolor": "none", "linestyle": ":"} if "hot" in series else {})
            label = None if "hot" in series else f"{dtype} {series}" if several else dtype
            x = [positions[_size(p)] + _aside(rows, dtype) for p in points]
            axes.errorbar(x, [p.value for p in points], errors_of(points), label=label, **style)
            _dot_slowed(axes, x, [p.value for p in points], points, slowed)
        for limit in {row.limit for row in rows if row.dtype == dtype} - {None}:
            limits.setdefault(limit, []).append(dtype)
    if any(row.params.get("cache") == "hot" for row in measured(rows)):
        axes.plot([], [], color=MUTED, marker="o", markerfacecolor="none", linestyle=":", label="warm caches")
    for limit, dtypes in limits.items():
        limit_line(axes, limit, f"{', '.join(dtypes)} limit {number(limit)}", look(dtypes[0])["color"])


def _aside(rows: list[Row], dtype: str) -> float:
    """A small step aside for each dtype, so that curves which coincide stay visible."""
    dtypes = list(dict.fromkeys(row.dtype for row in measured(rows)))
    return 0.03 * (dtypes.index(dtype) - (len(dtypes) - 1) / 2)


def _draw_shares(axes: Axes, rows: list[Row], positions: dict) -> None:
    slowed = _slowed(measured(rows))
    for dtype in dict.fromkeys(row.dtype for row in measured(rows)):
        for series, points in _series(r for r in rows if r.dtype == dtype and r.fraction_of_limit is not None):
            points = sorted(points, key=_size)
            style = look(dtype) | ({"markerfacecolor": "none", "linestyle": ":"} if "hot" in series else {})
            x = [positions[_size(p)] + _aside(rows, dtype) for p in points]
            axes.plot(x, [100 * p.fraction_of_limit for p in points], **style)
            _dot_slowed(axes, x, [100 * p.fraction_of_limit for p in points], points, slowed)
    axes.set(ylim=(0, 105), title="Share of the limit", ylabel="% of limit")
    limit_line(axes, 100, "", MUTED)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="lower right")


def _slowed(rows: list[Row]) -> list[Row]:
    """Rows whose samples were taken while the device held its clock down: a reason is known, and the clock was lower."""
    highest = max((row.clock_mhz for row in rows if row.clock_mhz is not None), default=0)
    low = [row for row in rows if row.clock_mhz is None or row.clock_mhz < (1 - _FELT) * highest]
    return [row for row in low if row.throttle not in (None, "none")]


def _dot_slowed(axes: Axes, x: list[float], y: list[float], points: list[Row], slowed: list[Row]) -> None:
    """A dot in the mark of every point that was measured at a lowered clock."""
    places = [place for place, row in enumerate(points) if row in slowed]
    axes.plot([x[place] for place in places], [y[place] for place in places], **_DOT)


def _name_dots(axes: Axes, slowed: list[Row]) -> list[str]:
    """Put the dots into the panel's legend; returns how low the clock was, nothing without dots."""
    if not slowed:
        return []
    reasons = sorted({reason for row in slowed for reason in row.throttle.split("+")} - {"none"})
    axes.plot([], [], label=", ".join(reason.removeprefix("sw_").replace("_", " ") for reason in reasons), **_DOT)
    said = f"Dots: the device held its clock down by more than {100 * _FELT:.0f} %"
    known = [row for row in slowed if row.clock_mhz is not None]
    if known:
        lowest = min(known, key=lambda row: row.clock_mhz)
        said += f", most of all to {lowest.clock_mhz:,.0f} MHz ({lowest.dtype} at {_size_label(_size(lowest))})"
    return [said + ". Limits are those of the maximum clock."]


def _draw_published(axes: Axes, positions: dict) -> list[str]:
    table = published_gemm()
    for dtype, points in table.groupby("dtype", sort=False):
        known = [
            (positions[(n**3, n, n, n)], tflops)
            for n, tflops in zip(points["n"], points["tflops"], strict=True)
            if (n**3, n, n, n) in positions
        ]
        if known:
            style = look(dtype) | {"linestyle": "--", "alpha": 0.55, "markerfacecolor": "none", "linewidth": 1.2}
            axes.plot(*zip(*known, strict=True), **style)
    axes.plot([], [], linestyle="--", color=MUTED, marker="o", markerfacecolor="none", label="MI250X as published")
    return [f"Dashed with hollow marks: published, other machine. {table.attrs['title']}: {table.attrs['defects']}."]


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
    return [f"Dashed with hollow marks: published, other machine. {table.attrs['title']}: {table.attrs['defects']}."]


def _draw_roofs(axes: Axes, products: list[Row], slope_gb_s: float, ends: tuple[float, float]) -> list[tuple]:
    """Draw the roofs; return their labels as (y, text, colour) for the right edge."""
    labels, tops = [], {}
    for dtype in dict.fromkeys(row.dtype for row in products):
        best = max((row for row in products if row.dtype == dtype), key=lambda row: row.value)
        tops[dtype] = best.value
        colour = look(dtype)["color"]
        axes.plot([best.value * 1e3 / slope_gb_s, ends[1]], [best.value] * 2, color=colour, linewidth=1.6)
        if best.limit is not None:
            axes.plot([best.limit * 1e3 / slope_gb_s, ends[1]], [best.limit] * 2, color=colour, linestyle=":", linewidth=1.1)
        labels.append((best.value, f"{dtype} {number(best.value)}", colour))
    ridge = max(tops.values()) * 1e3 / slope_gb_s
    axes.plot([ends[0], ridge], [ends[0] * slope_gb_s / 1e3, max(tops.values())], color="#1b1f24", linewidth=1.6)
    axes.annotate(
        f"{number(slope_gb_s)} GB/s measured",
        (1.2, 1.2 * slope_gb_s / 1e3),
        xytext=(-6, 4),
        ha="right",
        textcoords="offset points",
        fontsize=8.5,
    )
    return labels


def _absences(rows: list[Row], name: Callable[[Row], str]) -> list[str]:
    """One note a reason: values that could not be taken, limits that do not exist; `name` says whose."""
    missing: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.value is None:
            missing.setdefault(f"not measured ({row.value_reason})", {})[name(row)] = None
        elif row.limit is None:
            missing.setdefault(row.limit_source.partition(" (")[0].partition("; ")[0], {})[name(row)] = None
    return [f"{', '.join(names)}: {reason}." for reason, names in missing.items()]


TITLES = {
    "gemm": "Matrix products",
    "bandwidth": "Memory bandwidth",
    "roofline": "Roofline",
    "best_products": "The fastest product of each format",
    "operand_data": "The numbers that are multiplied",
    "memory_levels": "Caches and memory",
    "stream_formats": "Streams by number format",
    "transfers": "Copies between memories",
    "launch_cost": "Launching a kernel",
    "model_products": "Products of our models",
    "gemm_gap": "From peak to measured",
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
        "The same products timed by the harness and by the loop anybody would write, interleaved.",
        gemm_cross_check,
    ),
    Plot("bandwidth", "bandwidth", "Bytes read and written per second, by operation and array size.", bandwidth, published=True),
    Plot("roofline", "roofline", "Left of a ridge memory bounds, right of it arithmetic.", roofline),
    Plot(
        "best_products",
        "best_products",
        "What is left of each format's limit when the shape is chosen well, and what shapes that somebody needs get of it.",
        figures_products.best_products,
    ),
    Plot(
        "operand_data",
        "operand_data",
        "The same product with other numbers: at one clock for all, and each at the clock that its own power leaves.",
        figures_products.operand_data,
    ),
    Plot(
        "memory_levels",
        "memory_levels",
        "Bytes per second by working set: a step down wherever a cache is full.",
        figures_levels.memory_levels,
    ),
    Plot(
        "stream_formats",
        "stream_formats",
        "A memory moves bytes: the same streams in every number format, beside its limit.",
        figures_levels.stream_formats,
    ),
    Plot(
        "transfers",
        "transfers",
        "Between host and device by size, from pinned and from pageable memory, and from each GPU to each other one.",
        figures_transfers.transfers,
    ),
    Plot(
        "launch_cost",
        "launch_cost",
        "What launching a kernel costs, and from which size on a copy works longer than that.",
        figures_transfers.launch_cost,
    ),
    Plot(
        "gemm_gap",
        "gemm_gap",
        "From the data sheet's peak to the fastest product: what each known limit takes, and what none explains.",
        figures_gap.gemm_gap,
    ),
    Plot(
        "model_products",
        "model_products",
        "What our models' products reach, beside the fastest product of any shape and the peak.",
        figures_model_products.model_products,
    ),
    Plot(
        "products_roofline",
        "model_products",
        "Each model's products at their arithmetic intensity: which of them memory holds back.",
        figures_model_products.products_roofline,
    ),
)
