"""All figures of the book: the figures of the subjects, and two figures about a whole run, the summary and the predictions."""

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.chapter.subjects import subject_of, subjects
from hyperion.errors import HyperionError, not_none
from hyperion.experiments.baselines.figures import counted_losses, epoch_rows
from hyperion.experiments.hardware.figures import gemm_intensity, gemm_rows, stream_intensity
from hyperion.figures.material import ALL, Material, Plot, items, made_from_rows, measured, number, percent, values
from hyperion.figures.style import (
    GRID,
    INK,
    MUTED,
    add_notes,
    limit_line,
    log_ticks,
    look,
    new_figure,
    png,
    spread_labels,
    styled,
    write_at,
)
from hyperion.results import Prediction, Row

# Font size in points. Most pages show the summary at half its size, at which the letters are 10 pixels high.
_LETTERING = 11
_STEPS_DRAWN = 400
_ARROWS = {"higher": " ↑", "lower": " ↓", "none": ""}
_NOTE = (
    "Predictions are stored before the first measurement. Ceilings are no predictions and are not drawn. If higher is better "
    "(↑), optimism is predicted / measured. If lower is better (↓), it is measured / predicted. With a value above 1 the "
    "prediction was too optimistic. For metrics without an arrow, the figure shows predicted / measured. The grey band is a "
    "factor of 1.25."
)


def all_plots() -> list[Plot]:
    """Return all figures. The summary comes first, then the figures of each subject, and `predictions` comes last.

    Raises:
        HyperionError: two figures have the same name.
    """
    of_subjects = [plot for subject in subjects() for plot in getattr(subject.figures, "PLOTS", ())]
    plots = [_OF_THE_RUN[0], *of_subjects, *_OF_THE_RUN[1:]]
    names = [plot.name for plot in plots]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise HyperionError(
            f"two figures are called {', '.join(map(repr, sorted(twice)))}",
            next_step="rename one of the two figures in the figures.py of its subject, a folder of hyperion/experiments",
        )
    return plots


def plots_of(experiment: str) -> list[Plot]:
    """Return the figures that belong to an experiment."""
    return [plot for plot in all_plots() if plot.experiment == experiment]


def title_of(experiment: str) -> str:
    """Return the title of an experiment, or its name with spaces if its subject defines no title."""
    subject = subject_of(experiment)
    titles = getattr(subject.figures, "TITLES", {}) if subject else {}
    return titles.get(experiment, experiment.replace("_", " ").capitalize())


def results_folder(experiment: str) -> str:
    """Return the name of the folder in `benchmarks/` for the tables and figures of an experiment.

    If the experiment belongs to no subject, this is the name of the experiment.
    """
    subject = subject_of(experiment)
    return subject.results_folder if subject else experiment


def draw(name: str, material: Material, **options) -> bytes | None:
    """Draw a figure and return it as PNG.

    Return None if the run has no rows for the figure. Also return None, and print a warning, if the figure needs a refused value,
    which is a value that failed its check or exceeded its limit.

    Args:
        name: name of the figure.
        material: rows and samples of the run.
        options: options of the figure. Figures with `Plot.published` accept `published=True`.

    Raises:
        HyperionError: there is no figure with this name, or the rows do not contain the values that the figure shows.
    """
    plots = all_plots()
    chosen = next((plot for plot in plots if plot.name == name), None)
    if chosen is None:
        raise HyperionError(f"no figure {name!r}", next_step=f"use one of {', '.join(plot.name for plot in plots)}")

    @made_from_rows(f"figure {name!r}")
    def drawn() -> bytes | None:
        with styled():
            figure = chosen.draw(material, **options)
            return None if figure is None else png(figure)

    # A refused value must not prevent the page from being created. Only the figure is omitted, with a warning.
    refused = any(row.is_unexpected and chosen.experiment in (ALL, row.experiment) for row in material.rows)
    try:
        content, why = drawn(), "nothing is left to draw"
    except HyperionError as error:
        if not refused:
            raise
        content, why = None, error.what
    if content is None and refused:
        print(f"WARNING: no figure {name!r}, because it needs a value that was refused ({why})")
    return content


