"""Figures of the baseline chapter: a training step taken apart, and what a larger batch buys and costs."""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.transforms import Bbox

from hyperion.book.formats import items, number, percent
from hyperion.book.material import Material, measured, select
from hyperion.book.style import COLOURS, INK, add_notes, errors_of, log_ticks, look, new_figure
from hyperion.results import Row

PHASES = ("forward", "backward", "optimizer")
_COLOURS = dict(zip(PHASES, (COLOURS[0], COLOURS[1], COLOURS[2]), strict=True))
_BAR = 0.36


def model_steps(material: Material) -> Figure | None:
    """Each model's step by dtype: the measured phases stacked, and beside them what their work needs at the limits."""
    rows = measured(material.of("model_steps"))
    models = list(dict.fromkeys(row.variant for row in rows if row.metric == "step_time_s"))
    if not models:
        return None
    figure, panels = new_figure(
        "A training step in its phases", material.machine("model_steps"), len(models), width=10.4, height=4.0
    )
    for axes, model in zip(panels, models, strict=True):
        _draw_steps(axes, [row for row in rows if row.variant == model])
    panels[0].set_ylabel("ms of one step, median")
    marks = [Patch(color=colour, label=name) for name, colour in _COLOURS.items()]
    if any(row.limit is not None for row in _phases(rows)):
        marks.append(Patch(facecolor="white", edgecolor=INK, hatch="////", linewidth=0.8, label="least time at the limits"))
    figure.legend(handles=marks, ncols=4, loc="outside upper right")
    add_notes(figure, _notes(rows))
    return figure


def _draw_steps(axes: Axes, rows: list[Row]) -> None:
    dtypes = list(dict.fromkeys(row.dtype for row in rows if row.metric == "step_time_s"))
    for x, dtype in enumerate(dtypes):
        phases = _phases(row for row in rows if row.dtype == dtype)
        limited = any(row.limit is not None for row in phases)
        place = x - _BAR / 2 if limited else x
        _stack(axes, place, [(row.metric, row.value) for row in phases], floor=False)
        if limited:
            _stack(axes, x + _BAR / 2, [(row.metric, row.limit or 0) for row in phases], floor=True)
        step = select(rows, dtype=dtype, metric="step_time_s")[0]
        share = "" if step.fraction_of_limit is None else f"\n{percent(step.fraction_of_limit)} % of limit"
        top = 1e3 * sum(row.value for row in phases)
        axes.annotate(
            f"{number(step.value * 1e3, 3)} ms{share}", (place, top), xytext=(0, 4), textcoords="offset points",
            ha="center", va="bottom", fontsize=8.5,
        )  # fmt: skip
    axes.set_xticks(range(len(dtypes)), dtypes)
    room = 0.6 if len(dtypes) > 1 else 0.9
    axes.set(title=rows[0].variant, xlim=(-room, len(dtypes) - 1 + room))
    axes.set_ylim(0, axes.get_ylim()[1] * 1.2)
    axes.grid(axis="x", visible=False)


def _phases(rows: Iterable[Row]) -> list[Row]:
    """The rows of phases, in the order of the step."""
    rows = list(rows)
    return [row for name in PHASES for row in select(rows, metric=f"{name}_time_s")]


def _stack(axes: Axes, x: float, parts: list[tuple[str, float]], floor: bool) -> None:
    bottom = 0.0
    for metric, seconds in (part for part in parts if part[1]):
        colour = _COLOURS[metric.removesuffix("_time_s")]
        style = {"facecolor": "white", "edgecolor": colour, "hatch": "////", "linewidth": 0.8} if floor else {"color": colour}
        axes.bar([x], [seconds * 1e3], _BAR, bottom=bottom, **style)
        bottom += seconds * 1e3


def _notes(rows: list[Row]) -> list[str]:
    phases = _phases(rows)
    said = f"Batch {', '.join(sorted({str(row.params['batch']) for row in phases}))}."
    if any(row.limit is not None for row in phases):
        said += " Hatched: model FLOPs at the limit rate of the format, optimizer traffic at the memory's."
    without = {row.limit_source.removeprefix("no limit: ") for row in phases if row.limit is None}
    return [said] + [f"No least time: {reason}." for reason in sorted(without)]


