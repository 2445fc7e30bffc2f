"""Figures of the baselines: losses, accuracies, throughput, memory, recovery from faults, and loss comparisons."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.errors import not_none
from hyperion.experiments.baselines import figures_speed
from hyperion.figures.material import Material, Panel, Plot, Quote, items, measured, number, percent, select, values
from hyperion.figures.style import (
    COLOURS,
    INK,
    MUTED,
    SUMMARY_LETTERING,
    add_notes,
    errors_of,
    limit_line,
    look,
    new_figure,
    spread_labels,
    whole_numbers,
    write_at,
)
from hyperion.figures.tables import MEMORY_IN_MIB, concatenated
from hyperion.results import Row

_THROUGHPUT = {"tokens_per_s": "tokens/s", "images_per_s": "images/s"}
_SUMMARY_STEPS = 400  # largest number of steps drawn in the summary
_BASELINES = ("language_model", "image_classifier")
# Experiments that compare this library's loop with plain loops, and the unit of their batch sizes in a label.
_COMPARED = {"image_training_speed": "", "language_training_speed": " tokens"}
# For each baseline, as (experiment, metric): the name of its measure of quality, and the split on which it is measured.
_QUALITY = {
    ("language_model", "perplexity_token"): ("perplexity per token", "test"),
    ("language_model", "perplexity_word"): ("perplexity per word", "test"),
    ("image_classifier", "accuracy"): ("accuracy", "test"),
}
# For each metric of an epoch: its split and column in the flat table, and the factor that converts values to the column's unit.
_EPOCH = {
    "training_loss": ("train", "loss", 1.0),
    "validation_loss": ("held-out", "loss", 1.0),
    "accuracy": ("held-out", "accuracy", 1.0),
    "images_per_s": ("train", "samples_per_s", 1.0),
    "tokens_per_s": ("train", "tokens_per_s", 1.0),
    "peak_memory_gib": ("train", "peak_allocated_mib", MEMORY_IN_MIB),
    "reserved_memory_gib": ("train", "peak_reserved_mib", MEMORY_IN_MIB),
    "learning_rate": ("train", "learning_rate", 1.0),
    "epoch_time_s": ("train", "wall_s", 1.0),
}
_TRAINING = ["experiment", "model", "rank", "epoch", "split"]
_OF_AN_EPOCH = ["loss", "accuracy", "perplexity", "samples_per_s", "tokens_per_s", "peak_allocated_mib", "peak_reserved_mib"]
_MEMORY = ("peak_memory_gib", "peak_rss_gib")
_PHASES = ("loader", "forward", "backward", "optimizer", "evaluation", "save")
_STEADY = (
    "The dotted line with its 95 % interval is a training step on a batch that is already on the device. It is timed after the "
    "training. The epochs include the loader. An epoch can be faster than the dotted line. If a step waits for the host to launch"
    " kernels, its speed depends on the speed of the host at that time."
)


def language_model(material: Material) -> Figure | None:
    """Draw two panels: the training loss by step, and the training and validation losses by epoch.

    Horizontal lines show the losses of n-gram models and, if known, the least possible loss.
    """
    epochs = epoch_rows(material, "language_model")
    if not epochs:
        return None
    figure, (left, right) = new_figure(_title("Language model", epochs), material.machine("language_model"), 2)
    _draw_steps(left, material, "language_model")
    left.set(ylabel="loss, nats per token")
    _draw_epochs(right, epochs, ("training_loss", "validation_loss"))
    labels = counted_losses(material) + _floors(epochs)
    for loss, _, colour in labels:
        right.axhline(loss, color=colour, linestyle=(0, (5, 3)), linewidth=1.2)
    right.set(ylabel="loss, nats per token", title="Loss by epoch; in brackets: perplexity")
    right.margins(y=0.1)
    right.legend()
    spread_labels(right, labels)
    add_notes(figure, _no_floor(epochs))
    return figure


def image_classifier(material: Material) -> Figure | None:
    """Draw the training loss by step and the held-out accuracy by epoch.

    Horizontal lines show chance accuracy and the best possible accuracy.
    """
    epochs = epoch_rows(material, "image_classifier")
    if not epochs:
        return None
    figure, (left, right) = new_figure(_title("Image classifier", epochs), material.machine("image_classifier"), 2)
    _draw_steps(left, material, "image_classifier")
    left.set(ylabel="loss, nats per image")
    _draw_epochs(right, epochs, ("accuracy",))
    bounds = {row.limit for row in epochs if row.metric == "accuracy" and row.limit and row.limit < 1}
    labels = [(bound, f"best possible {100 * bound:.1f} %", MUTED) for bound in bounds]
    tested = measured(material.of("image_classifier", metric="accuracy"))
    for row in [row for row in tested if row.params.get("split") == "test"]:
        x = max(r.params["epoch"] for r in epochs)
        label = f"test split {100 * not_none(row.value):.1f} %"
        right.errorbar([x], [not_none(row.value)], errors_of([row]), label=label, linestyle="none", **look("test", 1))
        right.legend(loc="center right")
    classes = {r.params["class"] for r in material.of("image_pipeline", metric="count") if "class" in r.params}
    if classes:
        labels.append((1 / len(classes), f"chance {100 / len(classes):.0f} %", MUTED))
    for share, _, colour in labels:
        right.axhline(share, color=colour, linestyle=(0, (5, 3)), linewidth=1.2)
    right.set(ylim=(0, 1.03), ylabel="% of held-out images classified correctly", title="Accuracy by epoch, 95 % interval")
    right.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}")
    spread_labels(right, labels)
    add_notes(figure, _no_floor([row for row in epochs if row.metric == "accuracy"]) + _caveats(material))
    return figure


def _caveats(material: Material) -> list[str]:
    return [material.image_caveat] if material.image_caveat else []


def time_to_accuracy(material: Material) -> Figure | None:
    """Draw the held-out accuracy by training time in seconds, one line per seed, with the target accuracy.

    The accuracies come from the samples whose "kind" is "evaluation". The columns "accuracy", "time_s" and "seed" are used.
    """
    rows = material.of("image_classifier", metric="time_to_accuracy_s")
    samples = material.samples("image_classifier") if rows else pd.DataFrame()
    if not rows or "time_s" not in samples:
        return None
    evaluated = samples.query("kind == 'evaluation' and time_s.notna()")
    figure, (axes,) = new_figure(f"Time to accuracy of {rows[0].variant}", material.machine("image_classifier"), height=3.6)
    seeds = sorted(evaluated["seed"].unique())
    for seed in seeds:
        curve = evaluated.query("seed == @seed").sort_values("time_s")
        if seed == seeds[0]:
            axes.plot(curve["time_s"], curve["accuracy"], color=COLOURS[0], marker="o", markersize=4, zorder=3)
        else:
            axes.plot(curve["time_s"], curve["accuracy"], color=MUTED, linewidth=1.0, alpha=0.7, zorder=2)
    target = rows[0].params["target"]
    limit_line(axes, target, f"target: {100 * target:g} %", INK)
    for row in measured(rows)[:1]:
        time_s = not_none(row.value)
        axes.axvline(time_s, color=COLOURS[2], linewidth=1.4)
        write_at(
            axes, f"after {time_s:.3g} s", (time_s, 0.5), (4, 0), xycoords=("data", "axes fraction"), fontsize=9, color=COLOURS[2]
        )
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")
    lowest = min(target, evaluated["accuracy"].min())
    axes.set(
        xlim=(0, None), ylim=(max(0.0, lowest - 0.05), 1.0), xlabel="seconds of training", ylabel="% of held-out images correct"
    )
    notes = ["One dot per epoch. The seconds include the loader. They do not include compilation, evaluation and checkpoints."]
    notes += [row.value_reason for row in rows[:1] if row.value is None]
    notes += [f"Grey lines: {len(seeds) - 1} other seeds."] if len(seeds) > 1 else []
    add_notes(figure, notes + _caveats(material))
    return figure


def perplexity(material: Material) -> Figure | None:
    """Draw the validation perplexity per token of n-gram models and trained models."""
    rows = [r for r in measured(material.rows) if r.metric == "perplexity_token" and r.params.get("split") == "valid"]
    if len({row.variant for row in rows}) < 2:
        return None
    rows = sorted(rows, key=lambda row: -not_none(row.value))
    machine = material.machine(rows[0].experiment)
    figure, (axes,) = new_figure("Perplexity on the validation split", machine, height=1.6 + 0.42 * len(rows))
    colours = [COLOURS[6] if row.experiment == "ngram_baselines" else COLOURS[0] for row in rows]
    axes.barh(range(len(rows)), [not_none(row.value) for row in rows], color=colours, height=0.62)
    for y, row in enumerate(rows):
        value = not_none(row.value)
        write_at(axes, number(value), (value, y), (4, 0), va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [_model_name(row) for row in rows])
    axes.grid(axis="y", visible=False)
    floors = {row.limit for row in rows if row.limit is not None}
    for floor in list(floors)[:1]:
        axes.axvline(floor, color=INK, linestyle=(0, (5, 3)), linewidth=1.2)
        write_at(
            axes,
            f"floor {number(floor)}",
            (floor, 1),
            (0, 2),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=8,
        )
    axes.margins(x=0.12)
    axes.set(xlabel="perplexity per token (lower is better)", xlim=(0, None))
    return figure


def throughput(material: Material) -> Figure | None:
    """Draw the throughput of each model by epoch, and its peak memory."""
    rows = [row for row in measured(material.rows) if row.experiment in _BASELINES]
    rates = [row for row in rows if row.metric in _THROUGHPUT and "epoch" in row.params]
    steady = [row for row in rows if row.metric in _THROUGHPUT and row.params.get("step") == "steady"]
    memory = [row for row in rows if row.metric in _MEMORY]
    if not rates or not memory:
        return None
    metrics = list(dict.fromkeys(row.metric for row in rates))
    figure, panels = new_figure("Throughput and memory", material.machine(rates[0].experiment), len(metrics) + 1, height=3.6)
    for axes, metric in zip(panels, metrics, strict=False):
        for position, variant in enumerate(dict.fromkeys(row.variant for row in rates if row.metric == metric)):
            points = [row for row in rates if (row.metric, row.variant) == (metric, variant)]
            x = [row.params["epoch"] for row in points]
            values = [not_none(row.value) for row in points]
            axes.errorbar(x, values, errors_of(points), label=variant, **look(variant, position))
        for row in [row for row in steady if row.metric == metric]:
            axes.axhspan(not_none(row.ci_low), not_none(row.ci_high), color=MUTED, alpha=0.25, linewidth=0)
            # Dotted, because all figures of the book show limits as dashed lines, and this line is not a limit.
            axes.axhline(not_none(row.value), color=MUTED, linestyle=":", linewidth=1.6, label="a steady step, timed alone")
        axes.set(xlabel="epoch", ylabel=_THROUGHPUT[metric], ylim=(0, None), title=f"{_THROUGHPUT[metric]} by epoch")
        axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
        axes.yaxis.set_major_formatter(lambda value, _: items(value))
        whole_numbers(axes.xaxis)
        axes.legend(loc="lower right")
    _draw_memory(panels[-1], memory)
    if steady:
        add_notes(figure, [_STEADY])
    return figure


def leakage(material: Material) -> Figure | None:
    """Draw the loss on independent random tokens by step. It stays near ln V if the model does not see future tokens.

    The losses come from the samples whose "kind" is "step". The horizontal line shows the predicted held-out loss ln V, where V
    is the vocabulary size.
    """
    rows = measured(material.of("leakage", metric="validation_loss"))
    if not rows:
        return None
    row = rows[0]
    figure, (axes,) = new_figure("Loss on independent tokens", material.machine("leakage"), height=3.4)
    samples = material.samples("leakage")
    steps = samples.query("kind == 'step'").sort_values("step")
    axes.plot(steps["step"], steps["loss"], color=COLOURS[0], linewidth=1.2, label="training loss, each step")
    last = steps["step"].max()
    axes.errorbar(
        [last * 1.04], [not_none(row.value)], errors_of(rows[:1]), label="held-out loss, 95 % interval", **look("held", 1)
    )
    labels = []
    if row.predicted is not None:
        axes.axhline(row.predicted, color=INK, linestyle=(0, (5, 3)), linewidth=1.2)
        labels = [(row.predicted, f"ln V = {number(row.predicted)}", INK)]
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token")
    axes.legend()
    spread_labels(axes, labels)
    return figure


def epoch_rows(material: Material, experiment: str) -> list[Row]:
    """Return the rows of an experiment with per-epoch values, in epoch order."""
    rows = [row for row in measured(material.of(experiment)) if "epoch" in row.params]
    return sorted(rows, key=lambda row: row.params["epoch"])


def _title(what: str, rows: list[Row]) -> str:
    source = sorted({row.data_source for row in rows if row.data_source})
    return f"{what} {rows[0].variant}" + (f", data {', '.join(source)}" if source else "")


def _draw_steps(axes: Axes, material: Material, experiment: str) -> None:
    """Draw the loss of every training step and the running mean of these losses.

    The losses come from the samples of `experiment` whose "kind" is "step". The columns "step" and "loss" are used.
    """
    samples = material.samples(experiment)
    steps = samples.query("kind == 'step'").sort_values("step")
    if "seed" in steps:
        steps = steps.query("seed == seed.min()")
    step, loss = steps["step"].to_numpy(), steps["loss"].to_numpy()
    window = max(1, len(loss) // 40)
    smooth = np.convolve(loss, np.ones(window) / window, mode="valid")
    axes.plot(step, loss, color=COLOURS[5], linewidth=0.8, alpha=0.6, label="each step")
    axes.plot(step[window - 1 :], smooth, color=COLOURS[0], label=f"mean of the last {window} steps")
    axes.set(xlabel="optimizer step", title="Training loss by step")
    axes.legend()
    # The least possible loss is stored with the validation losses, which have the same unit.
    for floor, text, colour in _floors([r for r in epoch_rows(material, experiment) if r.metric.endswith("loss")]):
        axes.axhline(floor, color=colour, linestyle=(0, (5, 3)), linewidth=1.2)
        write_at(axes, text, (0.99, floor), (0, 3), xycoords=("axes fraction", "data"), ha="right", fontsize=8, color=colour)


def _draw_epochs(axes: Axes, rows: list[Row], metrics: tuple[str, ...]) -> None:
    for position, metric in enumerate(metrics):
        points = [row for row in rows if row.metric == metric]
        x = [row.params["epoch"] for row in points]
        label = metric.replace("_", " ")
        axes.errorbar(x, [not_none(row.value) for row in points], errors_of(points), label=label, **look(metric, position))
    axes.set(xlabel="epoch")
    whole_numbers(axes.xaxis)


def _draw_memory(axes: Axes, rows: list[Row]) -> None:
    peaks: dict[str, float] = {}
    for row in rows:
        peaks[row.variant] = max(not_none(row.value), peaks.get(row.variant, 0.0))
    axes.barh(range(len(peaks)), list(peaks.values()), color=COLOURS[0], height=0.5)
    for y, peak in enumerate(peaks.values()):
        write_at(axes, number(peak, 3), (peak, y), (4, 0), va="center", fontsize=9)
    axes.set_yticks(range(len(peaks)), list(peaks))
    axes.set_ylim(-0.6, len(peaks) - 0.4)
    axes.margins(x=0.2)
    axes.grid(axis="y", visible=False)
    kinds = {"peak_memory_gib": "device memory", "peak_rss_gib": "resident memory"}
    axes.set(xlabel="GiB", title="Peak " + " and ".join(sorted({kinds[row.metric] for row in rows})))


def counted_losses(material: Material) -> list[tuple[float, str, str]]:
    """Return (loss in nats, label with perplexity, colour) for each n-gram model on the validation split."""
    rows = measured(material.of("ngram_baselines", metric="perplexity_token"))
    return [
        (math.log(not_none(row.value)), f"{_model_name(row)} ({number(not_none(row.value))})", MUTED)
        for row in rows
        if row.params.get("split") == "valid"
    ]


def _floors(rows: list[Row]) -> list[tuple[float, str, str]]:
    floors = [row.limit for row in rows if row.metric == "validation_loss" and row.limit]
    return [(floor, f"floor ({number(math.exp(floor))})", COLOURS[2]) for floor in floors[-1:]]


def _no_floor(rows: list[Row]) -> list[str]:
    reasons = {row.limit_source for row in rows if row.limit is None and row.metric in ("validation_loss", "accuracy")}
    return [f"{reason[:1].upper()}{reason[1:]}." for reason in sorted(reasons)]


def _model_name(row: Row) -> str:
    return row.variant.replace("bigram_interpolated", "interpolated bigram")


def recovery(material: Material) -> Figure | None:
    """Draw one marker for each trial, at the phase and kind of its fault. A trial is a training run with one fault.

    The number in the marker is the number of lost steps. The marker's shape shows whether the training run recovered.
    """
    rows = material.of("recovery", metric="steps_lost")
    if not rows:
        return None
    trials = material.samples("recovery")
    kinds = [row.variant for row in rows]
    figure, (axes,) = new_figure("Faults and the steps they cost", material.machine("recovery"), height=1.6 + 0.62 * len(kinds))
    for _, cell in trials.groupby(["phase", "kind"]):
        spread = 0.8 / len(cell)
        for place, trial in enumerate(cell.to_dict("records")):
            x = _PHASES.index(trial["phase"]) + (place - (len(cell) - 1) / 2) * spread
            y = kinds.index(trial["kind"])
            colour, marker = (COLOURS[2], "o") if trial["recovered"] else (COLOURS[1], "X")
            axes.scatter([x], [y], s=340, color=colour, marker=marker, zorder=2)
            axes.annotate(f"{trial['lost']}", (x, y), ha="center", va="center", color="white", fontsize=9, fontweight="bold")
    axes.set_xticks(range(len(_PHASES)), _PHASES)
    axes.set_yticks(range(len(kinds)), [f"{row.variant}\n{_lost(row)}" for row in rows])
    axes.set(xlim=(-0.5, len(_PHASES) - 0.5), ylim=(len(kinds) - 0.5, -0.5), xlabel="phase of the fault")
    failed = sum(not recovered for recovered in trials["recovered"])
    note = f"{len(trials) - failed} of {len(trials)} runs ended bitwise equal to a run without a fault"
    failures = " Crosses mark the other runs." if failed else ""
    add_notes(figure, [f"The number in each mark is the number of optimizer steps that were repeated. {note}.{failures}"])
    return figure


def _lost(row: Row) -> str:
    """Return a label with the largest number of steps lost to this kind of fault, and the number allowed."""
    lost = "failed" if row.value is None else f"lost at most {row.value:.0f}"
    return f"{lost}, allowed {row.params['may_lose']}"


def parity_ladder(material: Material) -> Figure | None:
    """Draw the losses of the parity ladder, a list of training runs called rungs. Each rung adds one change to the previous one.

    The left panel shows the difference of each rung's losses from those of the first rung, by step. The right panel shows the
    difference of each rung's losses from those of the previous rung, with its tolerance.
    """
    rows = measured(material.of("parity_ladder", metric="relative_difference"))
    if not rows:
        return None
    steps = [row for row in rows if row.params["beside"] == "the rung before"]
    figure, (left, right) = new_figure(
        "The same training with one more change on each rung", material.machine("parity_ladder"), 2
    )
    _draw_drift(left, material)
    _draw_rungs(right, steps)
    missing = [row for row in material.of("parity_ladder") if row.value is None]
    add_notes(figure, [f"{row.variant} was not run: {row.value_reason}." for row in missing])
    return figure


def _draw_drift(axes: Axes, material: Material) -> None:
    samples = material.samples("parity_ladder")
    curves, names = samples.pivot(index="step", columns="rung", values="loss"), list(dict.fromkeys(samples["rung"]))
    for place, name in enumerate(names[1:]):
        difference = (curves[name] / curves[names[0]] - 1).abs().to_numpy()
        if difference.any():
            width = max(1.0, 6.5 - 1.2 * place)  # curves of equal losses coincide, so later curves are thinner
            differs = np.pad(difference > 0, 1)
            # A difference between two steps with equal losses has no line to a neighbour, so it needs a mark.
            alone = differs[1:-1] & ~differs[:-2] & ~differs[2:]
            axes.plot(
                curves.index,
                np.where(difference > 0, difference, np.nan),
                label=name,
                linewidth=width,
                color=COLOURS[place],
                **({"marker": "o", "markersize": width + 1, "markevery": alone.tolist()} if alone.any() else {}),
            )
    axes.set(
        yscale="log", xlabel="optimizer step", ylabel="relative difference", title=f"Difference from the losses of {names[0]}"
    )
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))  # beside the panel: marks can be anywhere in it


def _draw_rungs(axes: Axes, rows: list[Row]) -> None:
    for place, row in enumerate(rows):
        if row.check_tolerance:
            axes.plot([place - 0.35, place + 0.35], [row.check_tolerance] * 2, color=INK, linestyle=(0, (5, 3)), linewidth=1.2)
        if row.value:
            axes.scatter([place], [row.value], s=60, color=COLOURS[place], zorder=2)
            write_at(axes, number(row.value, 2), (place, row.value), (7, 0), va="center", fontsize=8)
        else:
            axes.annotate("equal", (place, 0.02), xycoords=("data", "axes fraction"), ha="center", fontsize=8.5, color=MUTED)
    axes.set_xticks(range(len(rows)), [row.variant for row in rows], rotation=20, ha="right", fontsize=8.5)
    axes.set(yscale="log", xlim=(-0.6, len(rows) - 0.2), title="Difference from the rung before; dashed: tolerance")
    axes.margins(y=0.15)


def summary_panels(material: Material) -> list[Panel]:
    """Return a panel with the loss of the language model, if it was trained."""
    epochs = [row for row in epoch_rows(material, "language_model") if row.metric == "validation_loss"]
    return [Panel("language_model", lambda axes: _draw_losses(axes, epochs, material))] if epochs else []


def _draw_losses(axes: Axes, epochs: list[Row], material: Material) -> None:
    samples = material.samples("language_model")
    steps = samples.query("kind == 'step'").sort_values("step")
    if "seed" in steps:
        steps = steps.query("seed == seed.min()")
    window = max(1, len(steps) // _SUMMARY_STEPS)
    total, last = steps["step"].max(), epochs[-1]
    mean = steps["loss"].rolling(5 * window, min_periods=1).mean()
    axes.plot(steps["step"], mean, linewidth=1.2, color=look("fp32")["color"])
    colour = look("held", 1)["color"]
    x = [row.params["epoch"] * total / last.params["epoch"] for row in epochs]
    axes.plot(x, values(epochs), linestyle="none", marker="s", color=colour)
    labels = [(not_none(last.value), f"held out {number(last.value, 3)}", colour)]
    for loss, label, marked in counted_losses(material):
        axes.axhline(loss, color=marked, linestyle=(0, (5, 3)), linewidth=1.2)
        labels.append((loss, label.partition(" (")[0].replace("interpolated ", ""), marked))
    if last.limit:
        limit_line(axes, last.limit, "floor", MUTED, SUMMARY_LETTERING - 2)
    source = f", data {last.data_source}" if last.data_source else ""
    axes.set(title=f"Language model, nats per token{source}", xlabel="optimizer step")
    spread_labels(axes, labels, gap_points=SUMMARY_LETTERING + 2, size=SUMMARY_LETTERING - 1)


def summary_notes(material: Material) -> list[str]:
    """Return one sentence about the image classifier, which has no panel in the summary, or no sentence without results."""
    rows = measured(material.of("image_classifier"))
    tested = next((r for r in rows if r.metric == "accuracy" and r.params.get("split") == "test"), None)
    if tested is None:
        return []
    text = f"{tested.variant}: {percent(tested.value)} % of the test images (data {tested.data_source})."
    return [f"{text} {material.image_caveat}".strip()]


def headlines(rows: list[Row], is_steady: Callable[[Row], bool]) -> Iterator[Quote]:
    """Yield the quality of each baseline model, the speed of its training steps, and the speed-ups over plain loops.

    The quality is the perplexity or the accuracy. If several seeds were trained, it is the mean over the seeds.
    """
    averaged = {(row.variant, row.metric) for row in rows if "seeds" in row.params}
    for row in rows:
        what, split = _QUALITY.get((row.experiment, row.metric), ("", ""))
        label = ", ".join(filter(None, (row.variant, what, row.dtype, f"{split} split")))
        if what and row.params.get("split") == f"{split}, mean of seeds":
            seeds = row.params["seeds"]
            yield Quote(f"{label}, mean of {seeds} seeds", row, "mean", seeds)
        elif what and row.params.get("split") == split and (row.variant, row.metric) not in averaged:
            yield Quote(label, row, "quality")
        elif row.experiment in _BASELINES and row.metric in _THROUGHPUT and row.params.get("step") == "steady":
            batch = f"{row.params['batch']:,}{' tokens' if row.metric == 'tokens_per_s' else ''}"
            yield Quote(f"{row.variant}, steady training step, {row.dtype}, batch {batch}", row)
        elif row.experiment in _COMPARED and row.metric == "speedup" and "rung" not in row.params:
            timings = _compared_timings(row, rows)
            if len({timing.params.get("loop", timing.params.get("rung")) for timing in timings}) == 2:
                yield from _over_a_plain_loop(row, timings)


def _compared_timings(ratio: Row, rows: list[Row]) -> list[Row]:
    """Return the step times of the two loops of a speed-up.

    A run times the loops once in alternation with each other, and once as rungs of the ladder. A speed-up has as many samples as
    the step times that it was computed from.
    """
    loops = {ratio.params.get("loop", "hyperion"), ratio.params.get("over", "plain")}
    identity = (ratio.experiment, ratio.variant, ratio.dtype, ratio.n, ratio.params["batch"])
    return [
        row
        for row in select(rows, experiment=ratio.experiment, metric="step_time_s")
        if (row.experiment, row.variant, row.dtype, row.n, row.params.get("batch")) == identity
        and row.params.get("loop", row.params.get("rung")) in loops
    ]


def _over_a_plain_loop(row: Row, timings: Sequence[Row]) -> Iterator[Quote]:
    """Yield the speed-up of this library's loop over a plain loop, if the host does not limit the plain loop.

    `timings` are the step times of both loops.
    """
    unit = _COMPARED[row.experiment]
    label = f"{row.variant}, training, batch {row.params['batch']:,}{unit}"
    if row.params.get("over") == "plain, captured":
        yield Quote(f"{label}: this library over the same plain loop in a graph", row, timings=timings)
    elif unit:  # not for images, because the host limits their plain loop, and the ratio depends on the host
        compiled = " compiled" if row.params.get("plain_compiled", row.params["compiled"]) else ""
        yield Quote(f"{label}: this library over a plain{compiled} loop", row, timings=timings)


def flat_tables(runs: Sequence[Sequence[Row]]) -> dict[str, pd.DataFrame]:
    """Return a dict that maps the path of the flat table to the table.

    The table has one line for each epoch, split and rank of each training run.
    """
    return {"training/epoch_metrics.csv": concatenated(_epoch_table(rows) for rows in runs)}


def _epoch_table(rows: Iterable[Row]) -> pd.DataFrame:
    lines: dict[tuple, dict] = {}
    of_tokens = set()  # training runs whose loss is per token; its exponential is the perplexity
    for row in rows:
        if "epoch" not in row.params or row.metric not in _EPOCH or row.value is None:
            continue
        split, column, factor = _EPOCH[row.metric]
        identity = (row.experiment, row.variant, row.rank, row.params["epoch"], split)
        lines.setdefault(identity, dict(zip(_TRAINING, identity, strict=True)))[column] = factor * row.value
        if row.metric == "tokens_per_s":
            of_tokens.add(identity[:2])
    for identity, line in lines.items():
        if identity[:2] in of_tokens and "loss" in line:
            line["perplexity"] = math.exp(line["loss"])
    table = pd.DataFrame(list(lines.values()), columns=[*_TRAINING, *_OF_AN_EPOCH, "learning_rate", "wall_s"])
    return table.astype({"rank": "Int64"})


TITLES = {
    "leakage": "No look-ahead",
    "ngram_baselines": "N-gram models",
    "language_model": "Language model",
    "image_classifier": "Image classifier",
    "image_training_speed": "Speed of image training",
    "language_training_speed": "Speed of language-model training",
    "recovery": "Faults and recovery",
    "parity_ladder": "The parity ladder",
}

PLOTS = (
    Plot("leakage", "leakage", "A loss clearly below ln V would mean that the model sees future tokens.", leakage),
    Plot("language_model", "language_model", "Loss by step and by epoch, with the losses of n-gram models.", language_model),
    Plot(
        "perplexity", "language_model", "Perplexity of n-gram models and trained models on the same held-out tokens.", perplexity
    ),
    Plot(
        "image_classifier",
        "image_classifier",
        "Loss by step, and accuracy on images that were not used for training.",
        image_classifier,
    ),
    Plot(
        "throughput",
        "image_classifier",
        "Throughput by epoch, throughput of a single step after the training, and peak memory.",
        throughput,
    ),
    Plot("time_to_accuracy", "image_classifier", "Accuracy over seconds of training.", time_to_accuracy),
    Plot(
        "language_speed",
        "language_training_speed",
        "Step times of training loops and of their roofs, and the losses of two loops.",
        figures_speed.language_speed,
    ),
    Plot(
        "image_speed",
        "image_training_speed",
        "Images per second of training loops, and the losses of two loops.",
        figures_speed.image_training_speed,
    ),
    Plot("recovery", "recovery", "Phase of each fault, and the number of steps that were repeated.", recovery),
    Plot("parity_ladder", "parity_ladder", "How much each change alters the losses.", parity_ladder),
)

# Folder for this subject's tables and figures, in benchmarks/ of a run.
RESULTS_FOLDER = "baseline"
