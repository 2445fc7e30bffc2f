"""Figures of one memory: its bandwidth by working set, through the caches, and by number format."""

from collections.abc import Callable, Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.figures.formats import byte_size, interval, number, percent
from hyperion.figures.material import Material, measured, select
from hyperion.figures.style import INK, MUTED, add_notes, errors_of, limit_line, look, new_figure
from hyperion.results import Row

_MOST_TICKS = 9
_LAUNCHING = "no limit: mostly launching"


def memory_levels(material: Material) -> Figure | None:
    """GB/s by working set, the capacities of the caches as vertical marks, the limit of the memory dashed."""
    rows = material.of("memory_levels", metric="bandwidth_gb_s")
    if not measured(rows):
        return None
    figure, (axes,) = new_figure("Bandwidth by working set", material.machine("memory_levels"), height=4.6)
    for position, name in enumerate(dict.fromkeys(row.variant for row in measured(rows))):
        points = sorted(measured(select(rows, variant=name)), key=working_set)
        style = look(name, position + 1)
        axes.errorbar([working_set(p) for p in points], [p.value for p in points], errors_of(points), label=name, **style)
        launching = [p for p in points if p.limit_source.startswith(_LAUNCHING)]
        axes.plot(
            [working_set(p) for p in launching],
            [p.value for p in launching],
            linestyle="none",
            zorder=4,
            **style | {"markerfacecolor": "white"},
        )
    _limits(axes, rows, "device memory, limit")
    axes.set(xscale="log", xlabel="working set, read or copied again and again", ylabel="GB/s, median with 95 % interval")
    byte_axis(axes, [working_set(row) for row in measured(rows)])
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    _mark_capacities(axes, material.of("memory_levels", metric="cache_bytes"))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.05), ncols=2, borderaxespad=0.2)
    notes = ["Hollow: launching takes half of the time or more, so that the point tells of launches, not of a cache."]
    hollow = any(row.limit_source.startswith(_LAUNCHING) for row in rows)
    add_notes(figure, (notes if hollow else []) + reasons(rows, working_set))
    return figure


def stream_formats(material: Material) -> Figure | None:
    """Bars by operation and number format with the limit of the memory; the plain loop and the energy in words."""
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
        heights = [bar.value for bar in bars]
        colour = look(dtype)["color"]
        axes.bar(x, heights, 0.92 * width, yerr=errors_of(bars), color=colour, label=dtype, error_kw={"elinewidth": 1})
        _write_in_bars(axes, x, heights, max(row.value for row in measured(rows)))
    limits = _limits(axes, rows, "limit")
    axes.set_xticks(range(len(operations)), operations)
    axes.grid(False, axis="x")
    axes.set_ylabel("GB/s, median with 95 % interval")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)
    if len(limits) == 1:
        limit = limits[0]
        share = axes.secondary_yaxis("right", functions=(lambda y: 100 * y / limit, lambda y: y * limit / 100))
        share.set_ylabel("% of limit")
    size = byte_size(rows[0].params["elements"] * _BYTES.get(rows[0].dtype, 4))
    notes = [f"Arrays of {size} in every format, caches flushed; copy and scale have 2, add and triad 3, dot reads 2."]
    notes += _plain_loop_note(material) + _energy_note(material) + reasons(rows, None)
    add_notes(figure, notes)
    return figure


_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}


def working_set(row: Row) -> int:
    """Different bytes that a call touches."""
    return row.params["working_set_bytes"]


def byte_axis(axes: Axes, sizes: Iterable[int], most: int = _MOST_TICKS) -> None:
    """Ticks at measured sizes, no more than `most` of them."""
    sizes = sorted(set(sizes))
    ticks = sizes[:: -(-len(sizes) // most)]
    axes.set_xticks(ticks, [byte_size(tick) for tick in ticks])
    axes.minorticks_off()


def _limits(axes: Axes, rows: list[Row], name: str) -> list[float]:
    limits = list(dict.fromkeys(row.limit for row in rows if row.limit is not None))
    for limit in limits:
        limit_line(axes, limit, f"{name} {number(limit)} GB/s", MUTED)
    return limits


def _mark_capacities(axes: Axes, capacities: list[Row]) -> None:
    low, high = axes.get_xlim()
    for row in measured(capacities):
        if not low < row.value < high:
            continue
        several = f" × {row.params['caches']}" if row.params.get("caches", 1) > 1 else ""
        axes.axvline(row.value, color=MUTED, linestyle=":", linewidth=1.1, zorder=1.5)
        axes.annotate(
            f"{row.variant} {byte_size(row.value)}{several}",
            (row.value, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
            color=MUTED,
        )


def _write_in_bars(axes: Axes, x: list[float], heights: list[float], most: float) -> None:
    """Each bar's value along it, above it where it is too low to hold its value."""
    for place, height in zip(x, heights, strict=True):
        inside = height > 0.25 * most
        axes.annotate(
            number(height, 3),
            (place, 0 if inside else height),
            xytext=(0, 4 if inside else 6),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=7.5,
            color="white" if inside else INK,
        )


def _plain_loop_note(material: Material) -> list[str]:
    """How our copy compares with the loop anybody would write, and what the triad of that format reaches beside it."""
    notes = []
    for row in measured(material.of("stream_formats", metric="speedup")):
        told = interval(row.value, row.ci_low, row.ci_high)
        note = f"Copy over a plain loop of copy_, interleaved, {row.dtype}, warm caches: {number(row.value)} ({told})."
        for triad in measured(material.of("stream_formats", variant="triad", metric="bandwidth_gb_s", dtype=row.dtype)):
            share = f", {percent(triad.fraction_of_limit)} % of its limit" if triad.limit is not None else ""
            note += f" Triad: {number(triad.value)} GB/s{share}."
        notes.append(note)
    return notes


def _energy_note(material: Material) -> list[str]:
    rows = material.of("stream_formats", metric="energy_j_per_gb")
    told = [f"{row.variant} {number(row.value, 3)}" for row in measured(rows)]
    reasons = dict.fromkeys(row.value_reason for row in rows if row.value is None)
    energy = [f"Joules for a gigabyte in {rows[0].dtype}, power read beside: {', '.join(told)}."] if told else []
    return energy + [f"Joules for a gigabyte: not told ({reason})." for reason in reasons]


def reasons(rows: list[Row], size_of: Callable[[Row], int] | None) -> list[str]:
    """One note a reason for values and limits that are missing, with the sizes or names that it is said of."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        if row.value is None:
            grouped.setdefault(f"not measured ({row.value_reason})", []).append(row)
        elif row.limit is None and row.limit_source.startswith("no limit: "):
            grouped.setdefault(row.limit_source.partition(" (")[0], []).append(row)
    return [f"{_whose(those, size_of)}: {reason}." for reason, those in grouped.items()]


def _whose(rows: list[Row], size_of: Callable[[Row], int] | None) -> str:
    if size_of is None:
        return ", ".join(dict.fromkeys(row.variant for row in rows))
    sizes = sorted({size_of(row) for row in rows})
    return byte_size(sizes[0]) if len(sizes) == 1 else f"{byte_size(sizes[0])} to {byte_size(sizes[-1])}"
