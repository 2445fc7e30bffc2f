"""Figures and the table of the precision experiments: comparison of number formats, and the training ladder."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.errors import not_none
from hyperion.figures.material import (
    Material,
    Plot,
    Quote,
    best_rows,
    measured,
    memory_unit,
    number,
    percent,
    select,
    signed_number,
)
from hyperion.figures.style import (
    COLOURS,
    GRID,
    INK,
    MUTED,
    add_notes,
    errors_of,
    look,
    name_bars,
    new_figure,
    spread_labels,
    whole_numbers,
    write_at,
)
from hyperion.results import BUSY_GPU, Row

_VARIANTS, _LADDER, _REFERENCE = "precision_variants", "training_ladder", "fp32"
_GRAPH = {"mode": "graph"}  # params of the rows of steps that are replayed as graphs
_SMALLEST = 1e-7  # smaller relative differences are drawn at this value, about the rounding error of float32
_LESS, _MORE = COLOURS[2], COLOURS[1]


def precision(material: Material) -> Figure | None:
    """Draw the step time and the memory of each model in each number format.

    There are two panels for each model. The first panel shows the step time with the speed-up over fp32. The second panel shows
    the measured memory with its prediction.
    """
    models = _models(material)
    if not models:
        return None
    figure, panels = new_figure(
        "A training step by number format", material.machine(_VARIANTS), 2, lines=len(models), height=1.2 + 1.9 * len(models)
    )
    for place, (title, rows) in enumerate(models.items()):
        _draw_times(panels[2 * place], title, rows)
        _draw_memory(panels[2 * place + 1], rows)
    replayed = any(_of(rows, "step_time_s", **_GRAPH) for rows in models.values())
    graphs = "The hollow marks are the same steps, replayed as graphs. " if replayed else ""
    notes = [
        "Time: the steps of all formats were timed alternately in one process. The bars are medians of eager steps with 95 % "
        f"intervals. {graphs}Memory: "
        "each format ran in its own process. Bars are the bytes of tensors. The hollow marks are predictions from shapes."
    ]
    if any(_of(rows, "peak_memory_gib") for rows in models.values()):
        notes[0] += " The vertical lines are the peaks of the accelerator's allocator."
    if any("tf32" in _of(rows, "step_time_s") for rows in models.values()):
        notes.append("fp32 is IEEE fp32, with TF32 off.")
    add_notes(figure, notes + _absences(models))
    return figure


def precision_loss(material: Material) -> Figure | None:
    """Plot the relative difference of each format's losses from those of fp32, for the same batches and initial weights."""
    models = _models(material)
    samples = material.samples(_VARIANTS)
    if not models or "loss" not in samples:
        return None
    samples = samples.query("kind == 'step'")
    figure, panels = new_figure("Loss compared with fp32", material.machine(_VARIANTS), len(models), height=3.6)
    for axes, (title, rows) in zip(panels, models.items(), strict=True):
        _draw_differences(axes, samples.query("variant == @rows[0].variant"), rows)
        axes.set(title=title, xlabel="step")
    panels[0].set_ylabel("relative difference of the loss")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    notes = ["Dashed: tolerance for the mean loss of the marked steps. Differences below 1e-7 are drawn at the lower edge."]
    for rows in models.values():
        notes += [
            f"{row.variant} in fp16: {number(row.value)} of {row.params['steps']} steps skipped, because a gradient overflowed."
            for row in rows
            if row.metric == "count" and row.value
        ]
    add_notes(figure, notes)
    return figure


def _models(material: Material) -> dict[str, list[Row]]:
    models: dict[str, list[Row]] = {}
    for row in material.of(_VARIANTS):
        models.setdefault(f"{row.variant}, {_batch(row)}", []).append(row)
    return models


def _batch(row: Row) -> str:
    return f"batch of {row.params['batch']:,} {'images' if row.variant.startswith('resnet') else 'tokens'}"


def _of(rows: list[Row], metric: str, **params) -> dict[str, Row]:
    """Return a dict that maps each dtype to its row with the given metric and params. Rows without a value are omitted."""
    return {row.dtype: row for row in measured(rows) if row.metric == metric and params.items() <= row.params.items()}


