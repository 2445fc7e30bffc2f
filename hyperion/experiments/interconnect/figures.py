"""Figures and tables for the interconnect chapter: rates by message size, recommended sizes, overlap, links and kernels."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.errors import not_none
from hyperion.figures.material import Material, Plot, Quote, best_rows, byte_size, measured, number, select, values
from hyperion.figures.style import INK, MUTED, add_notes, errors_of, limit_line, log_ticks, look, new_figure, write_at
from hyperion.results import Row
from hyperion.units import MIB

_MOST_TICKS = 9
# Collectives that DDP and FSDP use to exchange gradients and weights.
_IN_TRAINING = ("all_reduce", "all_gather", "reduce_scatter")
_DDP_BUCKET = 25 * MIB


def collectives(material: Material) -> Figure | None:
    """Draw two panels with one curve per collective: the bus bandwidth and the time of a call, both by message size.

    The first panel also shows the limit of the links. The second also shows the fit latency + bytes / bandwidth.
    """
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
        f"{dtype}; sizes are defined as in nccl-tests. Times are those of the slowest rank, median with 95 % interval. A ring "
        "marks half of the best rate of a collective. Dotted: the fit latency + bytes / bandwidth."
    ]
    add_notes(figure, notes)
    return figure


def bucket_size(material: Material) -> Figure | None:
    """Plot the rate by message size as a share of the best rate.

    Vertical lines mark the recommended size of each collective and the default size of DDP's buckets.
    """
    rows = material.of("collectives")
    advised = measured(select(rows, metric="recommended_bytes"))
    advised = [row for row in advised if row.variant in _IN_TRAINING]
    if not advised:
        return None
    rates = measured(select(rows, metric="busbw_gb_s", dtype=advised[0].dtype))
    rates = [row for row in rates if row.variant in _IN_TRAINING]
    figure, (axes,) = new_figure("How large is large enough?", material.machine("collectives"), height=4.6)
    for position, (name, points) in enumerate(_series(rates).items()):
        style, shares = look(name, position), np.array(values(points))
        axes.plot([row.params["bytes"] for row in points], 100 * shares / shares.max(), label=name, **style)
        for row in select(advised, variant=name):
            axes.axvline(not_none(row.value), color=style["color"], linestyle=":", linewidth=1.4)
            axes.axvspan(not_none(row.ci_low), not_none(row.ci_high), color=style["color"], alpha=0.12, linewidth=0)
    axes.axvline(_DDP_BUCKET, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2)
    write_at(
        axes,
        "DDP's 25 MiB",
        (_DDP_BUCKET, 0.06),  # the curves are higher at this size
        (-3, 0),
        xycoords=("data", "axes fraction"),
        ha="right",
        va="bottom",
        rotation=90,
        fontsize=8,
        color=MUTED,
    )
    _size_axis(axes, rates)
    axes.set(ylabel="rate, % of the best measured rate", title="Share of the rate that a message of size S reaches")
    axes.legend(loc="upper left")
    share = f"{100 * advised[0].params['share']:.0f} %"
    note = f"Dotted: the size that reaches {share} of the rate by the fit latency + bytes / bandwidth, with its 95 % interval."
    add_notes(figure, [note])
    return figure


def overlap(material: Material) -> Figure | None:
    """Draw the times of matrix products alone, of an all-reduce alone, and of both together.

    Dashed lines show two bounds on the time of both together. At the lower bound, the longer operation hides the shorter one
    completely. At the upper bound, nothing is hidden.
    """
    rows = measured(material.of("collectives", variant="overlap"))
    shares = select(rows, metric="overlap_share")
    if not shares:
        return None
    figure, panels = new_figure("An all-reduce during matrix products", material.machine("collectives"), len(shares), height=3.4)
    for axes, share in zip(panels, shares, strict=True):
        size = share.params["bytes"]
        times = {r.params["what"]: r for r in select(rows, metric="call_time_s") if r.params["bytes"] == size}
        milliseconds = [1e3 * seconds for seconds in values(times.values())]
        highest = [1e3 * not_none(row.ci_high or row.value) for row in times.values()]
        colours = [look(what, position)["color"] for position, what in enumerate(times)]
        axes.barh(list(times), milliseconds, xerr=errors_of(list(times.values()), 1e3), color=colours, height=0.6)
        alone = milliseconds[:2]
        for bound in (max(alone), sum(alone)):
            axes.axvline(bound, color=INK, linestyle=(0, (5, 3)), linewidth=1.2)
        axes.invert_yaxis()
        axes.set(xlabel="milliseconds", xlim=(0, 1.05 * max(*highest, sum(alone))))
        hidden = 100 * not_none(share.value)
        axes.set_title(
            f"{byte_size(size)}: {hidden:.0f} % of the shorter one hidden"
            if hidden >= 0
            else f"{byte_size(size)}: nothing hidden; both at once take longer than in turn"
        )
    add_notes(
        figure, ["Dashed lines: time of the longer one alone (shorter one hidden), and sum of both times (nothing hidden)."]
    )
    return figure


def mpi_collectives(material: Material) -> Figure | None:
    """Draw the bus bandwidth of the collectives through MPI, one panel per number of ranks and path.

    A dashed curve shows the all-reduce of the experiment `collectives` on the same number of ranks.
    """
    rates = measured(material.of("mpi_collectives", metric="busbw_gb_s"))
    cases = list(dict.fromkeys((row.params["ranks"], row.params["path"]) for row in rates))
    if not cases:
        return None
    title = f"Collectives through {rates[0].params['backend'].replace('mpi', 'MPI', 1)}"
    figure, panels = new_figure(title, material.machine("mpi_collectives"), len(cases), height=4.6)
    notes = ["Dashed: the all_reduce of the experiment collectives on as many ranks. Medians with 95 % intervals."]
    for axes, (ranks, path) in zip(panels, cases, strict=True):
        own = [row for row in rates if (row.params["ranks"], row.params["path"]) == (ranks, path)]
        notes += [f"{path}: {reason}" for reason in _draw_rates(axes, own, [])]
        others = measured(material.of("collectives", variant="all_reduce", metric="busbw_gb_s", dtype=own[0].dtype))
        others = [row for row in others if row.params["ranks"] == ranks]
        for points in _series(others).values():
            axes.plot([row.params["bytes"] for row in points], values(points), color=INK, linestyle=(0, (5, 3)))
        # NCCL can be a hundred times as fast as a path through host memory.
        shown = values(others + own) + [row.limit for row in own if row.limit is not None]
        axes.set_ylim(min(shown) / 2, max(shown) * 2)
        axes.set_yscale("log")
        log_ticks(axes.yaxis)
        _size_axis(axes, others + own)
        axes.set_title(f"{ranks} ranks, {path}")
    panels[0].legend(loc="lower right")
    add_notes(figure, notes)
    return figure


def rates_by_size(rows: Iterable[Row], metric: str = "busbw_gb_s") -> pd.DataFrame:
    """Return a table with the values of one metric as strings.

    It has one line per format and size, and one column per collective. Missing values are empty strings.
    """
    chosen = [row for row in rows if row.metric == metric]
    order = list(dict.fromkeys(row.dtype for row in chosen))
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for row in sorted(chosen, key=lambda row: (order.index(row.dtype), row.params["bytes"])):
        size = row.params["bytes"]
        line = lines.setdefault((row.dtype, size), {"dtype": row.dtype, "S": byte_size(size)})
        line[row.variant] = number(row.value, 3)
    return pd.DataFrame(list(lines.values())).fillna("")


def links_between(rows: Iterable[Row]) -> pd.DataFrame:
    """Return a table of the links between devices, with one line per sender and one column per receiver.

    The table is empty if the rows contain no device pairs.
    """
    pairs = _linked_pairs(rows)
    devices = sorted({pair["from"] for pair in pairs})
    links = {(pair["from"], pair["to"]): pair["link"] for pair in pairs}
    nodes = {pair["from"]: pair["NUMA node"] for pair in pairs}
    return pd.DataFrame(
        [
            {
                "from": f"GPU{one}",
                **{f"to GPU{other}": links.get((one, other), "X") for other in devices},
                "NUMA node": nodes[one],
            }
            for one in devices
        ]
    )


def link_meanings(rows: Iterable[Row]) -> str:
    """Return the meanings of the abbreviations in the table of `links_between`, with their source.

    Return an empty string if the rows contain no device pairs.
    """
    pairs = _linked_pairs(rows)
    meanings = dict.fromkeys(f"{pair['link']}: {pair['meaning']}" for pair in pairs)
    return "; ".join([*meanings, f"source: {pairs[0]['source']}"]) if pairs else ""


def kernels_chosen(rows: Iterable[Row]) -> pd.DataFrame:
    """Return a table of the backend, algorithm and kernel for each collective and message size.

    If the algorithm is unknown, the table gives the reason instead.
    """
    lines = [
        {
            "collective": row.variant,
            "S": byte_size(row.params["bytes"]),
            "backend": row.params["backend"],
            "algorithm": row.params["algorithm"] if row.value else row.value_reason,
            "kernel": row.params["kernel"],
        }
        for row in rows
        if row.params.get("what") == "kernels"
    ]
    return pd.DataFrame(lines)


def _linked_pairs(rows: Iterable[Row]) -> list[dict]:
    return [row.params for row in rows if (row.variant, row.params.get("what")) == ("topology", "links")]


def _swept(rows: Sequence[Row]) -> str:
    """Return the dtype measured at all message sizes: the one with the most rows."""
    dtypes = [row.dtype for row in rows]
    return max(dict.fromkeys(dtypes), key=dtypes.count)


def _series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return a dict that maps each collective's name to its rows, sorted by message size."""
    names = dict.fromkeys(row.variant for row in rows)
    return {name: sorted(select(rows, variant=name), key=lambda row: row.params["bytes"]) for name in names}