def summary(material: Material) -> Figure | None:
    """Draw a figure with up to four panels: matrix products by size, bandwidth by size, roofline, and language model.

    The label of a curve shows its last value. Dashed lines show limits from data sheets, or losses of n-gram models. Return None
    if the run has rows for fewer than two panels.
    """
    squares = [row for row in measured(gemm_rows(material)) if row.params["m"] == row.params["n"] == row.params["k"]]
    products = [row for row in squares if row.params.get("cache") != "hot"]
    streams = [r for r in measured(material.of("bandwidth", metric="bandwidth_gb_s")) if r.params.get("cache") != "hot"]
    epochs = [row for row in epoch_rows(material, "language_model") if row.metric == "validation_loss"]
    wanted = [
        (_draw_products, products),
        (_draw_streams, streams),
        (_draw_roofline, products + streams if products and streams else []),
        (lambda axes, rows: _draw_losses(axes, rows, material), epochs),
    ]
    present = [(panel, rows) for panel, rows in wanted if rows]
    if len(present) < 2:
        return None
    lines = math.ceil(len(present) / 2)
    machine = material.machine(present[0][1][0].experiment)
    figure, panels = new_figure("Measured, with its limits", machine, 2, lines=lines, width=10.4, height=0.6 + 2.75 * lines)
    for axes, (panel, rows) in zip(panels, present, strict=False):
        panel(axes, rows)
        axes.title.set_fontsize(_LETTERING + 0.5)
        for label in (axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()):
            label.set_fontsize(_LETTERING - 1)
    for axes in panels[len(present) :]:
        axes.remove()
    add_notes(figure, _note_of_images(material), size=_LETTERING - 1)
    return figure


def _draw_products(axes: Axes, rows: list[Row]) -> None:
    sizes = sorted({row.params["m"] for row in rows})
    labels = []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        points = sorted((row for row in rows if row.dtype == dtype), key=lambda row: row.params["m"])
        style = look(dtype)
        axes.plot([sizes.index(p.params["m"]) for p in points], values(points), **style)
        last = points[-1]
        share = "" if last.fraction_of_limit is None else f" · {100 * last.fraction_of_limit:.0f} %"
        labels.append((not_none(last.value), f"{dtype} {number(last.value, 3)}{share}", style["color"]))
    for limit in sorted({row.limit for row in rows if row.limit is not None}):
        names = dict.fromkeys(row.dtype for row in rows if row.limit == limit)
        limit_line(axes, limit, f"{', '.join(names)} limit", look(next(iter(names)))["color"], _LETTERING - 2)
    axes.set(yscale="log", title=f"Matrix products, TFLOPS{_shares(rows)}", xlabel="M = N = K")
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.margins(y=0.12)
    log_ticks(axes.yaxis)
    spread_labels(axes, labels, gap_points=_LETTERING + 2, size=_LETTERING - 1)


def _draw_streams(axes: Axes, rows: list[Row]) -> None:
    labels = []
    for operation in dict.fromkeys(row.variant for row in rows):
        points = sorted((row for row in rows if row.variant == operation), key=lambda row: row.params["elements"])
        style = look(operation)
        axes.plot([p.params["elements"] for p in points], values(points), **style)
        last = points[-1]
        share = "" if last.fraction_of_limit is None else f" · {100 * last.fraction_of_limit:.0f} %"
        labels.append((not_none(last.value), f"{operation} {number(last.value, 3)}{share}", style["color"]))
    for limit in {row.limit for row in rows if row.limit is not None}:
        limit_line(axes, limit, f"limit {number(limit)} GB/s", MUTED, _LETTERING - 2)
    axes.set(xscale="log", title=f"Memory bandwidth, GB/s{_shares(rows)}")
    axes.set_xlabel(f"elements per array, {rows[0].dtype}")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: items(value))
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    spread_labels(axes, labels, gap_points=_LETTERING + 2, size=_LETTERING - 1)


def _draw_roofline(axes: Axes, rows: list[Row]) -> None:
    products = [row for row in rows if row.metric == "gemm_tflops"]
    streams = [row for row in rows if row.metric == "bandwidth_gb_s"]
    largest = max(row.params["elements"] for row in streams)
    streams = [row for row in streams if row.params["elements"] == largest]
    slope = max(values(streams))
    ends, labels = (0.05, 2 * max(gemm_intensity(row) for row in products)), []
    for dtype in dict.fromkeys(row.dtype for row in products):
        points = [row for row in products if row.dtype == dtype]
        top, style = max(values(points)), look(dtype)
        axes.plot([top * 1e3 / slope, ends[1]], [top, top], color=style["color"])
        axes.plot([gemm_intensity(p) for p in points], values(points), linestyle="none", **style)
        labels.append((top, f"{dtype} ridge {number(top * 1e3 / slope, 3)}", style["color"]))
    highest = max(values(products))
    axes.plot([ends[0], highest * 1e3 / slope], [ends[0] * slope / 1e3, highest], color=INK)
    for row in filter(stream_intensity, streams):
        x = stream_intensity(row)
        axes.plot([x], [not_none(row.value) * x / 1e3], linestyle="none", markerfacecolor="none", **look(row.variant))
    middle = math.sqrt(0.2 * highest * 1e3 / slope)
    write_at(axes, f"{number(slope)} GB/s", (middle, middle * slope / 1e3), (-6, 3), ha="right", fontsize=_LETTERING - 1)
    axes.set(xscale="log", yscale="log", xlim=ends, title="Roofline as measured, TFLOPS", xlabel="FLOP per byte")
    log_ticks(axes.xaxis)
    log_ticks(axes.yaxis)
    spread_labels(axes, labels, gap_points=_LETTERING + 2, size=_LETTERING - 1)


