"""Content that is both in the report and on the reference page of a run: sections, headlines, missing values, environment."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pandas as pd

from hyperion.book.plots import draw, plots_of, results_folder, title_of
from hyperion.chapter.subjects import subjects_of
from hyperion.errors import HyperionError, not_none
from hyperion.figures.material import (
    ACCURACIES,
    ALL,
    Material,
    Plot,
    Quote,
    device_name,
    interval,
    made_from_rows,
    measured,
    quoted_value,
    worst_steadiness,
)
from hyperion.figures.tables import is_floor, tables_of
from hyperion.results import Row, StoreError

SUMMARY = "benchmarks/summary.png"
# `Headline.steady` of a value that was measured while other processes used the CPU cores.
BUSY = "busy"
# Note below the headlines of a run, because readers quote them. `format` puts in how the page names docs/headlines.md.
ONE_LAUNCH = (
    "Each value was measured in one launch of the program. The interval contains the variation within this launch only: another "
    "launch, or another host, can differ by more. The interval of a mean over seeds contains the variation between the seeds. "
    "This also holds for the figures. {} lists the values that at least five launches measured."
)
# Tables with more lines are collapsed, so that the pictures are close to each other on the page.
UNFOLDED_LINES = 12


@dataclass(frozen=True)
class DrawnFigure:
    """A drawn figure.

    Attributes:
        path: path of the PNG file, relative to the folder of the run.
        caption: caption of the figure.
        content: content of the PNG file.
    """

    path: str
    caption: str
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class Section:
    """A section of a page about one experiment.

    Attributes:
        experiment: name of the experiment.
        title: title of the section.
        pictures: figures of the experiment.
        tables: tables of the experiment, as pairs (caption, table).
        sentences: Markdown sentences that explain results of the experiment.
    """

    experiment: str
    title: str
    pictures: list[DrawnFigure]
    tables: list[tuple[str, pd.DataFrame]]
    sentences: list[str]


def banner(material: Material) -> str:
    """Return the warnings about a run as one string, or "" if there are none.

    The warnings say that the run was replayed, that its data are synthetic, or that its images are not the official ones.
    """
    parts = []
    if material.replayed:
        parts.append(f"Replay: measured on {', '.join(material.replayed)}, not on this machine.")
    if "synthetic" in material.data_sources:
        parts.append(
            "Synthetic data: made by code. Losses and accuracies say nothing about the real data sets WikiText-2 and CIFAR-10."
        )
    return " ".join([*parts, *filter(None, [material.image_caveat])])


@made_from_rows("the sections")
def sections(material: Material) -> list[Section]:
    """Return one section per experiment, in the order of the rows, and a section that compares predictions with measurements."""
    found = [_section(material, experiment) for experiment in dict.fromkeys(e for _, e in material.experiments)]
    scored = [picture for picture in _pictures(material, ALL) if picture.path != SUMMARY]
    return found + ([Section("predictions", "Predictions scored", scored, [], [])] if scored else [])


def summary(material: Material) -> DrawnFigure | None:
    """Return the summary figure, or None if the run has too few results for it."""
    return next((picture for picture in _pictures(material, ALL) if picture.path == SUMMARY), None)


@made_from_rows("the table of what is missing")
def missing(material: Material) -> pd.DataFrame:
    """Return a table of missing values and missing limits, with one line for each reason.

    The columns are experiment, what, missing and reason.
    """
    lines: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in material.rows:
        name = " ".join(part for part in (row.variant, row.dtype, row.metric) if part)
        if row.value is None:
            lines.setdefault((row.experiment, "value", row.value_reason), {})[name] = None
        elif row.limit is None and row.limit_source:
            reason = row.limit_source.removeprefix("no limit: ")
            lines.setdefault((row.experiment, "limit", reason), {})[name] = None
    return pd.DataFrame(
        [
            {"experiment": experiment, "what": ", ".join(names), "missing": kind, "reason": reason}
            for (experiment, kind, reason), names in lines.items()
        ],
        columns=["experiment", "what", "missing", "reason"],
    )


@made_from_rows("the table of environments")
def environment(material: Material) -> pd.DataFrame:
    """Return a table of the environments in which the rows were measured, with one column per environment.

    An environment consists of the device, the software versions, and the version of the source code.
    """
    columns = {}
    for experiments in _measured_alike(material):
        machine = material.replayed_from(*experiments[0])
        title = f"of {machine} (replay)" if machine else "of this run"
        columns[f"{title}: {', '.join(e for _, e in experiments)}"] = _lines(material, experiments)
    if len(columns) == 1:
        columns = {title.partition(":")[0]: lines for title, lines in columns.items()}
    columns = columns or {"of this run": _lines(material, [])}
    names = dict.fromkeys(name for lines in columns.values() for name, value in lines.items() if value not in (None, ""))
    shown = [[name, *(_shown(lines.get(name)) for lines in columns.values())] for name in names]
    return pd.DataFrame(shown, columns=["", *columns])


def _shown(value) -> str:
    return "" if value is None else str(value)


def _measured_alike(material: Material) -> list[list[tuple[str, str]]]:
    """Return groups of experiments that were measured with the same environment, profile and seed.

    Each experiment is a pair (notebook, experiment).
    """
    groups: dict[tuple, list[tuple[str, str]]] = {}
    for pair in material.experiments:
        provenance = _provenance(material, pair)
        key = (material.replayed_from(*pair), *(provenance.get(name) for name in ("environment", "profile", "seed")))
        groups.setdefault(key, []).append(pair)
    return list(groups.values())


def _provenance(material: Material, pair: tuple[str, str]) -> dict:
    return material.finished.get("/".join(pair), {}).get("provenance") or {}


def _lines(material: Material, experiments: list[tuple[str, str]]) -> dict:
    """Return a dict that maps a property of the environment, such as the device, to its value for these experiments.

    The values come from the provenance that the first experiment has stored, or from run.json if it has stored none.
    """
    here = not any(material.replayed_from(*pair) for pair in experiments)
    provenance = material.information if here else {}
    provenance = provenance | (_provenance(material, experiments[0]) if experiments else {})
    stored = provenance.get("environment") or {}
    if isinstance(stored, str):
        if stored not in material.environments:
            raise StoreError(
                f"the environment {stored!r:.40} of {'/'.join(experiments[0])} is not stored in the run",
                where=material.run.folder,
                next_step="check the run: hyperion verify",
            )
        stored = material.environments[stored]
    source = stored.get("source") or {}
    packages = ", ".join(f"{name} {version}" for name, version in sorted((stored.get("packages") or {}).items()))
    changed = {True: ", with local changes", False: "", None: ", local changes unknown"}[source.get("modified")]
    sources = sorted({row.data_source for row in material.rows if (row.notebook, row.experiment) in experiments} - {""})
    return {
        "device": device_name({"environment": stored}),
        "devices": len(stored.get("gpus") or []) or "",
        "CPU": (stored.get("cpu") or {}).get("name"),
        "torch": stored.get("torch"),
        "CUDA": stored.get("cuda"),
        "ROCm (HIP)": stored.get("hip"),
        "driver": stored.get("driver"),
        "collectives": stored.get("collectives"),
        "collective settings": ", ".join(f"{k}={v}" for k, v in (stored.get("collective_settings") or {}).items()),
        "Python": stored.get("python"),
        "packages": packages,
        "operating system": " ".join(filter(None, (stored.get("os"), stored.get("kernel")))),
        "profile": provenance.get("profile"),
        "seed": provenance.get("seed"),
        "data source": ", ".join(sources) or "none used",
        "commit": f"{source['commit']}{changed}" if source.get("commit") else None,
        "source sha256": source.get("hash"),
    }


@made_from_rows("the versions of the code")
def versions(material: Material) -> pd.DataFrame:
    """Return a table of the versions of the code that measured a run, with the experiments of each version.

    The rows of a reference run may come from several versions, so a difference between two chapters may be caused by a difference
    between two versions.
    """
    parts: dict[tuple[str, str], list[str]] = {}
    created = (material.information.get("environment") or {}).get("source") or {}
    for pair in material.experiments:
        # Experiments of commands such as `hyperion compare` state no version, so the version that created the run is used. This
        # version does not apply to replayed experiments, which another run measured.
        source = _provenance(material, pair).get("source") or ({} if material.replayed_from(*pair) else created)
        commit = (source.get("commit") or "")[:12] or "not recorded"
        changed = {True: "yes", False: "no", None: "unknown"}[source.get("modified")]
        parts.setdefault((commit, changed), []).append(pair[1])
    return pd.DataFrame(
        [
            {"commit": commit, "local changes": changed, "experiments": ", ".join(names)}
            for (commit, changed), names in parts.items()
        ],
        columns=["commit", "local changes", "experiments"],
    )


def picture_path(experiment: str, name: str) -> str:
    """Return the path of a figure, relative to the folder of the run. Only the summary is not in a subfolder of `benchmarks`."""
    if experiment == ALL:
        return SUMMARY if name == "summary" else f"benchmarks/{name}/{name}.png"
    return f"benchmarks/{results_folder(experiment)}/{name}.png"


def picture(plot: Plot, material: Material) -> bytes | None:
    """Return a figure as PNG, or None if the run has no rows for it. A figure that has already been drawn is reused.

    If the code of the figure raises an exception, the figure is None too, and its error is entered in `material.not_drawn`, so
    that the tables and the other figures can still be written.
    """
    if plot.name not in material.drawn:
        try:
            material.drawn[plot.name] = draw(plot.name, material)
        except HyperionError as error:
            material.drawn[plot.name], material.not_drawn[plot.name] = None, error
    return material.drawn[plot.name]


def _section(material: Material, experiment: str) -> Section:
    machines = {material.replayed_from(*pair) for pair in material.experiments if pair[1] == experiment} - {""}
    replayed = f" (replayed from {', '.join(sorted(machines))})" if machines else ""
    title, rows = title_of(experiment) + replayed, material.of(experiment)
    tables = tables_of(rows, material.steadiness, material.image_caveat, material.prediction)
    explain = [getattr(subject.figures, "explanations", _no_explanations) for subject in subjects_of([experiment])]
    sentences = [text for function in explain for text in function(experiment, measured(material.rows)) if text]
    pictures = _pictures(material, experiment)
    lacking = {plot.name: material.not_drawn.get(plot.name) for plot in plots_of(experiment)}
    sentences += [f"The figure {name!r} is missing: {error.what}." for name, error in lacking.items() if error]
    return Section(experiment, title, pictures, tables, sentences)


def _no_explanations(experiment: str, rows: list[Row]) -> Iterable[str]:
    return ()


def _pictures(material: Material, experiment: str) -> list[DrawnFigure]:
    drawn = [(plot, picture(plot, material)) for plot in plots_of(experiment)]
    return [DrawnFigure(picture_path(experiment, plot.name), plot.caption, content) for plot, content in drawn if content]


@dataclass(frozen=True)
class Headline:
    """One number of the headline table.

    Args:
        quote: the label, the row that contains the value, and what kind of value it is.
        value: the formatted value with its unit.
        interval: the formatted 95 % interval within one launch, in the unit of the row. "" if there is no interval.
        steady: "yes" or `NO_DRIFT` if the samples were steady, "busy" if they were but other processes used the CPU cores,
            "unknown" if the samples do not record it. For a ratio, the times of both sides count. "" if the value does not come
            from a timing.
        fraction: value divided by its limit, for times, rates and ratios. None if there is no limit.
        limit: the limit with its unit, or the reason why there is no limit.
    """

    quote: Quote = field(repr=False)
    value: str
    interval: str
    steady: str
    fraction: float | None
    limit: str

    @property
    def label(self) -> str:
        return self.quote.label

    @property
    def row(self) -> Row:
        return self.quote.row


@made_from_rows("the headlines")
def headlines(material: Material) -> list[Headline]:
    """Return the most important values of a run (its headlines), in the order of the experiments.

    The function `headlines(rows, is_steady)` in the figures.py of a subject proposes values. It gets all rows that have a value
    and were measured with cold caches, and a function that says whether the samples of a row were steady. A value is omitted if
    its samples were not steady, or too few to show a drift. If the samples do not record it, the value is shown as "unknown".
    """

    def is_steady(row: Row) -> bool:
        return not material.steadiness(row).startswith(("no", "unknown ("))

    rows = [row for row in measured(material.rows) if not row.hot]
    mark = f" ({material.image_caveat.partition(':')[0].lower()})" if material.image_caveat else ""
    found = []
    for subject in subjects_of(row.experiment for row in rows):
        for quote in getattr(subject.figures, "headlines", _no_headlines)(rows, is_steady):
            timings = quote.timings or (quote.row,)
            if all(map(is_steady, timings)):
                label = quote.label + mark if quote.row.metric in ACCURACIES else quote.label
                steady = worst_steadiness(map(material.steadiness, timings))
                busy = steady.startswith("yes") and any(row.busy for row in timings)
                found.append(_headline(replace(quote, label=label), BUSY if busy else steady))
    return found


def _no_headlines(rows: list[Row], is_steady: Callable[[Row], bool]) -> Iterable[Quote]:
    return ()


def _headline(quote: Quote, steady: str) -> Headline:
    row = quote.row
    if row.limit is None:
        limit = row.limit_source.partition("; ")[0]
    else:
        limit = f"{'floor' if is_floor(row) else 'limit'} {quoted_value(row.limit, row.unit)}"
    # An accuracy has the limit 1, which is no property of the device, so its share of the limit would only repeat the value.
    fraction = row.fraction_of_limit if quote.kind == "speed" and not is_floor(row) else None
    scale = 100 if row.unit == "fraction" else 1  # as in `quoted_value`
    ends = [None if end is None else scale * end for end in (row.value, row.ci_low, row.ci_high)]
    bounds = interval(*ends) if row.ci_low != row.ci_high else ""
    return Headline(quote, quoted_value(not_none(row.value), row.unit), bounds, steady, fraction, limit)