def batch_scaling(material: Material) -> Figure | None:
    """Samples per second by batch, and the memory it takes, with the line that foretells where it ends and the proof."""
    rows = material.of("batch_scaling")
    rates = measured(select(rows, metric="samples_per_s"))
    if not rates:
        return None
    figure, (left, right) = new_figure("Batch by batch", material.machine("batch_scaling"), 2)
    for position, model in enumerate(dict.fromkeys(row.variant for row in rates)):
        mine = [row for row in rows if row.variant == model]
        _draw_rates(left, select(measured(mine), metric="samples_per_s"), look(model, position))
        _draw_memory(right, mine, look(model, position))
    left.set(xscale="log", yscale="log", xlabel="batch", title="Throughput, dotted: predicted")
    left.set_ylabel("samples/s, median with 95 % interval")
    right.set(xscale="log", xlabel="batch", title="Peak memory; ×: out of memory")
    right.set_ylabel("GiB of device memory" if _on_device(rows) else "GiB resident in the process")
    right.set_ylim(0, right.get_ylim()[1] * 1.15)
    spread_above(right)
    log_ticks(left.yaxis)
    for axes in (left, right):
        axes.xaxis.set_major_formatter(lambda value, _: items(value))
        axes.xaxis.minorticks_off()
    left.legend(loc="best")
    add_notes(figure, _memory_notes(rows))
    return figure


def _draw_rates(axes: Axes, rows: list[Row], style: dict) -> None:
    rows = sorted(rows, key=_batch)
    axes.errorbar([_batch(r) for r in rows], [r.value for r in rows], errors_of(rows), label=rows[0].variant, **style)
    foretold = [row for row in rows if row.predicted is not None]
    axes.plot([_batch(row) for row in foretold], [row.predicted for row in foretold], ":", color=style["color"], alpha=0.7)


def _draw_memory(axes: Axes, rows: list[Row], style: dict) -> None:
    """Measured peaks, the line through them, and the probes: filled where it fitted, a cross where not."""
    peaks = [row for row in rows if row.metric in ("peak_memory_gib", "peak_rss_gib")]
    steady = sorted((row for row in measured(peaks) if row.params["step"] != "probe"), key=_batch)
    axes.plot([_batch(row) for row in steady], [row.value for row in steady], linestyle="none", **style)
    slopes = measured(select(rows, metric="sample_memory_mib"))
    if not slopes or not steady:
        return
    last, slope = steady[-1], slopes[0].value / 1024

    def line(batch):
        return last.value + slope * (batch - _batch(last))

    probes = [row for row in peaks if row.params["step"] == "probe"]
    reach = np.geomspace(_batch(steady[0]), max([_batch(row) for row in probes], default=_batch(last)), 200)
    axes.plot(reach, line(reach), color=style["color"], linewidth=1)
    for row in measured(select(rows, metric="count")):
        axes.plot([row.value / 1.5, row.value * 1.5], [line(row.value)] * 2, "--", color=style["color"], linewidth=1.2)
    for row in probes:
        if row.value is not None:
            axes.plot([_batch(row)], [row.value], linestyle="none", **style)
            continue
        cross = _batch(row), line(_batch(row))
        axes.plot(*[[at] for at in cross], "x", color=style["color"], markersize=9, markeredgewidth=2.2)
        axes.annotate(
            f"{_batch(row):,}", cross, xytext=(0, 7), textcoords="offset points", ha="center", va="bottom", fontsize=8,
            color=style["color"],
        )  # fmt: skip


def spread_above(axes: Axes) -> None:
    """Move the panel's texts upwards, from the left, until none stands on another."""
    axes.figure.draw_without_rendering()
    placed: list[Bbox] = []
    for text in sorted(axes.texts, key=lambda text: text.xy):
        while any(text.get_window_extent().padded(2).overlaps(other) for other in placed):
            x, y = text.xyann
            text.xyann = (x, y + text.get_fontsize())
        placed.append(text.get_window_extent())


def _memory_notes(rows: list[Row]) -> list[str]:
    notes = ["Lines: through the largest batch of the sweep and one half way to the cap, which the dashes mark. Crosses: "
             "batches that were to be too large, and that the allocator refused; drawn where they would have been."]  # fmt: skip
    missing = [row for row in rows if row.metric == "count" and row.value is None]
    return notes + [f"{row.variant}: no largest batch: {row.value_reason}." for row in missing]


def _batch(row: Row) -> int:
    return row.params["batch"]


def _on_device(rows: list[Row]) -> bool:
    return any(row.metric == "peak_memory_gib" for row in rows)
