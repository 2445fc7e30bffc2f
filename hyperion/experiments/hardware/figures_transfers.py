"""Figures of what lies around a memory: copies to other memories, and launching the kernels that read it."""

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.experiments.hardware.figures_levels import byte_axis, reasons, working_set
from hyperion.figures.formats import byte_size, number, number_within
from hyperion.figures.material import Material, measured, select
from hyperion.figures.style import COLOURS, INK, MUTED, add_notes, errors_of, log_ticks, new_figure, spread_labels
from hyperion.results import Row


def transfers(material: Material) -> Figure | None:
    """GB/s by size between host and device, and from GPU to GPU; where there is neither, the largest tensor alone."""
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
    notes = []
    for tensor in tensors:
        notes.append(f"Largest tensor granted: {number(tensor.value)} GiB of {number(tensor.limit)} GiB ({tensor.limit_source}).")
    add_notes(figure, [*notes, *reasons(rows, None)])
    return figure


def launch_cost(material: Material) -> Figure | None:
    """What a launch costs as bars, and the time of a copy by size where it crosses them."""
    rows = material.of("launch_cost")
    launches = measured(select(rows, metric="launch_time_s"))
    copies = sorted(measured(select(rows, metric="bandwidth_gb_s")), key=working_set)
    if not launches:
        return None
    figure, panels = new_figure("Launching a kernel", material.machine("launch_cost"), 2 if copies else 1, height=3.6)
    microseconds = [1e6 * row.value for row in launches]
    colours = [_colour_of(row.variant) for row in launches]
    errors = [[1e6 * distance for distance in side] for side in errors_of(launches) or [[0] * len(launches)] * 2]
    panels[0].bar(range(len(launches)), microseconds, 0.5, yerr=errors, color=colours)
    for place, row in enumerate(launches):
        told = f"{number_within(1e6 * row.value, 1e6 * row.ci_low, 1e6 * row.ci_high)} µs"
        panels[0].annotate(told, (place, 1e6 * row.ci_high), xytext=(0, 3), textcoords="offset points", ha="center")
    panels[0].set_xticks(range(len(launches)), [row.variant for row in launches])
    panels[0].set(ylabel="microseconds a kernel", title="A kernel with next to nothing to do", xlim=(-0.8, len(launches) - 0.2))
    panels[0].set_ylim(0, 1.18 * panels[0].get_ylim()[1])
    panels[0].grid(False, axis="x")
    found = select(rows, metric="worthwhile_bytes")
    if copies:
        _draw_crossing(panels[1], copies, launches, measured(found))
    add_notes(figure, [_worthwhile_note(row) for row in found] + reasons(select(rows, metric="launch_time_s"), None))
    return figure


def _draw_copies(axes: Axes, copies: list[Row]) -> None:
    """One curve for each direction and kind of host memory: directions by colour, pageable memory dashed."""
    directions = list(dict.fromkeys(row.variant for row in copies))
    for direction in directions:
        colour = COLOURS[directions.index(direction)]
        for memory, line in (("pinned", "-"), ("pageable", "--")):
            points = [row for row in copies if (row.variant, row.params["memory"]) == (direction, memory)]
            points.sort(key=lambda row: row.params["bytes"])
            x, y = [p.params["bytes"] for p in points], [p.value for p in points]
            label = f"{direction}, {memory}"
            filled = {"markerfacecolor": "white"} if memory == "pageable" else {}
            axes.errorbar(x, y, errors_of(points), color=colour, linestyle=line, marker="o", label=label, **filled)
    axes.set(xscale="log", xlabel="bytes copied", ylabel="GB/s, each byte counted once", title="Host and device")
    byte_axis(axes, [row.params["bytes"] for row in copies], most=6)
    axes.set_ylim(0, None)
    axes.legend(loc="upper left", fontsize=8)


def _draw_peers(axes: Axes, peers: list[Row]) -> None:
    """The matrix of copies from each GPU (line) to each other one (column), GB/s in the cells."""
    places = sorted({row.params[end] for row in peers for end in ("source", "destination")})
    rates = np.full((len(places), len(places)), np.nan)
    for row in peers:
        rates[places.index(row.params["source"]), places.index(row.params["destination"])] = row.value
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
    axes.set(xlabel="to GPU", ylabel="from GPU", title=f"From GPU to GPU, {size} a copy: GB/s{limit}")


def _draw_tensor(axes: Axes, tensors: list[Row]) -> None:
    axes.barh([row.variant for row in tensors], [row.value for row in tensors], 0.4, color=COLOURS[0])
    for row in tensors:
        axes.axvline(row.limit, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2)
        axes.annotate(
            f"{number(row.value, 3)} GiB",
            (row.value, 0),
            xytext=(-6, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            color="white",
        )
    axes.set(xlabel="GiB, dashed: what it may have at most", title="The largest tensor that is granted", ylim=(-0.6, 0.6))
    axes.grid(False, axis="y")


def _draw_crossing(axes: Axes, copies: list[Row], launches: list[Row], found: list[Row]) -> None:
    """The copy's time by size on logarithmic axes, the launches as lines across, the size at which they cross."""
    times = [working_set(row) / row.value / 1e3 for row in copies]
    below = [t - working_set(row) / row.ci_high / 1e3 for t, row in zip(times, copies, strict=True)]
    above = [working_set(row) / row.ci_low / 1e3 - t for t, row in zip(times, copies, strict=True)]
    x = [working_set(row) for row in copies]
    axes.errorbar(x, times, [below, above], label=f"copy, {copies[0].params['timed']}", color=INK, marker="o")
    labels = []
    for row in launches:
        factor = found[0].params.get("launches", 1) if found and row.variant == "eager" else 1
        labels.append((1e6 * factor * row.value, f"{factor} × eager" if factor > 1 else row.variant, _colour_of(row.variant)))
    for y, _, colour in labels:
        axes.axhline(y, color=colour, linestyle=(0, (5, 3)), linewidth=1.2, zorder=1.5)
    for row in found:
        axes.axvline(row.value, color=MUTED, linestyle=":", linewidth=1.2)
        axes.axvspan(row.ci_low, row.ci_high, color=MUTED, alpha=0.15, linewidth=0)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bytes read and written by one copy",
        ylabel="microseconds a call",
        title="A copy by size, and launching it",
    )
    log_ticks(axes.yaxis)
    byte_axis(axes, x, most=6)
    axes.legend(loc="upper left", fontsize=8)
    spread_labels(axes, labels)


def _colour_of(launch: str) -> str:
    return {"eager": COLOURS[1], "graph": COLOURS[2]}.get(launch, COLOURS[0])


def _worthwhile_note(row: Row) -> str:
    if row.value is None:
        return f"Smallest copy worth its launch: not told ({row.value_reason})."
    low, high = byte_size(row.ci_low), byte_size(row.ci_high)
    return f"Smallest copy worth its launch: {byte_size(row.value)} ({low} – {high}): {row.params['set_equal']}."
