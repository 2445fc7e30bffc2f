"""Figures for the chapter on frameworks: unfairness, differences from the plain loop, Trainer defaults, speed, parts of steps."""

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from hyperion.errors import not_none
from hyperion.figures.material import Material, Plot, items, measured, number
from hyperion.figures.style import COLOURS, GRID, INK, MUTED, add_notes, errors_of, new_figure
from hyperion.results import Row

TITLES = {
    "planted_unfairness": "Unequal work, planted on purpose",
    "framework_parity": "Frameworks on equal work",
    "trainer_defaults": "What a Trainer's defaults change",
    "framework_speed": "Speed of frameworks on equal work",
}
# A difference of zero is drawn at this share of the smallest difference above zero, with the label 0.
_ZERO_SHARE = 0.3


def planted_unfairness(material: Material) -> Figure | None:
    """Draw how far each planted unfairness changes the losses."""
    rows = [row for row in measured(material.of("planted_unfairness")) if row.metric == "unequal_loss_difference"]
    if not rows:
        return None
    figure, (axes,) = new_figure(TITLES["planted_unfairness"], material.machine("planted_unfairness"), 1, height=5.6)
    rows.sort(key=lambda row: not_none(row.value))
    _draw_differences(axes, rows, "largest difference of a loss from the clean run (nats)")
    named = [row for row in material.of("planted_unfairness") if row.params.get("expected")]
    right = f"The judge named {sum(row.value is not None for row in named)} of {len(named)} unfairnesses correctly"
    add_notes(
        figure, [f"{right}. A difference of 0 does not show in the losses. The clean twin has no unfairness."] if named else []
    )
    return figure


def framework_parity(material: Material) -> Figure | None:
    """Draw the loss difference of each framework and each twin from the plain loop, and the bound computed from the twins."""
    rows = [row for row in material.of("framework_parity") if row.metric == "loss_difference"]
    known = measured(rows)
    if not known:
        return None
    figure, (axes,) = new_figure(TITLES["framework_parity"], material.machine("framework_parity"), 1, height=4.8)
    known.sort(key=lambda row: ("twin" in row.params, row.variant))
    bound = next((row.check_tolerance for row in known if "twin" not in row.params), None)
    _draw_differences(axes, known, "largest difference of a loss from the plain loop (nats)", bound)
    add_notes(figure, ["Grey: twins of the plain loop, which differ only in rounding.", *_reasons(rows)])
    return figure


def trainer_defaults(material: Material) -> Figure | None:
    """Draw how far each default of the Trainer changes the losses."""
    rows = [row for row in measured(material.of("trainer_defaults")) if row.metric == "unequal_loss_difference"]
    if not rows:
        return None
    figure, (axes,) = new_figure(TITLES["trainer_defaults"], material.machine("trainer_defaults"), 1, height=3.4)
    _draw_differences(axes, rows, "largest difference of a loss from the plain loop (nats)")
    return figure


def framework_speed(material: Material) -> Figure | None:
    """Draw the throughput and the peak memory of each framework, fastest first."""
    every = material.of("framework_speed")
    rates = sorted((row for row in measured(every) if row.metric == "tokens_per_s"), key=lambda row: -not_none(row.value))
    if not rates:
        return None
    figure, panels = new_figure(TITLES["framework_speed"], material.machine("framework_speed"), 2, height=3.8)
    memory = {row.variant: row for row in measured(every) if row.metric in ("peak_rss_gib", "peak_memory_gib")}
    for axes, rows, label in (
        (panels[0], rates, "tokens/s"),
        (panels[1], [memory[row.variant] for row in rates], "peak memory of a rank (GiB)"),
    ):
        places = range(len(rows))
        axes.errorbar([not_none(row.value) for row in rows], places, xerr=errors_of(rows), fmt="o", color=COLOURS[0])
        names = [f"{row.variant} ({row.params['ranks']} ranks)" if row.params["ranks"] > 1 else row.variant for row in rows]
        axes.set_yticks(places, names if axes is panels[0] else [""] * len(names))
        axes.invert_yaxis()
        highest = max(row.ci_high if row.ci_high is not None else not_none(row.value) for row in rows)
        axes.set(xlabel=label, xlim=(0, 1.08 * highest))
    panels[0].xaxis.set_major_formatter(lambda value, _: items(value))
    tied = {row.variant: row.params["ties"] for row in every if row.metric == "count" and row.value == 0}
    first = f"Tied for the first place: {', '.join(tied)}." if len(tied) > 1 else f"Fastest beyond doubt: {', '.join(tied)}."
    add_notes(figure, ["Bars: 95 % intervals over launches.", first if tied else "", *_reasons(every)])
    return figure


