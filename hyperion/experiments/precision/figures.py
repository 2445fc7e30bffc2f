"""Figures of mixed precision: what a step takes in each number format, and how far its losses stray from those of fp32."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.experiments.precision import figures_ladder
from hyperion.figures.formats import memory_unit, number
from hyperion.figures.material import Material, measured
from hyperion.figures.plot import Plot
from hyperion.figures.style import INK, add_notes, errors_of, look, new_figure, spread_labels, whole_numbers
from hyperion.results import Row

EXPERIMENT, REFERENCE = "precision_variants", "fp32"
_BELOW_DRAWING = 1e-7  # relative: the rounding of float32


def precision(material: Material) -> Figure | None:
    """A line of panels for each model: time of a step with its speed over fp32, and memory with what shapes foretold."""
    models = _models(material)
    if not models:
        return None
    figure, panels = new_figure(
        "A training step by number format", material.machine(EXPERIMENT), 2, lines=len(models), height=1.2 + 1.9 * len(models)
    )
    for place, (title, rows) in enumerate(models.items()):
        _draw_times(panels[2 * place], title, rows)
        _draw_memory(panels[2 * place + 1], rows)
    notes = [
        "Time: steps made in turn in one process, medians with 95 % interval. Memory: each format in a process of its own; bars "
        "are bytes of tensors, hollow marks what shapes foretold, lines what the accelerator's allocator counted."
    ]
    add_notes(figure, notes + _absences(models))
    return figure


def precision_loss(material: Material) -> Figure | None:
    """How far the loss of each step lies from that of fp32, over the same batches from the same weights."""
    models = _models(material)
    samples = material.samples(EXPERIMENT)
    if not models or "loss" not in samples:
        return None
    samples = samples[samples["kind"] == "step"]
    figure, panels = new_figure("Loss beside that of fp32", material.machine(EXPERIMENT), len(models), height=3.6)
    for axes, (title, rows) in zip(panels, models.items(), strict=True):
        _draw_strays(axes, samples[samples["variant"] == rows[0].variant], rows)
        axes.set(title=title, xlabel="step")
    panels[0].set_ylabel("relative difference of the loss")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    notes = ["Dashed: what other rounding explains, for the mean of those steps. Differences below 1e-7 lie on the lower edge."]
    for rows in models.values():
        notes += [
            f"{row.variant} in fp16: {number(row.value)} of {row.params['steps']} steps skipped because a gradient overflowed."
            for row in rows
            if row.metric == "count" and row.value
        ]
    add_notes(figure, notes)
    return figure


def _models(material: Material) -> dict[str, list[Row]]:
    models: dict[str, list[Row]] = {}
    for row in material.of(EXPERIMENT):
        models.setdefault(f"{row.variant}, {_batch(row)}", []).append(row)
    return models


def _batch(row: Row) -> str:
    return f"batch of {row.params['batch']:,} {'images' if row.variant.startswith('resnet') else 'tokens'}"


def _of(rows: list[Row], metric: str, **params) -> dict[str, Row]:
    """Measured rows of a metric by dtype."""
    return {row.dtype: row for row in measured(rows) if row.metric == metric and params.items() <= row.params.items()}


def _draw_times(axes: Axes, title: str, rows: list[Row]) -> None:
    times, speedups = _of(rows, "step_time_s"), _of(rows, "speedup")
    for place, (dtype, row) in enumerate(times.items()):
        errors = [[1e3 * side[0]] for side in errors_of([row])]
        axes.barh(place, 1e3 * row.value, xerr=errors, height=0.62, color=look(dtype)["color"], ecolor=INK, capsize=2.5)
        faster = speedups.get(dtype)
        label = f"{number(1e3 * row.value, 3)} ms" + (f"  ({number(faster.value, 3)} × {REFERENCE})" if faster else "")
        _name_bar(axes, place, 1e3 * row.ci_high, label)
    _finish(axes, list(times), "ms a step")
    axes.set_title(title)


def _draw_memory(axes: Axes, rows: list[Row]) -> None:
    tensors, peaks = _of(rows, "tensor_memory_gib", phase="whole step"), _of(rows, "peak_memory_gib")
    per_gib, unit = memory_unit([row.value for row in tensors.values()])
    for place, (dtype, row) in enumerate(tensors.items()):
        axes.barh(place, per_gib * row.value, height=0.62, color=look(dtype)["color"])
        furthest = row.value
        if row.predicted is not None:
            axes.plot(per_gib * row.predicted, place, "D", color=INK, markerfacecolor="none", markersize=6)
            furthest = max(furthest, row.predicted)
        if dtype in peaks:
            axes.plot([per_gib * peaks[dtype].value] * 2, [place - 0.31, place + 0.31], color=INK, linewidth=1.6)
            furthest = max(furthest, peaks[dtype].value)
        _name_bar(axes, place, per_gib * furthest, f"{number(per_gib * row.value, 3)} {unit}")
    _finish(axes, list(tensors), f"{unit} of tensors at the fullest moment of a step")


def _name_bar(axes: Axes, y: float, x: float, label: str) -> None:
    axes.annotate(label, (x, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5)


def _finish(axes: Axes, names: list[str], label: str) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel=label, xlim=(0, axes.get_xlim()[1] * 1.5))


def _draw_strays(axes: Axes, samples, rows: list[Row]) -> None:
    by_dtype = {dtype: part.sort_values("step")["loss"].to_numpy() for dtype, part in samples.groupby("dtype", sort=False)}
    reference = by_dtype.pop(REFERENCE)
    for dtype, losses in by_dtype.items():
        strays = np.maximum(np.abs(losses / reference - 1), _BELOW_DRAWING)
        axes.plot(range(1, len(losses) + 1), strays, label=dtype, **look(dtype))
    steps = len(reference)
    # One tolerance for a window of the steps; rows of earlier runs know no windows.
    allowed: dict[tuple[float, int, int], list[str]] = {}
    for row in measured(rows):
        if row.metric == "relative_difference":
            key = (row.check_tolerance, row.params.get("first", 1), row.params.get("last", steps))
            allowed.setdefault(key, []).append(row.dtype)
    labels = []
    for (tolerance, first, last), dtypes in allowed.items():
        colour = look(dtypes[0])["color"]
        axes.plot([first, last], [tolerance] * 2, color=colour, linestyle=(0, (5, 3)), linewidth=1.2)
        if last == steps:
            labels.append((tolerance, f"{', '.join(dtypes)}: {number(100 * tolerance, 2)} %", colour))
    whole_numbers(axes.xaxis)
    axes.set(yscale="log", ylim=(_BELOW_DRAWING / 2, 3 * max([*(tolerance for tolerance, _, _ in allowed), 0.01])))
    spread_labels(axes, labels)


def _absences(models: dict[str, list[Row]]) -> list[str]:
    """A sentence for each reason why a format's steps were not timed, with what it holds for."""
    reasons: dict[str, dict[str, None]] = {}
    for rows in models.values():
        for row in rows:
            if row.metric == "step_time_s" and row.value is None:
                reasons.setdefault(row.value_reason, {})[row.dtype] = None
    return [f"{', '.join(dtypes)}: {reason}." for reason, dtypes in reasons.items()]


TITLES = {"precision_variants": "Mixed precision", "training_ladder": "A faster step, rung by rung"}

PLOTS = (
    Plot("precision", "precision_variants", "Time and memory of a training step in fp32, TF32, bf16 and fp16.", precision),
    Plot("training_ladder", "training_ladder", "What each means adds to the ones before it.", figures_ladder.training_ladder),
    Plot(
        "precision_loss",
        "precision_variants",
        "How far each format's losses stray from those of fp32 over the same batches.",
        precision_loss,
    ),
)