def _draw_losses(axes: Axes, epochs: list[Row], material: Material) -> None:
    samples = material.samples("language_model")
    steps = samples.query("kind == 'step'").sort_values("step")
    if "seed" in steps:
        steps = steps.query("seed == seed.min()")
    window = max(1, len(steps) // _STEPS_DRAWN)
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
        limit_line(axes, last.limit, "floor", MUTED, _LETTERING - 2)
    source = f", data {last.data_source}" if last.data_source else ""
    axes.set(title=f"Language model, nats per token{source}", xlabel="optimizer step")
    spread_labels(axes, labels, gap_points=_LETTERING + 2, size=_LETTERING - 1)


def _shares(rows: list[Row]) -> str:
    return " · % of limit" if any(row.fraction_of_limit is not None for row in rows) else ""


def _note_of_images(material: Material) -> list[str]:
    """Return a list with one sentence about the image classifier, which has no panel, or an empty list without results."""
    rows = measured(material.of("image_classifier"))
    tested = next((r for r in rows if r.metric == "accuracy" and r.params.get("split") == "test"), None)
    steady = next((r for r in rows if r.metric == "images_per_s" and r.params.get("step") == "steady"), None)
    if tested is None:
        return []
    speed = f", {number(steady.value, 3)} images/s in a steady step" if steady else ""
    text = f"{tested.variant}: {percent(tested.value)} % of the test images (data {tested.data_source}){speed}."
    return [f"{text} {material.image_caveat}".strip()]


def predictions(material: Material) -> Figure | None:
    """Draw a marker for each prediction, with the measured value on the x-axis and the optimism on the y-axis.

    The optimism of an exact prediction is 1. It is above 1 if the prediction was too optimistic. Return None if the run has no
    predictions.
    """
    known = scored(material.rows)
    ceilings = [row for row in known if (p := material.prediction(row)) is not None and p.is_ceiling]
    rows = [row for row in known if row not in ceilings]
    if not rows:
        return None
    metrics = list(dict.fromkeys(row.metric for row in rows))
    height = max(4.2, 1.0 + 0.2 * len(metrics))  # the legend has one line for each metric
    figure, (axes,) = new_figure("Predictions scored", material.machine(rows[0].experiment), width=9.2, height=height)
    axes.axhspan(0.8, 1.25, color=GRID, linewidth=0, zorder=0.5)
    axes.axhline(1, color=INK, linewidth=1)
    for position, metric in enumerate(metrics):
        points = [row for row in rows if row.metric == metric]
        x, y = values(points), [_optimism(row, not_none(row.predicted)) for row in points]
        axes.plot(x, y, linestyle="none", alpha=0.75, label=_label(points[0]), **look(metric, position))
    guesses = _guesses(material.predictions, known)
    if guesses:
        axes.plot(*zip(*guesses, strict=True), linestyle="none", marker="*", markersize=11, color=INK, label="reader's guess")
    axes.set(xscale="log", yscale="log", xlabel="measured, each in its unit", ylabel="optimism of the prediction")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.45), max(high, 2.2))
    log_ticks(axes.yaxis)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    add_notes(figure, [_NOTE])
    return figure


def scored(rows: list[Row]) -> list[Row]:
    """Return the rows that have a positive value and a positive prediction, so that their ratio can be drawn."""
    return [row for row in rows if row.predicted and row.value and row.predicted > 0 and row.value > 0]


def _optimism(row: Row, predicted: float) -> float:
    """Return the optimism of a prediction, which is above 1 if the prediction was too optimistic.

    It is measured / predicted if lower values of the metric are better, and predicted / measured otherwise.
    """
    value = not_none(row.value)
    return value / predicted if row.definition.direction == "lower" else predicted / value


def _label(row: Row) -> str:
    unit = "" if row.unit in ("1", "fraction") else f" [{row.unit}]"
    return f"{row.metric}{unit}{_ARROWS[row.definition.direction]}"


def _guesses(written: list[Prediction], rows: list[Row]) -> list[tuple[float, float]]:
    """Return (measured value, optimism) for each guess of the reader."""

    def key(entry: Prediction | Row) -> tuple:
        return (entry.experiment, entry.variant, entry.dtype, entry.metric, sorted(entry.params.items()))

    keyed = [(key(row), row) for row in rows]
    return [
        (not_none(row.value), _optimism(row, p.guess)) for p in written if p.guess for row_key, row in keyed if row_key == key(p)
    ]


_OF_THE_RUN = (
    Plot(
        "summary",
        ALL,
        "Summary of the run: rates and their limits, the measured roofline, and the loss of the language model compared with "
        "n-gram models.",
        summary,
    ),
    Plot("predictions", ALL, "Optimism of each prediction. An exact prediction has the value 1.", predictions),
)
