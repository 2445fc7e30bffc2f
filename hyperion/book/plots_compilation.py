"""Figures of compilation: what a call takes in each mode, what memory it takes, and after how many calls compiling pays."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.book.formats import number
from hyperion.book.material import Material, measured
from hyperion.book.style import COLOURS, INK, MUTED, add_notes, errors_of, limit_line, log_ticks, look, new_figure
from hyperion.results import Row

EXPERIMENT = "compilation"
_MEMORY = {"peak_memory_gib": "in tensors", "peak_rss_gib": "resident", "reserved_memory_gib": "held by the allocator"}
_MODES = ("eager", "default", "max-autotune", "reduce-overhead")


def compilation(material: Material) -> Figure | None:
    """A line of panels for each model: milliseconds of a call by mode with the speed-up over eager, and memory by mode."""
    subjects = _subjects(material)
    if not subjects:
        return None
    figure, panels = new_figure(
        "Inference, eager and compiled", material.machine(EXPERIMENT), 2, lines=len(subjects), height=0.9 + 2.5 * len(subjects)
    )
    for place, (title, rows) in enumerate(subjects.items()):
        _draw_times(panels[2 * place], title, rows)
        _draw_memory(panels[2 * place + 1], rows)
    absent = {f"{row.variant}: {row.value_reason}" for rows in subjects.values() for row in rows if row.value is None
              and row.metric == "inference_time_s"}  # fmt: skip
    clock = next((row.params["clock"] for rows in subjects.values() for row in rows if "clock" in row.params), "")
    notes = [f"Time of a call: {clock}, median with 95 % interval. In brackets: speed-up over eager calls made in turn."]
    add_notes(figure, [*notes, *(f"Not measured: {reason}." for reason in sorted(absent))])
    return figure


def break_even(material: Material) -> Figure | None:
    """Seconds spent after so many calls, compilation included: where a mode's line crosses the eager one, it has paid."""
    subjects = {title: rows for title, rows in _subjects(material).items() if len(_costs(rows)) > 1}
    if not subjects:
        return None
    figure, panels = new_figure("When compilation pays", material.machine(EXPERIMENT), len(subjects), height=4.0)
    for axes, (title, rows) in zip(panels, subjects.items(), strict=True):
        _draw_totals(axes, title, rows)
    panels[0].set_ylabel("seconds spent, compilation included")
    add_notes(figure, ["Compiled with cold caches. A ring marks the call after which a mode has cost less than eager."])
    return figure


def _subjects(material: Material) -> dict[str, list[Row]]:
    """Rows by model and input, for those that were timed at all."""
    subjects: dict[str, list[Row]] = {}
    for row in material.of(EXPERIMENT):
        title = f"{row.params['model']}, batch {row.params['batch']}, {row.dtype}"
        subjects.setdefault(title, []).append(row)
    return {title: rows for title, rows in subjects.items() if measured(_of(rows, "inference_time_s"))}


def _of(rows: list[Row], metric: str, mode: str | None = None) -> list[Row]:
    return [row for row in rows if row.metric == metric and mode in (None, row.variant)]


def _value(rows: list[Row], metric: str, mode: str) -> float | None:
    return next((row.value for row in _of(rows, metric, mode)), None)


def _draw_times(axes: Axes, title: str, rows: list[Row]) -> None:
    times = [row for mode in _MODES for row in measured(_of(rows, "inference_time_s", mode))]
    for place, row in enumerate(times):
        errors = None if (found := errors_of([row])) is None else [[1e3 * side[0]] for side in found]
        axes.barh(place, 1e3 * row.value, xerr=errors, height=0.62, color=_colour(row.variant), ecolor=INK, capsize=2.5)
        speedup = _value(rows, "speedup", row.variant)
        label = f"{number(1e3 * row.value, 3)} ms" + (f"  ({number(speedup, 3)} ×)" if speedup else "")
        _name_bar(axes, place, 1e3 * row.value, label)
    _finish(axes, [row.variant for row in times], "ms a call")
    axes.set_title(title)


def _draw_memory(axes: Axes, rows: list[Row]) -> None:
    modes = [mode for mode in _MODES if measured(_of(rows, "inference_time_s", mode))]
    kinds = [kind for kind in _MEMORY if measured(_of(rows, kind))]
    height = 0.62 / max(len(kinds), 1)
    for place, mode in enumerate(modes):
        for step, kind in enumerate(kinds):
            value = _value(rows, kind, mode)
            if value is None:
                continue
            y = place + (step - (len(kinds) - 1) / 2) * height
            axes.barh(y, value, height=height * 0.92, color=_colour(mode), alpha=1 - 0.5 * step)
            _name_bar(axes, y, value, f"{number(value, 3)} {_MEMORY[kind]}")
    _finish(axes, modes, "GiB at most, during calls, one model alive")
    limit = next((row.limit for kind in kinds for row in _of(rows, kind) if row.limit), None)
    if limit is not None:
        axes.axvline(limit, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2)
        axes.set_title(f"dashed: the weights, {number(limit, 3)} GiB", color=MUTED, fontsize=8.5)


def _name_bar(axes: Axes, y: float, x: float, label: str) -> None:
    axes.annotate(label, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5)


def _finish(axes: Axes, names: list[str], label: str) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel=label, xlim=(0, axes.get_xlim()[1] * 1.5))


def _colour(mode: str) -> str:
    return COLOURS[6] if mode == "eager" else COLOURS[_MODES.index(mode) - 1]


def _costs(rows: list[Row]) -> dict[str, tuple[float, float]]:
    """(seconds before the first settled call, seconds of a call) by mode."""
    costs = {}
    for mode in _MODES:
        call, compiling = _value(rows, "inference_time_s", mode), _value(rows, "compile_time_s", mode)
        if call is not None and (mode == "eager" or compiling is not None):
            costs[mode] = compiling or 0.0, call
    return costs


def _draw_totals(axes: Axes, title: str, rows: list[Row]) -> None:
    costs = _costs(rows)
    crossings = {mode: _value(rows, "break_even_calls", mode) for mode in costs}
    slowest = max(compiling / call for compiling, call in costs.values())
    calls = np.geomspace(1, 10 * max([slowest, *filter(None, crossings.values())]), 200)
    for mode, (compiling, call) in costs.items():
        style = look(mode, _MODES.index(mode)) | {"color": _colour(mode), "marker": ""}
        axes.plot(calls, compiling + call * calls, label=mode, **style)
        if crossing := crossings[mode]:
            axes.plot([crossing], [compiling + call * crossing], marker="o", color=_colour(mode), markerfacecolor="none",
                      markersize=9, linestyle="none", label=f"from call {number(crossing, 3)} on")  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="calls")
    axes.set_title(title, fontsize=9.5)
    log_ticks(axes.xaxis)
    log_ticks(axes.yaxis)
    axes.legend(loc="upper left", fontsize=8)