def _draw_rates(axes: Axes, rates: list[Row], halves: list[Row]) -> list[str]:
    """Plot the bus bandwidth of each collective by message size, with its limit. Return the reasons why limits are missing.

    A ring marks the size at which a collective reaches half of its best rate.
    """
    for position, (name, points) in enumerate(_series(rates).items()):
        style, sizes, heights = look(name, position), [row.params["bytes"] for row in points], values(points)
        axes.errorbar(sizes, heights, errors_of(points), label=name, **style)
        for half in values(measured(select(halves, variant=name))):
            axes.plot(half, max(heights) / 2, "o", markersize=10, markerfacecolor="none", color=style["color"])
    axes.set(ylabel="bus bandwidth, GB/s", title="Bus bandwidth: the rate of each link in one direction")
    limits: dict[float, list[str]] = {}
    for row in rates:
        if row.limit is not None and row.variant not in limits.setdefault(row.limit, []):
            limits[row.limit].append(row.variant)
    for limit, names in limits.items():
        whose = f" ({', '.join(names)})" if len(limits) > 1 else ""
        limit_line(axes, limit, f"limit of the links {number(limit)} GB/s{whose}", MUTED)
    top = max([not_none(row.value if row.ci_high is None else row.ci_high) for row in rates] + list(limits))
    axes.set_ylim(0, 1.1 * top)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    return list(dict.fromkeys(row.limit_source + "." for row in rates if row.limit is None))