def _draw_times(axes: Axes, title: str, rows: list[Row]) -> None:
    eager = [row for row in rows if "mode" not in row.params]
    times, speedups, graphs = _of(eager, "step_time_s"), _of(eager, "speedup"), _of(rows, "step_time_s", **_GRAPH)
    for place, (dtype, row) in enumerate(times.items()):
        time_ms, errors = 1e3 * not_none(row.value), [[1e3 * side[0]] for side in not_none(errors_of([row]))]
        axes.barh(place, time_ms, xerr=errors, height=0.62, color=look(dtype)["color"], ecolor=INK, capsize=2.5)
        if dtype in graphs:
            axes.plot(1e3 * not_none(graphs[dtype].value), place, "D", color=INK, markerfacecolor="none", markersize=6)
        speedup = f"  ({number(not_none(speedups[dtype].value), 3)} × {_REFERENCE})" if dtype in speedups else ""
        _label_bar(axes, place, 1e3 * not_none(row.ci_high), f"{number(time_ms, 3)} ms{speedup}")
    name_bars(axes, list(times), "ms per step")
    axes.set_title(title)


def _draw_memory(axes: Axes, rows: list[Row]) -> None:
    tensors, peaks = _of(rows, "tensor_memory_gib", phase="whole step"), _of(rows, "peak_memory_gib")
    per_gib, unit = memory_unit([not_none(row.value) for row in tensors.values()])
    for place, (dtype, row) in enumerate(tensors.items()):
        held_gib = furthest = not_none(row.value)
        axes.barh(place, per_gib * held_gib, height=0.62, color=look(dtype)["color"])
        if row.predicted is not None:
            axes.plot(per_gib * row.predicted, place, "D", color=INK, markerfacecolor="none", markersize=6)
            furthest = max(furthest, row.predicted)
        if dtype in peaks:
            peak_gib = not_none(peaks[dtype].value)
            axes.plot([per_gib * peak_gib] * 2, [place - 0.31, place + 0.31], color=INK, linewidth=1.6)
            furthest = max(furthest, peak_gib)
        _label_bar(axes, place, per_gib * furthest, f"{number(per_gib * held_gib, 3)} {unit}")
    name_bars(axes, list(tensors), f"{unit} of tensors at the peak of a step")


def _label_bar(axes: Axes, y: float, x: float, label: str) -> None:
    write_at(axes, label, (x, y), (6, 0), va="center", fontsize=8.5)


def _draw_differences(axes: Axes, samples: pd.DataFrame, rows: list[Row]) -> None:
    by_dtype = {dtype: part.sort_values("step")["loss"].to_numpy() for dtype, part in samples.groupby("dtype", sort=False)}
    reference = by_dtype.pop(_REFERENCE)
    for dtype, losses in by_dtype.items():
        differences = np.maximum(np.abs(losses / reference - 1), _SMALLEST)
        axes.plot(range(1, len(losses) + 1), differences, label=str(dtype), **look(str(dtype)))
    steps = len(reference)
    # The losses of early and of late steps have different tolerances. Rows of older runs do not distinguish early and late steps.
    allowed: dict[tuple[float, int, int], list[str]] = {}
    for row in measured(rows):
        if row.metric == "relative_difference":
            key = (not_none(row.check_tolerance), row.params.get("first", 1), row.params.get("last", steps))
            allowed.setdefault(key, []).append(row.dtype)
    labels = {}  # one label for each format: that of the latest steps, whose line ends at the labels
    for (tolerance, first, last), dtypes in sorted(allowed.items(), key=lambda item: item[0][1]):
        colour = look(dtypes[0])["color"]
        axes.plot([first, last], [tolerance] * 2, color=colour, linestyle=(0, (5, 3)), linewidth=1.2)
        if last == steps:
            names = ", ".join(dtypes)
            labels[names] = (tolerance, f"{names}: {number(100 * tolerance, 2)} %", colour)
    whole_numbers(axes.xaxis)
    axes.set(yscale="log", ylim=(_SMALLEST / 2, 3 * max([*(tolerance for tolerance, _, _ in allowed), 0.01])))
    spread_labels(axes, labels.values())


def _absences(models: dict[str, list[Row]]) -> list[str]:
    """Return a sentence for each reason why steps were not timed. The sentence lists the number formats that were not timed."""
    reasons: dict[str, dict[str, None]] = {}
    for rows in models.values():
        for row in rows:
            if row.metric == "step_time_s" and row.value is None:
                reasons.setdefault(row.value_reason, {})[row.dtype] = None
    return [f"{', '.join(dtypes)}: {reason}." for reason, dtypes in reasons.items()]


