"""Figures of the interconnect chapter: bus bandwidth by message size, the size that is enough, an all-reduce beside work."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.figures.formats import byte_size, number
from hyperion.figures.material import Material, measured, select
from hyperion.figures.plot import Plot
from hyperion.figures.style import INK, MUTED, add_notes, errors_of, limit_line, log_ticks, look, new_figure
from hyperion.results import Row

_MOST_TICKS = 9
# What DDP and FSDP send gradients and weights with, and the size of DDP's buckets unless it is told another.
_IN_TRAINING = ("all_reduce", "all_gather", "reduce_scatter")
_DDP_BUCKET = 25 * 2**20


def collectives(material: Material) -> Figure | None:
    """Bus bandwidth by size with the links' limit, and the time of a call with its fit; one curve a collective."""
    rows = material.of("collectives")
    rates = measured(select(rows, metric="busbw_gb_s"))
    if not rates:
        return None
    dtype = _swept(rates)
    rates = [row for row in rates if row.dtype == dtype]
    figure, panels = new_figure(
        f"Collectives on {rates[0].params['ranks']} ranks", material.machine("collectives"), 2, height=4.6
    )
    times = measured(select(rows, metric="collective_time_s", dtype=dtype))
    notes = _draw_rates(panels[0], rates, select(rows, metric="half_busbw_bytes", dtype=dtype))
    _draw_times(panels[1], times, rows, dtype)
    for axes in panels:
        _size_axis(axes, rates)
    panels[0].legend(loc="center left")
    notes += [
        f"{dtype}; sizes as nccl-tests counts them; the slowest rank's time, median with 95 % interval. Ring: where a "
        "collective reaches half of its best. Dotted: latency + bytes / bandwidth, fitted."
    ]
    add_notes(figure, notes)
    return figure


