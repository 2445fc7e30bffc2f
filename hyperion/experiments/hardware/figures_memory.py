"""Figures of memory: bandwidth by working set and by number format, copies between memories, and kernel-launch times."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.errors import not_none
from hyperion.experiments.hardware.reasons import LAUNCHING
from hyperion.figures.material import Material, byte_size, interval, measured, number, number_within, percent, select, values
from hyperion.figures.style import (
    COLOURS,
    INK,
    MUTED,
    add_notes,
    errors_of,
    limit_line,
    log_ticks,
    look,
    new_figure,
    spread_labels,
    write_at,
)
from hyperion.results import Row

_MOST_TICKS = 9
_BITS = re.compile(r"[0-9]+")


def memory_levels(material: Material) -> Figure | None:
    """Plot the GB/s of repeated reads and copies by working set, the number of distinct bytes that a call touches.

    Vertical lines show the cache capacities. A dashed line shows the memory bandwidth limit.
    """
    rows = material.of("memory_levels", metric="bandwidth_gb_s")
    if not measured(rows):
        return None
    figure, (axes,) = new_figure("Bandwidth by working set", material.machine("memory_levels"), height=4.6)
    for position, name in enumerate(dict.fromkeys(row.variant for row in measured(rows))):
        points = sorted(measured(select(rows, variant=name)), key=_working_set)
        style = look(name, position + 1)
        axes.errorbar([_working_set(p) for p in points], values(points), errors_of(points), label=name, **style)
        launching = [p for p in points if p.limit_source.startswith(LAUNCHING)]
        hollow = style | {"markerfacecolor": "white", "linestyle": "none", "zorder": 4}
        axes.plot([_working_set(p) for p in launching], values(launching), **hollow)
    _limits(axes, rows, "device memory, limit")
    axes.set(xscale="log", xlabel="working set, read or copied repeatedly", ylabel="GB/s, median with 95 % interval")
    _byte_axis(axes, [_working_set(row) for row in measured(rows)])
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    _mark_capacities(axes, material.of("memory_levels", metric="cache_bytes"))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.05), ncols=2, borderaxespad=0.2)
    notes = ["Hollow marks: launches take at least half of the time, so these points say nothing about caches."]
    launching = any(row.limit_source.startswith(LAUNCHING) for row in rows)
    add_notes(figure, (notes if launching else []) + _reasons(rows, _working_set))
    return figure


def stream_formats(material: Material) -> Figure | None:
    """Draw the GB/s of each stream in each number format as bars, with the memory bandwidth limit.

    Notes below the figure give the comparison with a plain loop and the energy per gigabyte.
    """
    rows = [r for r in material.of("stream_formats", metric="bandwidth_gb_s") if "plain_loop_calls" not in r.params]
    if not measured(rows):
        return None
    figure, (axes,) = new_figure("Streams by number format", material.machine("stream_formats"))
    operations = list(dict.fromkeys(row.variant for row in rows))
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    width = 0.8 / len(dtypes)
    for place, dtype in enumerate(dtypes):
        bars = measured(select(rows, dtype=dtype))
        x = [operations.index(bar.variant) + (place - (len(dtypes) - 1) / 2) * width for bar in bars]
        heights = values(bars)
        colour = look(dtype)["color"]
        axes.bar(x, heights, 0.92 * width, yerr=errors_of(bars), color=colour, label=dtype, error_kw={"elinewidth": 1})
        _write_in_bars(axes, x, heights, max(values(measured(rows))))
    limits = _limits(axes, rows, "limit")
    axes.set_xticks(range(len(operations)), operations)
    axes.grid(False, axis="x")
    axes.set_ylabel("GB/s, median with 95 % interval")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)
    if len(limits) == 1:
        add_share_axis(axes, limits[0])
    size = byte_size(rows[0].params["elements"] * element_bytes(rows[0].dtype))
    notes = [
        f"Arrays have {size} in every format. Caches are flushed. Copy and scale use 2 arrays, add and triad 3, and dot reads 2."
    ]
    notes += _plain_loop_notes(material) + _energy_notes(material) + _reasons(rows)
    add_notes(figure, notes)
    return figure


def transfers(material: Material) -> Figure | None:
    """Plot the GB/s of host-device copies by size, and the GB/s of GPU-to-GPU copies.

    If the run has no such copies, show the size of the largest tensor that could be allocated.
    """
    rows = material.of("transfers")
    copies = [row for row in measured(rows) if "memory" in row.params]
    peers = [row for row in measured(rows) if "destination" in row.params]
    tensors = measured(select(rows, metric="largest_allocation_gib"))
    if not copies and not peers and not tensors:
        return None
    drawers: list[Callable[[Axes], None]] = []
    drawers += [lambda axes: _draw_copies(axes, copies)] if copies else []
    drawers += [lambda axes: _draw_peers(axes, peers)] if peers else []
    alone = not drawers
    drawers = drawers or [lambda axes: _draw_tensor(axes, tensors)]
    figure, panels = new_figure(
        "Copies between memories", material.machine("transfers"), len(drawers), height=2.6 if alone else 4.4
    )
    for draw, axes in zip(drawers, panels, strict=True):
        draw(axes)
    notes = [
        f"Largest tensor: {number(tensor.value)} GiB of {number(tensor.limit)} GiB ({tensor.limit_source})." for tensor in tensors
    ]
    add_notes(figure, notes + _reasons(rows))
    return figure


def launch_cost(material: Material) -> Figure | None:
    """Draw two panels: bars of kernel-launch times, and the time of a copy by size.

    In the second panel, horizontal lines show the launch times.
    """
    rows = material.of("launch_cost")
    launches = measured(select(rows, metric="launch_time_s"))
    copies = sorted(measured(select(rows, metric="bandwidth_gb_s")), key=_working_set)
    if not launches:
        return None
    figure, panels = new_figure("Cost of a kernel launch", material.machine("launch_cost"), 2 if copies else 1, height=3.6)
    microseconds = [1e6 * seconds for seconds in values(launches)]
    colours = [_colour_of(row.variant) for row in launches]
    panels[0].bar(range(len(launches)), microseconds, 0.5, yerr=errors_of(launches, 1e6), color=colours)
    for place, row in enumerate(launches):
        value, low, high = (1e6 * not_none(seconds) for seconds in (row.value, row.ci_low, row.ci_high))
        # A narrow interval within one launch allows more digits than another launch repeats.
        text = f"{min(number_within(value, low, high), number(value), key=len)} µs"
        write_at(panels[0], text, (place, high), (0, 3), ha="center")
    panels[0].set_xticks(range(len(launches)), [row.variant for row in launches])
    panels[0].set(ylabel="microseconds per kernel", title="An almost empty kernel", xlim=(-0.8, len(launches) - 0.2))
    panels[0].set_ylim(0, 1.18 * panels[0].get_ylim()[1])
    panels[0].grid(False, axis="x")
    worthwhile = select(rows, metric="worthwhile_bytes")
    if copies:
        _draw_crossing(panels[1], copies, launches, measured(worthwhile))
    add_notes(figure, [_worthwhile_note(row) for row in worthwhile] + _reasons(select(rows, metric="launch_time_s")))
    return figure


def element_bytes(dtype: str) -> float:
    """Return the number of bytes in one stored element of a dtype.

    The size is read from the number of bits in the dtype's name, for example bf16, tf32 or fp8_e4m3fn. The sizes in
    `hyperion.measure.FORMATS` are the same, but they are not used here because that module imports torch.
    """
    return int(not_none(_BITS.search(dtype))[0]) / 8


def add_share_axis(axes: Axes, limit: float) -> None:
    """Add a right-hand axis that shows the values as percentages of a limit."""
    functions: Any = (
        lambda y: 100 * y / limit,
        lambda y: y * limit / 100,
    )  # matplotlib's type annotations for these functions are too broad
    share = axes.secondary_yaxis("right", functions=functions)
    share.set_ylabel("% of limit")


def _working_set(row: Row) -> int:
    """Return the number of distinct bytes that a call touches."""
    return row.params["working_set_bytes"]


def _byte_axis(axes: Axes, sizes: Iterable[int], most: int = _MOST_TICKS) -> None:
    """Label the horizontal axis with at most `most` of the measured sizes."""
    different = sorted(set(sizes))
    ticks = different[:: -(-len(different) // most)]
    axes.set_xticks(ticks, [byte_size(tick) for tick in ticks])
    axes.minorticks_off()


def _limits(axes: Axes, rows: list[Row], name: str) -> list[float]:
    """Draw a line for each distinct limit of the rows, such as the data-sheet bandwidth, and return these limits."""
    limits = list(dict.fromkeys(row.limit for row in rows if row.limit is not None))
    for limit in limits:
        limit_line(axes, limit, f"{name} {number(limit)} GB/s", MUTED)
    return limits


def _mark_capacities(axes: Axes, capacities: list[Row]) -> None:
    low, high = axes.get_xlim()
    for row in measured(capacities):
        capacity = not_none(row.value)
        if not low < capacity < high:
            continue
        several = f" × {row.params['caches']}" if row.params.get("caches", 1) > 1 else ""
        axes.axvline(capacity, color=MUTED, linestyle=":", linewidth=1.1, zorder=1.5)
        write_at(
            axes,
            f"{row.variant} {byte_size(capacity)}{several}",
            (capacity, 1),
            (0, 3),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=8,
            color=MUTED,
        )


def _write_in_bars(axes: Axes, x: list[float], heights: list[float], most: float) -> None:
    """Write each value into its bar, or above the bar if it is too short."""
    for place, height in zip(x, heights, strict=True):
        inside = height > 0.25 * most
        write_at(
            axes,
            number(height, 3),
            (place, 0 if inside else height),
            (0, 4 if inside else 6),
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=7.5,
            color="white" if inside else INK,
        )


def _plain_loop_notes(material: Material) -> list[str]:
    """Return one note for each measured comparison of the copy with a plain loop.

    The note also states the rate of the triad in the same number format.
    """
    notes = []
    for row in measured(material.of("stream_formats", metric="speedup")):
        ends = interval(row.value, row.ci_low, row.ci_high)
        note = (
            f"Rate of the copy over a plain loop of copy_, interleaved, {row.dtype}, warm caches: {number(row.value)} ({ends})."
        )
        for triad in measured(material.of("stream_formats", variant="triad", metric="bandwidth_gb_s", dtype=row.dtype)):
            share = f", {percent(triad.fraction_of_limit)} % of its limit" if triad.limit is not None else ""
            note += f" Triad: {number(triad.value)} GB/s{share}."
        notes.append(note)
    return notes


def _energy_notes(material: Material) -> list[str]:
    rows = material.of("stream_formats", metric="energy_j_per_gb")
    joules = [f"{row.variant} {number(row.value, 3)}" for row in measured(rows)]
    missing = dict.fromkeys(row.value_reason for row in rows if row.value is None)
    energy = [f"Joules per gigabyte in {rows[0].dtype}, from the power during the stream: {', '.join(joules)}."] if joules else []
    return energy + [f"The joules per gigabyte are unknown: {reason}." for reason in missing]


def _reasons(rows: list[Row], size_of: Callable[[Row], int] | None = None) -> list[str]:
    """Return one note for each reason why rows have no value or no limit.

    Each note names the sizes of the rows that the reason applies to, or their variants if `size_of` is None.
    """
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        if row.value is None:
            grouped.setdefault(f"not measured ({row.value_reason})", []).append(row)
        elif row.limit is None and row.limit_source.startswith("no limit: "):
            grouped.setdefault(row.limit_source.partition(" (")[0], []).append(row)
    return [f"{_names_or_sizes(alike, size_of)}: {reason}." for reason, alike in grouped.items()]


def _names_or_sizes(rows: list[Row], size_of: Callable[[Row], int] | None) -> str:
    if size_of is None:
        return ", ".join(dict.fromkeys(row.variant for row in rows))
    sizes = sorted({size_of(row) for row in rows})
    return byte_size(sizes[0]) if len(sizes) == 1 else f"{byte_size(sizes[0])} to {byte_size(sizes[-1])}"


def _draw_copies(axes: Axes, copies: list[Row]) -> None:
    """Draw one curve for each direction and kind of host memory. Colours show the direction; dashes show pageable memory."""
    directions = list(dict.fromkeys(row.variant for row in copies))
    for direction in directions:
        colour = COLOURS[directions.index(direction)]
        for memory, line in (("pinned", "-"), ("pageable", "--")):
            points = [row for row in copies if (row.variant, row.params["memory"]) == (direction, memory)]
            points.sort(key=lambda row: row.params["bytes"])
            x, label = [p.params["bytes"] for p in points], f"{direction}, {memory}"
            style: dict[str, Any] = {"color": colour, "linestyle": line, "marker": "o"}
            if memory == "pageable":
                style["markerfacecolor"] = "white"
            axes.errorbar(x, values(points), errors_of(points), label=label, **style)
    axes.set(xscale="log", xlabel="bytes copied", ylabel="GB/s, each byte counted once", title="Host and device")
    _byte_axis(axes, [row.params["bytes"] for row in copies], most=6)
    axes.set_ylim(0, None)
    axes.legend(loc="upper left", fontsize=8)


def _draw_peers(axes: Axes, peers: list[Row]) -> None:
    """Draw a matrix with the GB/s of copies from each GPU (row) to each other GPU (column)."""
    places = sorted({row.params[end] for row in peers for end in ("source", "destination")})
    rates = np.full((len(places), len(places)), np.nan)
    for row in peers:
        rates[places.index(row.params["source"]), places.index(row.params["destination"])] = not_none(row.value)
    axes.imshow(rates, cmap="Blues", vmin=0, vmax=1.25 * np.nanmax(rates))
    middle = 0.6 * 1.25 * np.nanmax(rates)
    for (line, column), rate in np.ndenumerate(rates):
        text, colour = ("", MUTED) if np.isnan(rate) else (number(rate, 3), "white" if rate > middle else INK)
        axes.text(column, line, text, ha="center", va="center", color=colour, fontsize=10 if len(places) < 6 else 7.5)
    axes.set_xticks(range(len(places)), places)
    axes.set_yticks(range(len(places)), places)
    axes.grid(False)
    size = byte_size(peers[0].params["bytes"])
    limits = {row.limit for row in peers if row.limit is not None}
    limit = f", limit {number(max(limits))}" if limits else ""
    axes.set(xlabel="to GPU", ylabel="from GPU", title=f"From GPU to GPU, {size} per copy: GB/s{limit}")


def _draw_tensor(axes: Axes, tensors: list[Row]) -> None:
    axes.barh([row.variant for row in tensors], values(tensors), 0.4, color=COLOURS[0])
    for row in tensors:
        axes.axvline(not_none(row.limit), color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2)
        write_at(axes, f"{number(row.value, 3)} GiB", (not_none(row.value), 0), (-6, 0), ha="right", va="center", color="white")
    axes.set(xlabel="GiB; dashed: upper limit", title="Largest tensor that could be allocated", ylim=(-0.6, 0.6))
    axes.grid(False, axis="y")


def _draw_crossing(axes: Axes, copies: list[Row], launches: list[Row], worthwhile: list[Row]) -> None:
    """Draw the time of a copy by size, and launch times as horizontal lines. Mark the size at which both are equal."""
    x = [_working_set(row) for row in copies]
    # 1 GB/s is 1e3 bytes per microsecond.
    times = [size / rate / 1e3 for size, rate in zip(x, values(copies), strict=True)]
    below = [t - size / not_none(row.ci_high) / 1e3 for t, size, row in zip(times, x, copies, strict=True)]
    above = [size / not_none(row.ci_low) / 1e3 - t for t, size, row in zip(times, x, copies, strict=True)]
    axes.errorbar(x, times, [below, above], label=f"copy, {copies[0].params['timed']}", color=INK, marker="o")
    labels = []
    for row in launches:
        factor = worthwhile[0].params.get("launches", 1) if worthwhile and row.variant == "eager" else 1
        labels.append(
            (1e6 * factor * not_none(row.value), f"{factor} × eager" if factor > 1 else row.variant, _colour_of(row.variant))
        )
    for y, _, colour in labels:
        axes.axhline(y, color=colour, linestyle=(0, (5, 3)), linewidth=1.2, zorder=1.5)
    for row in worthwhile:
        axes.axvline(not_none(row.value), color=MUTED, linestyle=":", linewidth=1.2)
        axes.axvspan(not_none(row.ci_low), not_none(row.ci_high), color=MUTED, alpha=0.15, linewidth=0)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bytes read and written by one copy",
        ylabel="microseconds per call",
        title="Time of a copy by size, and of its launch",
    )
    log_ticks(axes.yaxis)
    _byte_axis(axes, x, most=6)
    axes.legend(loc="upper left", fontsize=8)
    spread_labels(axes, labels)


def _colour_of(launch: str) -> str:
    return {"eager": COLOURS[1], "graph": COLOURS[2]}.get(launch, COLOURS[0])


def _worthwhile_note(row: Row) -> str:
    if row.value is None:
        return f"The smallest copy that takes longer than its launch is unknown: {row.value_reason}."
    low, high = byte_size(not_none(row.ci_low)), byte_size(not_none(row.ci_high))
    return f"Smallest copy that takes longer than its launch: {byte_size(row.value)} ({low} – {high}): {row.params['set_equal']}."
