"""All figures of the book: the figures of the subjects, and two figures about a whole run, the summary and the predictions."""

import functools
import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from hyperion.chapter.subjects import Subject, subject_of, subjects, subjects_of
from hyperion.errors import HyperionError, nearest_first, not_none
from hyperion.figures.material import ALL, Material, Plot, made_from_rows, values
from hyperion.figures.style import GRID, INK, SUMMARY_LETTERING, add_notes, log_ticks, look, new_figure, png, styled
from hyperion.results import Prediction, Row

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
        HyperionError: two figures have the same name, or PLOTS of a subject is no tuple of figures of experiments.
    """
    experiments = {name for subject in subjects() for name in _experiments_of(subject)}
    of_subjects = [plot for subject in subjects() for plot in _plots_of_subject(subject, experiments)]
    plots = [_OF_THE_RUN[0], *of_subjects, *_OF_THE_RUN[1:]]
    names = [plot.name for plot in plots]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise HyperionError(
            f"two figures are called {', '.join(map(repr, sorted(twice)))}",
            next_step="rename one of the two figures in the figures.py of its subject, of hyperion/experiments or your own",
        )
    return plots


@functools.cache
def _experiments_of(subject: Subject) -> tuple[str, ...]:
    """Return `subject.experiments`. The result is cached, because it needs the text of all modules."""
    return tuple(subject.experiments)


def _plots_of_subject(subject: Subject, experiments: set[str]) -> tuple[Plot, ...]:
    """Return the figures of a subject. A figure of an unknown experiment would never be drawn, so it is an error."""
    plots = getattr(subject.figures, "PLOTS", ())
    if not isinstance(plots, tuple | list) or not all(isinstance(plot, Plot) for plot in plots):
        fault, remedy = f"PLOTS is {plots!r:.80}, not a tuple of Plot", "write PLOTS = (Plot(…),), with the comma"
    elif unknown := [plot for plot in plots if plot.experiment not in experiments | {ALL}]:
        fault = f"the figure {unknown[0].name!r} in PLOTS belongs to {unknown[0].experiment!r}, which is no experiment"
        own = nearest_first(unknown[0].experiment, subject.experiments)
        remedy = f"use the name of a module with an EXPERIMENT: {own or 'this subject has none'}"
    else:
        return tuple(plots)
    raise HyperionError(fault, where=subject.folder / "figures.py", next_step=remedy)


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
        known = [plot.name for plot in plots]
        raise HyperionError(f"no figure {name!r}", next_step=f"use one of {nearest_first(name, known)}")

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
    """Draw the panels that the subjects propose: matrix products and bandwidth by size, the roofline, and the language model.

    The label of a curve shows its last value. Dashed lines show limits from data sheets, or losses of n-gram models. Return None
    if the run has rows for fewer than two panels.
    """
    order = [subject.figures for subject in subjects_of(experiment for _, experiment in material.experiments)]
    panels = [panel for figures in order for panel in getattr(figures, "summary_panels", _none)(material)]
    notes = [note for figures in order for note in getattr(figures, "summary_notes", _none)(material)]
    if len(panels) < 2:
        return None
    lines = math.ceil(len(panels) / 2)
    machine = material.machine(panels[0].experiment)
    figure, places = new_figure("Measured, with its limits", machine, 2, lines=lines, width=10.4, height=0.6 + 2.75 * lines)
    for axes, panel in zip(places, panels, strict=False):
        panel.draw(axes)
        axes.title.set_fontsize(SUMMARY_LETTERING + 0.5)
        for label in (axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()):
            label.set_fontsize(SUMMARY_LETTERING - 1)
    for axes in places[len(panels) :]:
        axes.remove()
    add_notes(figure, notes, size=SUMMARY_LETTERING - 1)
    return figure


def _none(material: Material) -> tuple[()]:
    return ()


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
    low, high = axes.get_xlim()
    if high < 200 * low:  # else powers of ten, because plain numbers of very different sizes are hard to read
        log_ticks(axes.xaxis)
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


def _guesses(written: Sequence[Prediction], rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Return (measured value, optimism) for each guess of the reader. All rows have a value."""
    guesses = []
    for place in dict.fromkeys((row.notebook, row.experiment) for row in rows):
        first, row, _ = guessed_row(written, [row for row in rows if (row.notebook, row.experiment) == place])
        if first is not None and row is not None and first.guess:
            guesses.append((not_none(row.value), _optimism(row, first.guess)))
    return guesses


def guessed_row(predictions: Sequence[Prediction], rows: Sequence[Row]) -> tuple[Prediction | None, Row | None, int]:
    """Return the prediction that the reader of an experiment guesses, and the row that answers it.

    If the prediction applies to several rows, the row with the largest value answers it.

    Args:
        predictions: the predictions of a run. The reader guesses the first prediction of an experiment.
        rows: rows of one experiment.

    Returns:
        The prediction, the row, and the number of rows to which the prediction applies. If nothing was predicted, or no row
        answers it, the row is None.
    """
    stored = [p for p in predictions if (p.notebook, p.experiment) == (rows[0].notebook, rows[0].experiment)]
    # If the inputs of an experiment have changed, the run has older and newer predictions, and only the newest ones apply. The
    # first of them is the one that the reader guesses.
    first = next((p for p in stored if p.input_hash == stored[-1].input_hash), None)
    found = [row for row in rows if first and first.predicts(row)]
    if first is None or not found:
        return first, None, 0
    # Some rows have exactly the params of the prediction, and other rows have more. The reader guesses the former.
    found = [row for row in found if row.params == first.params] or found
    return first, max(found, key=lambda row: -math.inf if row.value is None else row.value), len(found)


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