def framework_parts(material: Material) -> Figure | None:
    """Draw the parts of a traced step of each framework as one bar, with a mark at its timed step, the shortest one first."""
    measurements = measured(material.of("framework_speed"))
    rows = [row for row in measurements if row.metric == "part_time_s"]
    if not rows:
        return None
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        times.setdefault(row.variant, {})[row.params["part"]] = 1e3 * not_none(row.value)
    timed = {row.variant: 1e3 * not_none(row.value) for row in measurements if row.metric == "step_time_s"}
    names = sorted(times, key=lambda name: timed.get(name, sum(times[name].values())))
    parts = [part for part in dict.fromkeys(row.params["part"] for row in rows) if any(times[name].get(part) for name in names)]
    machine = material.machine("framework_speed")
    figure, (axes,) = new_figure("Parts of a traced step", machine, 1, height=2.6 + 0.42 * len(names))
    left = [0.0] * len(names)
    for part, colour in zip(parts, _part_colours(parts), strict=True):
        widths = [times[name].get(part, 0.0) for name in names]
        axes.barh(range(len(names)), widths, left=left, height=0.7, color=colour, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    places = [place for place, name in enumerate(names) if name in timed]
    axes.plot([timed[names[place]] for place in places], places, "k|", markersize=24, markeredgewidth=2)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("time of a step under the profiler (ms)")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8, frameon=False)
    slow = [row for row in measurements if row.metric == "tracing_slowdown"]
    cost = ", ".join(f"{row.variant} {number(row.value, 3)}" for row in slow)
    mark = "Black: time of a step without the profiler." if places else ""
    add_notes(figure, [mark, f"Traced step time over timed step time: {cost}." if cost else "", *_untraced(material)])
    return figure


def _part_colours(parts: Sequence[str]) -> list[str]:
    """Return a colour for each part. Idle time and other work are grey."""
    grey = {"idle": GRID, "other": MUTED}
    colours = iter(COLOURS)
    return [grey.get(part) or next(colours) for part in parts]


def _untraced(material: Material) -> list[str]:
    rows = [row for row in material.of("framework_speed") if row.metric == "traced_step_time_s" and row.value is None]
    return [f"{row.variant}: {row.value_reason[:160]}." for row in rows]


def flat_tables(runs: Sequence[Sequence[Row]]) -> dict[str, pd.DataFrame]:
    """Return a dict that maps the path of the flat table to the table: the kernels of a traced step that take the most time."""
    rows = [row for own in runs for row in own if row.metric == "kernel_time_s" and row.value is not None]
    lines = [
        {
            "framework": row.variant,
            "kernel": row.params["kernel"],
            "operator": row.params["operator"],
            "part": row.params["part"],
            "calls_per_step": row.params["calls"],
            "time_per_step_s": row.value,
        }
        for row in rows
    ]
    return {"frameworks/kernels.csv": pd.DataFrame(lines)}


def _draw_differences(axes: Axes, rows: Sequence[Row], label: str, bound: float | None = None) -> None:
    """Draw one mark for each row on a logarithmic axis, and the bound. A difference of zero is a hollow mark at the left end."""
    values = [not_none(row.value) for row in rows]
    least = min((value for value in values if value > 0), default=1e-7)
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        colour = MUTED if "twin" in row.params else COLOURS[0]
        fill = "full" if value else "none"
        axes.plot([value or _ZERO_SHARE * least], [place], linestyle="none", color=colour, marker="o", fillstyle=fill)
        if not value:
            axes.annotate("0", (_ZERO_SHARE * least, place), xytext=(7, -3), textcoords="offset points", fontsize=8, color=MUTED)
    if bound is not None:
        axes.axvline(bound, color=INK, linestyle=(0, (5, 3)), linewidth=1.2, label=f"bound: {number(bound, 2)}")
        axes.legend(loc="lower right", frameon=True, framealpha=1.0)  # in front of the bound's line
    axes.set_xscale("log")
    # Extend the axis to whole decades, because labels within a decade would overlap.
    low, high = axes.get_xlim()
    axes.set_xlim(10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(rows)), [row.variant for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(label)


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Return a note for each framework without a value, with the first part of the reason."""
    absent = [row for row in rows if row.value is None and row.metric in ("loss_difference", "step_time_s")]
    return [f"{row.variant}: {row.value_reason.partition('; next step')[0][:160]}." for row in absent]


PLOTS = (
    Plot("planted_unfairness", "planted_unfairness", "Change of the losses by planted unfairness.", planted_unfairness),
    Plot("framework_parity", "framework_parity", "Differences of frameworks from the plain loop.", framework_parity),
    Plot("trainer_defaults", "trainer_defaults", "Change of the losses by defaults of a Trainer.", trainer_defaults),
    Plot("framework_speed", "framework_speed", "Throughput and memory of frameworks on equal work.", framework_speed),
    Plot("framework_parts", "framework_speed", "Parts of a traced step of each framework.", framework_parts),
)