def bucket_size(material: Material) -> Figure | None:
    """Share of its best rate that a message gets, by size, with the size that the fit recommends and that of DDP's buckets."""
    rows = material.of("collectives")
    advised = measured(select(rows, metric="recommended_bytes"))
    advised = [row for row in advised if row.variant in _IN_TRAINING]
    if not advised:
        return None
    rates = measured(select(rows, metric="busbw_gb_s", dtype=advised[0].dtype))
    rates = [row for row in rates if row.variant in _IN_TRAINING]
    figure, (axes,) = new_figure("How large is large enough?", material.machine("collectives"), height=4.6)
    for position, (name, points) in enumerate(_series(rates).items()):
        style, best = look(name, position), max(row.value for row in points)
        axes.plot([row.params["bytes"] for row in points], [100 * row.value / best for row in points], label=name, **style)
        for row in select(advised, variant=name):
            axes.axvline(row.value, color=style["color"], linestyle=":", linewidth=1.4)
            axes.axvspan(row.ci_low, row.ci_high, color=style["color"], alpha=0.12, linewidth=0)
    axes.axvline(_DDP_BUCKET, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.annotate(
        "DDP's 25 MiB",
        (_DDP_BUCKET, 0.5),
        xycoords=("data", "axes fraction"),
        xytext=(-3, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        rotation=90,
        fontsize=8,
        color=MUTED,
    )
    _size_axis(axes, rates)
    axes.set(ylabel="rate, % of the best that was measured", title="What a message of size S gets of the rate")
    axes.legend(loc="upper left")
    share = f"{100 * advised[0].params['share']:.0f} %"
    add_notes(
        figure, [f"Dotted: the size with {share} of the rate of the fit latency + bytes / bandwidth, with its 95 % interval."]
    )
    return figure


def overlap(material: Material) -> Figure | None:
    """Products, an all-reduce and both at once, beside what they would take hidden wholly and one after the other."""
    rows = measured(material.of("collectives", variant="overlap"))
    shares = select(rows, metric="overlap_share")
    if not shares:
        return None
    title = "An all-reduce beside matrix products"
    figure, panels = new_figure(title, material.machine("collectives"), len(shares), height=3.4)
    for axes, share in zip(panels, shares, strict=True):
        size = share.params["bytes"]
        times = {r.params["what"]: r for r in select(rows, metric="call_time_s") if r.params["bytes"] == size}
        values = [1e3 * row.value for row in times.values()]
        highest = [1e3 * (row.ci_high or row.value) for row in times.values()]
        colours = [look(what, position)["color"] for position, what in enumerate(times)]
        axes.barh(list(times), values, xerr=_milliseconds(list(times.values())), color=colours, height=0.6)
        alone = values[:2]
        for bound in (max(alone), sum(alone)):
            axes.axvline(bound, color=INK, linestyle=(0, (5, 3)), linewidth=1.2)
        axes.invert_yaxis()
        axes.set(xlabel="milliseconds", xlim=(0, 1.05 * max(*highest, sum(alone))))
        axes.set_title(f"{byte_size(size)}: {100 * share.value:.0f} % of the shorter one hidden")
    add_notes(figure, ["Dashed: the longer one alone (all hidden), and one after the other (nothing hidden)."])
    return figure


def _milliseconds(rows: list[Row]) -> list[list[float]] | None:
    errors = errors_of(rows)
    return None if errors is None else [[1e3 * error for error in side] for side in errors]


def _swept(rows: list[Row]) -> str:
    """The format that was swept over the sizes: the one with most of them."""
    dtypes = [row.dtype for row in rows]
    return max(dict.fromkeys(dtypes), key=dtypes.count)


def _series(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows of each collective, by size."""
    names = dict.fromkeys(row.variant for row in rows)
    return {name: sorted(select(rows, variant=name), key=lambda row: row.params["bytes"]) for name in names}


def _draw_rates(axes: Axes, rates: list[Row], halves: list[Row]) -> list[str]:
    """The curves, a ring on each where it reaches half, and the limits; returns why there is none."""
    for position, (name, points) in enumerate(_series(rates).items()):
        style = look(name, position)
        sizes, values = [row.params["bytes"] for row in points], [row.value for row in points]
        axes.errorbar(sizes, values, errors_of(points), label=name, **style)
        for half in measured(select(halves, variant=name)):
            axes.plot(half.value, max(values) / 2, "o", markersize=10, markerfacecolor="none", color=style["color"])
    axes.set(ylabel="bus bandwidth, GB/s", title="Bus bandwidth: what each link carries in one direction")
    limits: dict[float, list[str]] = {}
    for row in rates:
        if row.limit is not None and row.variant not in limits.setdefault(row.limit, []):
            limits[row.limit].append(row.variant)
    for limit, names in limits.items():
        whose = f" ({', '.join(names)})" if len(limits) > 1 else ""
        limit_line(axes, limit, f"limit of the links {number(limit)} GB/s{whose}", MUTED)
    top = max([row.value if row.ci_high is None else row.ci_high for row in rates] + list(limits))
    axes.set_ylim(0, 1.1 * top)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    return list(dict.fromkeys(row.limit_source + "." for row in rates if row.limit is None))


def _draw_times(axes: Axes, times: list[Row], rows: list[Row], dtype: str) -> None:
    for position, (name, points) in enumerate(_series(times).items()):
        sizes = [row.params["bytes"] for row in points]
        axes.errorbar(sizes, [1e6 * row.value for row in points], _microseconds(points), linestyle="none", **look(name, position))
        fitted = {
            row.metric: row.value
            for row in measured(select(rows, variant=name, dtype=dtype))
            if row.metric in ("latency_s", "asymptotic_busbw_gb_s")
        }
        if len(fitted) == 2:
            grid = np.geomspace(min(sizes), max(sizes), 60)
            seconds = fitted["latency_s"] + grid * _bus_factor(rows, name, dtype) / fitted["asymptotic_busbw_gb_s"] / 1e9
            axes.plot(grid, 1e6 * seconds, linestyle=":", linewidth=1.2, color=look(name, position)["color"])
    axes.set(yscale="log", ylabel="time of a call, microseconds", title="Small messages cost latency, large ones bytes")
    log_ticks(axes.yaxis)


def _microseconds(points: list[Row]) -> list[list[float]] | None:
    errors = errors_of(points)
    return None if errors is None else [[1e6 * error for error in side] for side in errors]


def _bus_factor(rows: list[Row], name: str, dtype: str) -> float:
    """busbw / algbw, as the rows have it."""
    bus = measured(select(rows, metric="busbw_gb_s", variant=name, dtype=dtype))[0]
    same = select(rows, metric="algbw_gb_s", variant=name, dtype=dtype, params=bus.params)
    return bus.value / same[0].value


def _size_axis(axes: Axes, rows: list[Row]) -> None:
    sizes = sorted({row.params["bytes"] for row in rows})
    every = -(-len(sizes) // _MOST_TICKS)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes[::every], [byte_size(size) for size in sizes[::every]], rotation=30, ha="right", fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("message size S")


TITLES = {"collectives": "Collectives"}

PLOTS = (
    Plot(
        "collectives",
        "collectives",
        "Bus bandwidth by message size up to the limit of the links, and the time of a call down to its latency.",
        collectives,
    ),
    Plot("bucket_size", "collectives", "The size from which on more bytes add little.", bucket_size),
    Plot("overlap", "collectives", "An all-reduce and products, alone and both at once.", overlap),
)
