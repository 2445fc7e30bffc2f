"""Figures for the chapter on compilation: time and memory of a call by compiler mode, and the cost of compilation.

The module also exports the rows as a table for spreadsheets, with one line for each model and mode.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.errors import not_none
from hyperion.figures.material import Material, Plot, items, measured, number
from hyperion.figures.style import COLOURS, INK, MUTED, add_notes, errors_of, log_ticks, name_bars, new_figure, write_at
from hyperion.results import Row
from hyperion.units import GIB

EXPERIMENT = "compilation"
_MEMORY = {"peak_memory_gib": "in tensors", "peak_rss_gib": "resident", "reserved_memory_gib": "held by the allocator"}
COLUMNS = (
    "model",
    "variant",
    "time_ms",
    "mem_gb",
    "speedup",
    "speedup_ci_low",
    "speedup_ci_high",
    "dtype",
    "reps",
    "compile_s",
    "graph_breaks",
    "break_even_calls",
    "error_from_eager",
    "error_from_float64",
    "mem_reserved_gb",
    "mem_kind",
    "batch",
    "input",
    "weights",
    "reason",
)
_MEMORY_KINDS = {"peak_memory_gib": "device tensors", "peak_rss_gib": "resident host memory"}
_MODES = ("eager", "default", "max-autotune", "reduce-overhead")


def compilation(material: Material) -> Figure | None:
    """Draw the time and the memory of a call of each model in each compiler mode.

    There are two panels for each model. The first panel shows the time of a call with its speed-up over eager calls. The second
    panel shows the memory.
    """
    subjects = _subjects(material)
    if not subjects:
        return None
    figure, panels = new_figure(
        "Inference, eager and compiled", material.machine(EXPERIMENT), 2, lines=len(subjects), height=0.9 + 2.5 * len(subjects)
    )
    for place, (title, rows) in enumerate(subjects.items()):
        _draw_times(panels[2 * place], title, rows)
        _draw_memory(panels[2 * place + 1], rows)
    clock = next((row.params["clock"] for rows in subjects.values() for row in rows if "clock" in row.params), "")
    notes = [
        f"Time of a call: {clock}, median with 95 % interval. Vertical line and number in brackets: eager calls, alternating "
        "with the compiled ones in the same process, and the speed-up over them."
    ]
    add_notes(figure, notes + _absences(subjects))
    return figure


def break_even(material: Material) -> Figure | None:
    """Draw how many calls it takes until compilation saves time.

    The horizontal axis shows the number of calls N. The vertical axis shows the time of N compiled calls including compilation,
    divided by the time of N eager calls. Compilation saves time where this value is below 1.
    """
    subjects = {title: costs for title, rows in _subjects(material).items() if (costs := _costs(rows))}
    if not subjects:
        return None
    figure, panels = new_figure("When compilation pays", material.machine(EXPERIMENT), len(subjects), height=4.0)
    for axes, (title, costs) in zip(panels, subjects.items(), strict=True):
        _draw_totals(axes, title, costs)
    panels[0].set_ylabel("total time including compilation,\ndivided by eager time")
    note = (
        "Compiled with cold caches. The timed calls of each mode alternated with eager calls. A ring marks the break-even point."
    )
    add_notes(figure, [note])
    return figure


def _absences(subjects: dict[str, list[Row]]) -> list[str]:
    """Return a sentence for each reason why modes were not timed. The sentence lists the modes that were not timed."""
    reasons: dict[str, list[str]] = {}
    for rows in subjects.values():
        for row in _of(rows, "inference_time_s"):
            if row.value is None:
                reasons.setdefault(row.value_reason, []).append(f"{row.params['model']} {row.variant}")
    return [f"{', '.join(names)}: not measured ({reason})." for reason, names in reasons.items()]


def _subjects(material: Material) -> dict[str, list[Row]]:
    """Map the title of each panel to the rows of its model. Models without timings are omitted."""
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
        seconds = not_none(row.value)
        errors = errors_of([row], 1e3)
        axes.barh(place, 1e3 * seconds, xerr=errors, height=0.62, color=_colour(row.variant), ecolor=INK, capsize=2.5)
        speedup = _value(rows, "speedup", row.variant)
        eager = seconds * (speedup or 1)
        if speedup:
            axes.plot([1e3 * eager] * 2, [place - 0.31, place + 0.31], color=INK, linewidth=1.6)
        label = f"{number(1e3 * seconds, 3)} ms" + (f"  ({number(speedup, 3)} ×)" if speedup else "")
        _name_bar(axes, place, 1e3 * max(row.ci_high or seconds, eager), label)
    name_bars(axes, [row.variant for row in times], "ms per call", room=1.6)
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
    name_bars(axes, modes, "peak GiB during calls, one model loaded", room=1.6)
    limit = next((row.limit for kind in kinds for row in _of(rows, kind) if row.limit), None)
    if limit is not None:
        axes.axvline(limit, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2)
        axes.set_title(f"dashed: the weights, {number(limit, 3)} GiB", color=MUTED, fontsize=8.5)


def _name_bar(axes: Axes, y: float, x: float, label: str) -> None:
    write_at(axes, label, (x, y), (5, 0), va="center", fontsize=8.5)


def _colour(mode: str) -> str:
    return COLOURS[6] if mode == "eager" else COLOURS[_MODES.index(mode) - 1]


@dataclass(frozen=True)
class _Cost:
    """Time costs of one compiled mode.

    Attributes:
        compiling: compilation time in seconds.
        call: time of a compiled call in seconds.
        eager: time of an eager call in seconds. Eager and compiled calls were timed alternately.
        break_even: number of calls after which the compiled calls have saved more time than compilation took. None if they never
            do.
    """

    compiling: float
    call: float
    eager: float
    break_even: float | None


def _costs(rows: list[Row]) -> dict[str, _Cost]:
    """Map each compiled mode to its costs. Modes that were not measured are omitted."""
    costs = {}
    for mode in _MODES:
        compiling, call, speedup = (_value(rows, metric, mode) for metric in ("compile_time_s", "inference_time_s", "speedup"))
        if compiling is not None and call is not None and speedup is not None:
            costs[mode] = _Cost(compiling, call, call * speedup, _value(rows, "break_even_calls", mode))
    return costs


def _draw_totals(axes: Axes, title: str, costs: dict[str, _Cost]) -> None:
    paid = [cost.break_even for cost in costs.values() if cost.break_even]
    calls = np.geomspace(1, 10 * max([*paid, *(cost.compiling / cost.call for cost in costs.values())]), 300)
    for mode, cost in costs.items():
        colour, pays = _colour(mode), "not known to pay"
        if cost.break_even:
            pays = f"pays from {items(float(f'{cost.break_even:.2g}'))} calls on"
            axes.plot([cost.break_even], [1], "o", markersize=9, markerfacecolor="none", color=colour)
        axes.plot(calls, (cost.compiling / calls + cost.call) / cost.eager, color=colour, label=f"{mode}: {pays}")
    axes.axhline(1, color=_colour("eager"), linewidth=1.8, zorder=1.5, label="eager")
    axes.set(xscale="log", yscale="log", xlabel="calls")
    axes.set_title(title, fontsize=9.5)
    axes.xaxis.set_major_formatter(lambda value, _: items(value))
    log_ticks(axes.yaxis)
    axes.legend(loc="upper right", fontsize=8.5)


def compilation_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Return a table with the columns COLUMNS and one line per model and mode.

    Times are in milliseconds, and memory is in GB (10^9 bytes). A missing value is None. If there is no time, the column `reason`
    contains the reason.
    """
    lines: dict[tuple, list[Row]] = {}
    for row in rows:
        lines.setdefault((row.params["model"], row.dtype, row.params["batch"], row.variant), []).append(row)
    return pd.DataFrame([_line(group) for group in lines.values()], columns=list(COLUMNS), dtype=object)