@dataclass(frozen=True)
class RungRows:
    """Rows with the measurements of one rung of the training ladder.

    The training ladder is a list of versions of the training step, called rungs. Each rung adds one optimization to the previous
    rung.

    Attributes:
        name: name of the rung.
        time: row of the step time.
        memory: row of the allocator's peak memory. If it was not measured, row of the peak tensor bytes. None if neither was
            measured.
        speedup: row of the speed-up over the previous rung. None for the first rung.
        early: row of the difference between this rung's losses and the first rung's losses, in the first steps of training. None
            for the first rung, and for old runs that compared only the last steps.
        late: row of the same difference, in the last steps of training. None for the first rung.
        busy: row of the share of the step in which the GPU is busy. None on a CPU, and for old runs.
    """

    name: str
    time: Row
    memory: Row | None
    speedup: Row | None
    early: Row | None
    late: Row | None
    busy: Row | None

    @property
    def busy_ms(self) -> float | None:
        """Time of the step in which the GPU is busy, in milliseconds."""
        return self.busy and 1e3 * not_none(self.time.value) * not_none(self.busy.value)


def ladders(rows: Iterable[Row]) -> dict[str, list[RungRows]]:
    """Return the timed rungs of each model's training ladder, from the first rung to the last."""
    by_model: dict[str, list[RungRows]] = {}
    rows = measured(rows)
    for time in (row for row in rows if row.metric == "step_time_s"):
        steps = by_model.setdefault(time.variant, [])
        own = [row for row in rows if (row.variant, row.params.get("rung")) == (time.variant, time.params["rung"])]
        memory = _first(own, "peak_memory_gib") or _first(own, "tensor_memory_gib")
        speedup = _first(own, "speedup", over=steps[-1].name) if steps else None
        early = _first(own, "relative_difference", window="early")
        late = _first(own, "relative_difference", window="late") or _first(own, "relative_difference")
        steps.append(RungRows(time.params["rung"], time, memory, speedup, early, late, _first(own, "share", **BUSY_GPU)))
    return by_model


