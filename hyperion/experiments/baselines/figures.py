"""Figures of the training chapters: losses above their floors, accuracy between chance and Bayes, throughput and memory."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.experiments.baselines import figures_images, figures_language_speed, figures_recovery
from hyperion.figures.formats import items, number
from hyperion.figures.material import Material, measured
from hyperion.figures.plot import Plot
from hyperion.figures.style import COLOURS, INK, MUTED, add_notes, errors_of, look, new_figure, spread_labels, whole_numbers
from hyperion.results import Row

_THROUGHPUT = {"tokens_per_s": "tokens/s", "images_per_s": "images/s"}
_BASELINES = ("language_model", "image_classifier")
_MEMORY = ("peak_memory_gib", "peak_rss_gib")
_STEADY = (
    "Dotted, with its 95 % interval: one training step on a batch that is there already, repeated and timed alone after the "
    "training. Epochs include loading. It is no bound: it was timed at another moment, and where a step waits for the host "
    "to launch its kernels, its pace is the host's at that moment."
)


def language_model(material: Material) -> Figure | None:
    """Training loss by step and losses by epoch, with the floor of the text and the counting models as lines."""
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
    right.set(ylabel="loss, nats per token", title="By epoch; in brackets: perplexity")
    right.margins(y=0.1)
    right.legend()
    spread_labels(right, labels)
    add_notes(figure, _no_floor(epochs))
    return figure


def image_classifier(material: Material) -> Figure | None:
    """Training loss by step, and held-out accuracy by epoch between chance and the best any classifier can do."""
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
        label = f"test split {100 * row.value:.1f} %"
        right.errorbar([x], [row.value], errors_of([row]), label=label, linestyle="none", **look("test", 1))
        right.legend(loc="center right")
    classes = {r.params["class"] for r in material.of("image_pipeline", metric="count") if "class" in r.params}
    if classes:
        labels.append((1 / len(classes), f"chance {100 / len(classes):.0f} %", MUTED))
    for share, _, colour in labels:
        right.axhline(share, color=colour, linestyle=(0, (5, 3)), linewidth=1.2)
    right.set(ylim=(0, 1.03), ylabel="% of held-out images classified correctly", title="Accuracy by epoch, 95 % interval")
    right.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}")
    spread_labels(right, labels)
    add_notes(figure, _no_floor([row for row in epochs if row.metric == "accuracy"]))
    return figure


def perplexity(material: Material) -> Figure | None:
    """Held-out token perplexity of the counting models and the trained ones, lower is better."""
    rows = [r for r in measured(material.rows) if r.metric == "perplexity_token" and r.params.get("split") == "valid"]
    if len({row.variant for row in rows}) < 2:
        return None
    rows = sorted(rows, key=lambda row: -row.value)
    machine = material.machine(rows[0].experiment)
    figure, (axes,) = new_figure("Perplexity of the valid split", machine, height=1.6 + 0.42 * len(rows))
    colours = [COLOURS[6] if row.experiment == "ngram_baselines" else COLOURS[0] for row in rows]
    axes.barh(range(len(rows)), [row.value for row in rows], color=colours, height=0.62)
    for y, row in enumerate(rows):
        axes.annotate(number(row.value), (row.value, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [_model_name(row) for row in rows])
    axes.grid(axis="y", visible=False)
    floors = {row.limit for row in rows if row.limit is not None}
    for floor in list(floors)[:1]:
        axes.axvline(floor, color=INK, linestyle=(0, (5, 3)), linewidth=1.2)
        axes.annotate(
            f"floor {number(floor)}",
            (floor, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
        )
    axes.margins(x=0.12)
    axes.set(xlabel="perplexity per token (lower is better)", xlim=(0, None))
    return figure


def throughput(material: Material) -> Figure | None:
    """What each model trains per second by epoch, and the memory it takes at most."""
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
            axes.errorbar(x, [row.value for row in points], errors_of(points), label=variant, **look(variant, position))
        for row in [row for row in steady if row.metric == metric]:
            axes.axhspan(row.ci_low, row.ci_high, color=MUTED, alpha=0.25, linewidth=0)
            # Dotted: dashes are limits everywhere in the book, and this is none.
            axes.axhline(row.value, color=MUTED, linestyle=":", linewidth=1.6, label="a steady step, timed alone")
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
    """Loss on tokens drawn fresh and independently, by step: a model that cannot see the future stays at ln V.

    Reads samples of kind "step"; the line is the prediction of the held-out loss, the entropy of a uniform token.
    """
    rows = measured(material.of("leakage", metric="validation_loss"))
    if not rows:
        return None
    row = rows[0]
    figure, (axes,) = new_figure("Loss on independent tokens", material.machine("leakage"), height=3.4)
    samples = material.samples("leakage")
    steps = samples[samples["kind"] == "step"].sort_values("step")
    axes.plot(steps["step"], steps["loss"], color=COLOURS[0], linewidth=1.2, label="training loss, each step")
    last = steps["step"].max()
    axes.errorbar([last * 1.04], [row.value], errors_of(rows[:1]), label="held-out loss, 95 % interval", **look("held", 1))
    labels = []
    if row.predicted is not None:
        axes.axhline(row.predicted, color=INK, linestyle=(0, (5, 3)), linewidth=1.2)
        labels = [(row.predicted, f"ln V = {number(row.predicted)}", INK)]
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token")
    axes.legend()
    spread_labels(axes, labels)
    return figure


def epoch_rows(material: Material, experiment: str) -> list[Row]:
    """Measured rows of an experiment that belong to an epoch, in its order."""
    rows = [row for row in measured(material.of(experiment)) if "epoch" in row.params]
    return sorted(rows, key=lambda row: row.params["epoch"])


def _title(what: str, rows: list[Row]) -> str:
    source = sorted({row.data_source for row in rows if row.data_source})
    return f"{what} {rows[0].variant}" + (f", data {', '.join(source)}" if source else "")


def _draw_steps(axes: Axes, material: Material, experiment: str) -> None:
    """The loss of every step, faint, and its running mean. Reads samples with kind "step": columns step, loss."""
    samples = material.samples(experiment)
    steps = samples[samples["kind"] == "step"].sort_values("step")
    if "seed" in steps:
        steps = steps[steps["seed"] == steps["seed"].min()]
    step, loss = steps["step"].to_numpy(), steps["loss"].to_numpy()
    window = max(1, len(loss) // 40)
    smooth = np.convolve(loss, np.ones(window) / window, mode="valid")
    axes.plot(step, loss, color=COLOURS[5], linewidth=0.8, alpha=0.6, label="each step")
    axes.plot(step[window - 1 :], smooth, color=COLOURS[0], label=f"mean of {window} steps")
    axes.set(xlabel="optimizer step", title="Training loss by step")
    axes.legend()
    # The floor stands in the other panel's rows, in the same unit.
    for floor, text, colour in _floors([r for r in epoch_rows(material, experiment) if r.metric.endswith("loss")]):
        axes.axhline(floor, color=colour, linestyle=(0, (5, 3)), linewidth=1.2)
        axes.annotate(
            text,
            (0.99, floor),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=colour,
        )


def _draw_epochs(axes: Axes, rows: list[Row], metrics: tuple[str, ...]) -> None:
    for position, metric in enumerate(metrics):
        points = [row for row in rows if row.metric == metric]
        x = [row.params["epoch"] for row in points]
        label = metric.replace("_", " ")
        axes.errorbar(x, [row.value for row in points], errors_of(points), label=label, **look(metric, position))
    axes.set(xlabel="epoch")
    whole_numbers(axes.xaxis)


def _draw_memory(axes: Axes, rows: list[Row]) -> None:
    most: dict[str, Row] = {}
    for row in rows:
        if row.variant not in most or row.value > most[row.variant].value:
            most[row.variant] = row
    axes.barh(range(len(most)), [row.value for row in most.values()], color=COLOURS[0], height=0.5)
    for y, row in enumerate(most.values()):
        axes.annotate(number(row.value, 3), (row.value, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(most)), list(most))
    axes.set_ylim(-0.6, len(most) - 0.4)
    axes.margins(x=0.2)
    axes.grid(axis="y", visible=False)
    kinds = {"peak_memory_gib": "device memory", "peak_rss_gib": "resident memory"}
    axes.set(xlabel="GiB", title="Peak " + " and ".join(sorted({kinds[row.metric] for row in most.values()})))


def counted_losses(material: Material) -> list[tuple[float, str, str]]:
    """(loss in nats, label with perplexity, colour) of the counting models on the valid split."""
    rows = measured(material.of("ngram_baselines", metric="perplexity_token"))
    return [
        (math.log(row.value), f"{_model_name(row)} ({number(row.value)})", MUTED)
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


TITLES = {
    "leakage": "No look ahead",
    "ngram_baselines": "Counting models",
    "language_model": "Language model",
    "image_classifier": "Image classifier",
    "image_training_speed": "Training images fast",
    "language_training_speed": "Training a language model fast",
    "recovery": "Faults and recovery",
    "parity_ladder": "The parity ladder",
}

PLOTS = (
    Plot(
        "leakage",
        "leakage",
        "Nobody can predict an independent draw: a loss below ln V would mean that the model sees the future.",
        leakage,
    ),
    Plot("language_model", "language_model", "Loss by step and by epoch, beside what counting alone achieves.", language_model),
    Plot("perplexity", "language_model", "Trained and counted models on the same held-out tokens.", perplexity),
    Plot(
        "image_classifier", "image_classifier", "Loss by step, and accuracy on images that were not trained on.", image_classifier
    ),
    Plot(
        "throughput",
        "image_classifier",
        "Items trained on per second beside a steady step timed alone, and the memory taken at most.",
        throughput,
    ),
    Plot("time_to_accuracy", "image_classifier", "Accuracy over seconds of training.", figures_images.time_to_accuracy),
    Plot("language_speed", "language_training_speed", "Two paths and their roof.", figures_language_speed.language_speed),
    Plot("image_speed", "image_training_speed", "Two training paths in turn.", figures_images.image_training_speed),
    Plot("recovery", "recovery", "Where each fault struck, and how many steps had to be done again.", figures_recovery.recovery),
    Plot(
        "parity_ladder",
        "parity_ladder",
        "What each change does to the losses: rounding where it rounds otherwise, and nothing where it does not.",
        figures_recovery.parity_ladder,
    ),
)

# Both subjects of the baselines share a folder of a run's benchmarks/.
RESULTS_FOLDER = "baseline"
