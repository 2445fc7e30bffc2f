"""Every figure of the book by name: those of the subjects, and those that span a run."""

from hyperion.book import run_figures
from hyperion.chapter.subjects import subject_of, subjects
from hyperion.errors import HyperionError
from hyperion.figures.material import ALL, Material, Plot, made_from_rows
from hyperion.figures.style import png, styled

_OF_THE_RUN = (
    Plot(
        "summary",
        ALL,
        "The run at a glance: rates and their limits, the measured roofline, and how much better the language model predicts "
        "than counting does.",
        run_figures.summary,
    ),
    Plot("predictions", ALL, "Predicted values over measured ones.", run_figures.predictions),
)


def all_plots() -> list[Plot]:
    """Return every figure, those of each subject together; `predictions` comes last.

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
            next_step="rename one of them in its subject's figures.py",
        )
    return plots


def plots_of(experiment: str) -> list[Plot]:
    """Return the figures that belong to an experiment."""
    return [plot for plot in all_plots() if plot.experiment == experiment]


def title_of(experiment: str) -> str:
    """Return the title of an experiment: its subject's, else its name."""
    subject = subject_of(experiment)
    titles = getattr(subject.figures, "TITLES", {}) if subject else {}
    return titles.get(experiment, experiment.replace("_", " ").capitalize())


def results_folder(experiment: str) -> str:
    """Return the folder under `benchmarks/` of an experiment's tables and figures; its own name if no subject has it."""
    subject = subject_of(experiment)
    return subject.results_folder if subject else experiment


def draw(name: str, material: Material, **options) -> bytes | None:
    """Draw a figure. Return its PNG, or None when the run has nothing to draw or refused a value it needs (with a warning).

    Args:
        options: passed to the figure: `published=True` where `Plot.published`.

    Raises:
        HyperionError: there is no such figure, or the rows lack what it shows.
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

    # One refused value must not prevent the page, and a missing figure needs a warning.
    refused = any(row.is_unexpected and chosen.experiment in (ALL, row.experiment) for row in material.rows)
    try:
        content, why = drawn(), "nothing is left to draw"
    except HyperionError as error:
        if not refused:
            raise
        content, why = None, error.what
    if content is None and refused:
        print(f"WARNING: no figure {name!r}, which needs a value that was refused ({why})")
    return content