def ladder_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Return a table with the time, memory and loss difference of each rung (version of the training step) of each model.

    The table contains 95 % confidence intervals. The time and memory of a rung are compared with those of the previous rung. Its
    losses are compared with those of the first rung. On a GPU, a column gives the share of the step in which the GPU is busy.
    """
    models = ladders(rows)
    watched = any(step.busy for steps in models.values() for step in steps)
    return pd.DataFrame(
        [
            {
                "model": model,
                "rung": step.name,
                "format": step.time.dtype,
                "ms a step": number(1e3 * not_none(step.time.value), 3),
                "Δ time [95 %, one launch]": _change_of_time(step.speedup),
                **({"GPU busy": f"{percent(not_none(step.busy.value))} %" if step.busy else ""} if watched else {}),
                "GiB": number(not_none(step.memory.value), 3) if step.memory else "not counted",
                "Δ memory": _change_of_memory(before, step),
                "Δ loss early": _change_of_loss(step.early),
                "Δ loss late": _change_of_loss(step.late),
            }
            for model, steps in models.items()
            for before, step in zip([None, *steps], steps, strict=False)
        ]
    )


def _first(rows: list[Row], metric: str, **params) -> Row | None:
    return next((row for row in rows if row.metric == metric and params.items() <= row.params.items()), None)


def _change_of_time(speedup: Row | None) -> str:
    if speedup is None:
        return ""
    # Time is the inverse of speed, so the lower end of one interval gives the upper end of the other.
    value, low, high = (100 * (1 / not_none(ratio) - 1) for ratio in (speedup.value, speedup.ci_high, speedup.ci_low))
    return f"{signed_number(value, 1)} % [{signed_number(low, 1)}, {signed_number(high, 1)}]"


def _change_of_memory(before: RungRows | None, step: RungRows) -> str:
    if before is None or before.memory is None or step.memory is None or before.memory.metric != step.memory.metric:
        return ""
    return f"{percent(not_none(step.memory.value) / not_none(before.memory.value) - 1, signed=True)} %"


def _change_of_loss(row: Row | None) -> str:
    if row is None:
        return ""
    value, allowed = (number(100 * not_none(share), 2) for share in (row.value, row.check_tolerance))
    return f"{value} % (allowed {allowed} %)"


def training_ladder(material: Material) -> Figure | None:
    """Draw three panels for each model: step time, memory, and the difference between a rung's and the first rung's losses."""
    models = ladders(material.of(_LADDER))
    if not models:
        return None
    rungs = max(map(len, models.values()))
    figure, panels = new_figure(
        "Time, memory and loss of a training step on each rung",
        material.machine(_LADDER),
        3,
        lines=len(models),
        width=11.4,
        height=1.2 + len(models) * (0.9 + 0.24 * rungs),
    )
    for place, (model, steps) in enumerate(models.items()):
        time, memory, loss = panels[3 * place : 3 * place + 3]
        _draw_steps(time, steps, [1e3 * not_none(step.time.value) for step in steps], "ms per step")
        peaks_gib = [step.memory and step.memory.value for step in steps]
        per_gib, unit = memory_unit([peak for peak in peaks_gib if peak is not None])
        for place_of_rung, step in enumerate(steps):
            if step.busy_ms is not None:
                time.plot(step.busy_ms, place_of_rung, "D", color=INK, markerfacecolor="white", markersize=4.5)
        _draw_steps(memory, steps, [peak and per_gib * peak for peak in peaks_gib], f"{unit} at the peak")
        _draw_losses(loss, steps)
        time.set_yticks(range(len(steps)), [step.name for step in steps])
        time.set_title(model)
    absent = material.of(_LADDER, metric="step_time_s", value=None)
    notes = [
        "Each rung makes one change to the rung above it. Its bar reaches from the value of the rung above to its own value."
    ]
    rungs_of_all = [step for steps in models.values() for step in steps]
    marks = (
        ("Circles: early steps. ", any(step.early for step in rungs_of_all)),
        ("Squares: late steps. ", any(step.late for step in rungs_of_all)),
    )
    if any(step.busy for step in rungs_of_all):
        notes.append("Diamonds: time in which the GPU is busy. In the rest of the step, it waits for the host.")
    shown = "".join(text for text, is_drawn in marks if is_drawn)
    notes.append(f"Losses are compared with those of the first rung. {shown}Bars: tolerance.")
    notes += [f"{name}: {reason}." for name, reason in {row.params["rung"]: row.value_reason for row in absent}.items()]
    add_notes(figure, notes)
    return figure


def _draw_steps(axes: Axes, steps: list[RungRows], values: list[float | None], label: str) -> None:
    before: float | None = None
    for place, value in enumerate(values):
        if value is None:
            axes.annotate("not counted", (0, place), va="center", fontsize=8, color=MUTED)
            continue
        start = 0.0 if before is None else before
        colour = GRID if before is None else _LESS if value <= start else _MORE
        axes.barh(place, value - start, left=start, height=0.62, color=colour)
        axes.plot([value, value], [place - 0.31, place + 0.31], color=INK, linewidth=1.6)
        percents = 0 if before is None else round(100 * (value / before - 1))
        change = "" if before is None else f"  {percents:+d} %" if percents else "  0 %"
        write_at(axes, f"{number(value, 3)}{change}", (max(value, start), place), (5, 0), va="center", fontsize=8)
        before = value
    _finish_steps(axes, steps, label)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.45)


def _draw_losses(axes: Axes, steps: list[RungRows]) -> None:
    for place, step in enumerate(steps):
        for row, marker, height in ((step.early, "o", -0.14), (step.late, "s", 0.14)):
            if row is None:
                continue
            axes.plot(100 * not_none(row.value), place + height, marker, color=INK, markersize=4.5)
            tolerance = 100 * not_none(row.check_tolerance)
            axes.plot(tolerance, place + height, "|", color=_MORE, markersize=9, markeredgewidth=2)
    axes.set_xscale("symlog", linthresh=1e-4)
    _finish_steps(axes, steps, "difference of losses in %; bars: tolerance")
    axes.set_xlim(left=0)


def _finish_steps(axes: Axes, steps: list[RungRows], label: str) -> None:
    axes.set_yticks(range(len(steps)), [""] * len(steps))
    axes.set_ylim(len(steps) - 0.45, -0.55)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(label)


def headlines(rows: list[Row], is_steady: Callable[[Row], bool]) -> Iterator[Quote]:
    """Yield two speed-ups of the fastest number format for each model: over TF32 and over IEEE fp32.

    The steps are replayed as graphs. Eager steps in 16-bit formats wait for the host, so that the ratio depends on the host.

    PyTorch computes convolutions in TF32 by default. A reader of the speed-up over IEEE fp32 alone could mistake it for the gain
    over this default. A ratio is omitted if the times of one of its two steps were not steady.

    The speed-up over TF32 is the ratio of two speed-ups over IEEE fp32. Its interval combines theirs as if they were independent.
    They share the times in fp32, so the interval is too wide rather than too narrow.
    """
    graphs = [row for row in select(rows, experiment=_VARIANTS, metric="speedup") if _GRAPH.items() <= row.params.items()]
    times = [row for row in select(rows, experiment=_VARIANTS, metric="step_time_s") if _GRAPH.items() <= row.params.items()]
    unsteady = {(row.variant, row.dtype) for row in times if not is_steady(row)}

    def timings(row: Row, over: str) -> list[Row]:
        return [time for time in times if time.variant == row.variant and time.dtype in (row.dtype, over)]

    ratios = [row for row in graphs if not unsteady & {(row.variant, row.dtype), (row.variant, row.params["over"])}]
    for row in best_rows(ratios, lambda row: row.variant):
        tf32 = next((r for r in ratios if r.variant == row.variant and r.dtype == "tf32" and r is not row), None)
        if tf32 is not None:
            over_tf32 = replace(row, **_ratio(row, tf32), params=row.params | {"over": "tf32"})
            label = f"{row.variant}, training step as a graph: {row.dtype} over tf32"
            yield Quote(label, over_tf32, timings=timings(row, "tf32"))
        over = "IEEE fp32, TF32 off" if row.params["over"] == "fp32" else row.params["over"]
        label = f"{row.variant}, training step as a graph: {row.dtype} over {over}"
        yield Quote(label, row, timings=timings(row, row.params["over"]))


def _ratio(upper: Row, lower: Row) -> dict[str, float | None]:
    """Return the value and the interval of the ratio of two values. The interval assumes that they are independent."""
    ratio = not_none(upper.value) / not_none(lower.value)
    if None in (ends := (upper.ci_low, upper.ci_high, lower.ci_low, lower.ci_high)):
        return {"value": ratio, "ci_low": None, "ci_high": None}
    # In logarithms, the ratio is a difference, and the squares of the distances from the values to the ends add up.
    low, high, low_of_lower, high_of_lower = (math.log(not_none(end)) for end in ends)
    centre, centre_of_lower = math.log(not_none(upper.value)), math.log(not_none(lower.value))
    down = math.hypot(centre - low, high_of_lower - centre_of_lower)
    up = math.hypot(high - centre, centre_of_lower - low_of_lower)
    return {"value": ratio, "ci_low": ratio * math.exp(-down), "ci_high": ratio * math.exp(up)}


def explanations(experiment: str, rows: list[Row]) -> list[str]:
    """Return Markdown sentences for the section of an experiment. `rows` are all rows of the run that have a value."""
    return speedups_over_tf32(select(rows, experiment=_VARIANTS)) if experiment == _VARIANTS else []


def speedups_over_tf32(rows: list[Row]) -> list[str]:
    """Return sentences that state the speed-ups of the 16-bit formats over IEEE fp32 together with those over TF32.

    Only steps that are replayed as graphs are compared, because eager steps wait for the host. Without steps in TF32, as on a
    CPU, there are no sentences.
    """
    speedups = select(measured(rows), metric="speedup")
    if not any(row.dtype == "tf32" for row in speedups):
        return []
    graphs = [row for row in speedups if _GRAPH.items() <= row.params.items()]
    sentences = ["The rows for fp32 are IEEE fp32, with TF32 off. By default, PyTorch computes convolutions in TF32."]
    for variant in dict.fromkeys(row.variant for row in graphs):
        own = {row.dtype: not_none(row.value) for row in graphs if row.variant == variant}
        tf32 = own.pop("tf32", None)
        if tf32 and own:
            over_both = [
                f"{dtype} is {number(value, 3)} × as fast as IEEE fp32 and {number(value / tf32, 3)} × as fast as TF32"
                for dtype, value in own.items()
            ]
            sentences.append(f"{variant}, as a graph: {', and '.join(over_both)}.")
    if not graphs:
        eager = (
            "All steps of this run are eager. The ratios of their times also depend on how far the host is ahead of the device"
        )
        sentences.append(f"{eager}, so they do not describe the number formats alone.")
    return sentences


TITLES = {"precision_variants": "Mixed precision", "training_ladder": "The training ladder"}

PLOTS = (
    Plot("precision", "precision_variants", "Time and memory of a training step in fp32, TF32, bf16 and fp16.", precision),
    Plot("training_ladder", "training_ladder", "Time, memory and loss of each rung.", training_ladder),
    Plot(
        "precision_loss",
        "precision_variants",
        "Difference between the losses of each format and of fp32 on the same batches.",
        precision_loss,
    ),
)