def _draw_times(axes: Axes, times: list[Row], rows: list[Row], dtype: str) -> None:
    """Plot the measured times in microseconds, and the fitted curve if there is one."""
    for position, (name, points) in enumerate(_series(times).items()):
        sizes, microseconds = [row.params["bytes"] for row in points], [1e6 * seconds for seconds in values(points)]
        axes.errorbar(sizes, microseconds, errors_of(points, 1e6), linestyle="none", **look(name, position))
        fitted = {
            row.metric: not_none(row.value)
            for row in measured(select(rows, variant=name, dtype=dtype))
            if row.metric in ("latency_s", "asymptotic_busbw_gb_s")
        }
        if len(fitted) == 2:
            grid = np.geomspace(min(sizes), max(sizes), 60)
            seconds = fitted["latency_s"] + grid * _bus_factor(rows, name, dtype) / fitted["asymptotic_busbw_gb_s"] / 1e9
            axes.plot(grid, 1e6 * seconds, linestyle=":", linewidth=1.2, color=look(name, position)["color"])
    axes.set(yscale="log", ylabel="time of a call, microseconds", title="Time of a call by message size")
    log_ticks(axes.yaxis)


def _bus_factor(rows: list[Row], name: str, dtype: str) -> float:
    """Return the bus bandwidth divided by the algorithm bandwidth, a ratio that does not depend on the message size."""
    bus = measured(select(rows, metric="busbw_gb_s", variant=name, dtype=dtype))[0]
    algorithm = select(rows, metric="algbw_gb_s", variant=name, dtype=dtype, params=bus.params)[0]
    return not_none(bus.value) / not_none(algorithm.value)


def _size_axis(axes: Axes, rows: list[Row]) -> None:
    sizes = sorted({row.params["bytes"] for row in rows})
    every = -(-len(sizes) // _MOST_TICKS)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes[::every], [byte_size(size) for size in sizes[::every]], rotation=30, ha="right", fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("message size S")


def headlines(rows: list[Row], is_steady: Callable[[Row], bool]) -> Iterator[Quote]:
    """Yield the fastest all-reduce for each number of devices."""
    reduces = filter(is_steady, select(rows, metric="busbw_gb_s", variant="all_reduce"))
    for row in best_rows(reduces, lambda row: row.params["ranks"]):
        yield Quote(f"all-reduce over {row.params['ranks']} devices", row)


TITLES = {"collectives": "Collectives", "mpi_collectives": "Collectives through MPI"}

PLOTS = (
    Plot(
        "collectives",
        "collectives",
        "Bus bandwidth by message size with the limit of the links, and the time of a call.",
        collectives,
    ),
    Plot("bucket_size", "collectives", "The message size above which the bandwidth hardly increases.", bucket_size),
    Plot("overlap", "collectives", "Times of an all-reduce and of matrix products, alone and at the same time.", overlap),
    Plot("mpi_collectives", "mpi_collectives", "Bus bandwidth through MPI by message size, by path.", mpi_collectives),
)