def compilation_csv(rows: Iterable[Row]) -> str:
    """Return the table of `compilation_table` as CSV. Reading the CSV gives exactly the same numbers."""
    return compilation_table(rows).to_csv(index=False, lineterminator="\n")


def compilation_json(rows: Iterable[Row]) -> str:
    """Return the table of `compilation_table` as a JSON list of objects."""
    lines = compilation_table(rows).to_dict("records")
    return json.dumps(lines, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _line(rows: list[Row]) -> dict:
    first = rows[0]
    time, speedup = _row(rows, "inference_time_s"), _row(rows, "speedup")
    memory = next((row for metric in _MEMORY_KINDS if (row := _row(rows, metric)) and row.value is not None), None)
    reserved = _value(rows, "reserved_memory_gib", first.variant)
    differences = {row.params["from"]: row.value for row in rows if row.metric == "relative_difference"}
    return {
        "model": first.params["model"],
        "variant": first.variant,
        "time_ms": None if time is None or time.value is None else 1e3 * time.value,
        "mem_gb": None if memory is None or memory.value is None else memory.value * GIB / 1e9,
        "speedup": speedup and speedup.value,
        "speedup_ci_low": speedup and speedup.ci_low,
        "speedup_ci_high": speedup and speedup.ci_high,
        "dtype": first.dtype,
        "reps": time and time.n,
        "compile_s": _value(rows, "compile_time_s", first.variant),
        "graph_breaks": _value(rows, "graph_breaks", first.variant),
        "break_even_calls": _value(rows, "break_even_calls", first.variant),
        "error_from_eager": differences.get("eager"),
        "error_from_float64": differences.get("float64"),
        "mem_reserved_gb": None if reserved is None else reserved * GIB / 1e9,
        "mem_kind": None if memory is None else _MEMORY_KINDS[memory.metric],
        **{name: first.params[name] for name in ("batch", "input", "weights")},
        "reason": (time and time.value_reason) or None,
    }


def _row(rows: list[Row], metric: str) -> Row | None:
    return next((row for row in rows if row.metric == metric), None)


TITLES = {"compilation": "Compilation"}

PLOTS = (
    Plot("compilation", "compilation", "Time of a call and memory by compiler mode, each measured alone.", compilation),
    Plot(
        "compilation_break_even",
        "compilation",
        "Total time by number of calls. Compilation pays where a line is below the line of eager calls.",
        break_even,
    ),
)
