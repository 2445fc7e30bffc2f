"""Content that the report and the reference page of a run share: sections, headlines, missing values and environment."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace

import pandas as pd

from hyperion.book.plots import draw, plots_of, results_folder, title_of
from hyperion.errors import not_none
from hyperion.figures.material import (
    ACCURACIES,
    ALL,
    Material,
    Plot,
    device_name,
    interval,
    made_from_rows,
    measured,
    quoted_value,
)
from hyperion.figures.tables import is_floor, tables_of
from hyperion.results import Row, StoreError

SUMMARY = "benchmarks/summary.png"
# Note below the headlines of a run, because readers quote them.
ONE_LAUNCH = (
    "Each value was measured in one launch of the program. The interval contains the variation within this launch only: another "
    "launch, or another host, can differ by more. The interval of a mean over seeds contains the variation between the seeds. "
    "This also holds for the figures. docs/headlines.md lists the values that at least five launches measured."
)
# Tables with more lines are collapsed, so that the pictures are close to each other on the page.
UNFOLDED_LINES = 12
_REFERENCE_STEPS = ("model_steps", "batch_scaling")
_BASELINES, _RATES = ("language_model", "image_classifier"), ("tokens_per_s", "images_per_s")
# Experiments that compare this library's loop with plain loops, and the unit of their batch sizes in a label.
_COMPARED = {"image_training_speed": "", "language_training_speed": " tokens"}
# For each baseline, as (experiment, metric): the name of its measure of quality, and the split on which it is measured.
_REACHED = {
    ("language_model", "perplexity_token"): ("perplexity per token", "valid"),
    ("language_model", "perplexity_word"): ("perplexity per word", "valid"),
    ("image_classifier", "accuracy"): ("accuracy", "test"),
}


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
    """

    experiment: str
    title: str
    pictures: list[DrawnFigure]
    tables: list[tuple[str, pd.DataFrame]]


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
    return found + ([Section("predictions", "Predictions scored", scored, [])] if scored else [])


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
    """Return a figure as PNG, or None if the run has no rows for it. A figure that has already been drawn is reused."""
    if plot.name not in material.drawn:
        material.drawn[plot.name] = draw(plot.name, material)
    return material.drawn[plot.name]


def _section(material: Material, experiment: str) -> Section:
    machines = {material.replayed_from(*pair) for pair in material.experiments if pair[1] == experiment} - {""}
    replayed = f" (replayed from {', '.join(sorted(machines))})" if machines else ""
    title, rows = title_of(experiment) + replayed, material.of(experiment)
    tables = tables_of(rows, material.steadiness, material.image_caveat, material.prediction)
    return Section(experiment, title, _pictures(material, experiment), tables)


def _pictures(material: Material, experiment: str) -> list[DrawnFigure]:
    drawn = [(plot, picture(plot, material)) for plot in plots_of(experiment)]
    return [DrawnFigure(picture_path(experiment, plot.name), plot.caption, content) for plot, content in drawn if content]


@dataclass(frozen=True)
class Headline:
    """One number of the headline table.

    Args:
        label: name of the quantity.
        value: the formatted value with its unit.
        interval: the formatted 95 % interval within one launch, in the unit of the row. "" if there is no interval.
        steady: "yes" if the samples were steady. "" if the value does not come from a timing.
        fraction: value divided by its limit. None if there is no limit.
        limit: the limit with its unit, or the reason why there is no limit.
        row: the row that contains the value.
    """

    label: str
    value: str
    interval: str
    steady: str
    fraction: float | None
    limit: str
    row: Row = field(repr=False)


@made_from_rows("the headlines")
def headlines(material: Material) -> list[Headline]:
    """Return the most important values of a run (its headlines), in the order of the chapters.

    Examples are the rate of the fastest matrix product in each format, and the accuracy or the perplexity of each baseline. A
    value is omitted if its samples were not steady, or if the host, and not the device, limited the time.
    """

    def is_steady(row: Row) -> bool:
        return not material.steadiness(row).startswith("no")

    cold = [row for row in measured(material.rows) if not row.hot]
    rows = [row for row in cold if is_steady(row)]
    # If the fastest step of a model was not steady, it is omitted and not replaced by a slower steady step, because a step with
    # another batch size or format is not comparable.
    found = [
        *_hardware(rows, cold),
        *((label, row) for label, row in _steps(cold) if is_steady(row)),
        *_links(rows),
        *_baselines(rows),
    ]
    found += [*_precise(rows), *_parity(rows), *_scaled(rows)]
    mark = f" ({material.image_caveat.partition(':')[0].lower()})" if material.image_caveat else ""
    marked = [(label + mark if row.metric in ACCURACIES else label, row) for label, row in found]
    return [_headline(label, row, material.steadiness(row)) for label, row in marked]


def _hardware(rows: list[Row], cold: list[Row]) -> Iterator[tuple[str, Row]]:
    """Yield (label, row) for the fastest matrix product of each dtype and for the copy of the largest arrays.

    Args:
        rows: the rows whose samples were steady.
        cold: all rows with cold caches, which determine the size of the largest arrays.
    """
    # The row of the fastest product found repeats a finalist, and the samples with the steadiness are stored for the finalist.
    products = [
        r for r in rows if r.metric == "gemm_tflops" and r.variant != "fastest found" and "plain_loop_calls" not in r.params
    ]
    copies = [r for r in rows if (r.experiment, r.metric, r.variant) == ("bandwidth", "bandwidth_gb_s", "copy")]
    largest = max((r.params["elements"] for r in cold if (r.experiment, r.variant) == ("bandwidth", "copy")), default=0)
    yield from ((f"matrix product, {r.dtype}, cold caches", r) for r in _best(products, lambda r: r.dtype))
    # Only the largest arrays are used, because smaller ones may come from a cache.
    yield from ((f"memory copy, {r.dtype}, largest arrays", r) for r in copies if r.params["elements"] == largest)


def _steps(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    """Yield (label, row) for the fastest step of each reference model of chapter 1.2, over all formats and batch sizes."""
    steps = [r for r in rows if r.experiment in _REFERENCE_STEPS]
    chosen = [r for r in steps if r.metric == "samples_per_s"]
    for row in (r for r in _best(chosen, lambda r: r.variant) if not _is_host_bound(r, steps)):
        compiled = ", compiled" if row.params.get("mode") == "compiled" else ""
        yield f"{row.variant}, training, {row.dtype}{compiled}, batch {row.params['batch']:,}", row


def _is_host_bound(rate: Row, steps: list[Row]) -> bool:
    """Return True if the host, and not the device, limits the time of a step.

    This is assumed if another step with at most a quarter of the batch size takes more than half of the time. The device would
    need about a quarter of the time or less for it, while the host needs the same time for both, because it launches the same
    kernels.
    """

    def kind(row: Row) -> tuple:
        return row.variant, row.dtype, row.params.get("mode"), row.params.get("channels_last")

    times = {r.params["batch"]: not_none(r.value) for r in steps if r.metric == "step_time_s" and kind(r) == kind(rate)}
    batch = rate.params["batch"]
    return batch in times and any(times[b] > times[batch] / 2 for b in times if b <= batch / 4)


def _links(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    chosen = [r for r in rows if (r.metric, r.variant) == ("busbw_gb_s", "all_reduce")]
    yield from ((f"all-reduce over {r.params['ranks']} devices", r) for r in _best(chosen, lambda r: r.params["ranks"]))


def _baselines(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    """Yield (label, row) for the quality of each baseline model and for the speed of its training steps.

    The quality is the perplexity or the accuracy. If several seeds were trained, it is the mean over the seeds.
    """
    averaged = {(row.variant, row.metric) for row in rows if "seeds" in row.params}
    for row in rows:
        what, split = _REACHED.get((row.experiment, row.metric), ("", ""))
        if what and row.params.get("split") == f"{split}, mean of seeds":
            yield f"{row.variant}, {what}, {split} split, mean of {row.params['seeds']} seeds", row
        elif what and row.params.get("split") == split and (row.variant, row.metric) not in averaged:
            yield f"{row.variant}, {what}, {split} split", row
        elif row.experiment in _BASELINES and row.metric in _RATES and row.params.get("step") == "steady":
            batch = f"{row.params['batch']:,}{' tokens' if row.metric == 'tokens_per_s' else ''}"
            yield f"{row.variant}, steady training step, {row.dtype}, batch {batch}", row
        elif row.experiment in _COMPARED and row.metric == "speedup" and "rung" not in row.params:
            yield from _over_a_plain_loop(row)


def _over_a_plain_loop(row: Row) -> Iterator[tuple[str, Row]]:
    """Yield (label, row) for the speed-up of this library's loop over a plain loop, if the host does not limit the plain loop."""
    unit = _COMPARED[row.experiment]
    label = f"{row.variant}, training, batch {row.params['batch']:,}{unit}"
    if row.params.get("over") == "plain, captured":
        yield f"{label}: over the same plain loop in a graph", row
    elif unit:  # not for images, because the host limits their plain loop, and the ratio depends on the host
        compiled = " compiled" if row.params.get("plain_compiled", row.params["compiled"]) else ""
        yield f"{label}: over a plain{compiled} loop", row


def _precise(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    """Yield (label, row) for the speed-ups of the fastest number format in each training of chapter 2.3.

    The speed-ups are over TF32 and over IEEE fp32. Both are needed because PyTorch computes convolutions in TF32 by default, so
    the speed-up over IEEE fp32 alone could be misunderstood.
    """
    ratios = [r for r in rows if (r.experiment, r.metric) == ("precision_variants", "speedup")]
    for row in _best(ratios, lambda r: r.variant):
        tf32 = next((r for r in ratios if r.variant == row.variant and r.dtype == "tf32" and r is not row), None)
        if tf32 is not None:
            ratio = not_none(row.value) / not_none(tf32.value)
            over_tf32 = replace(row, value=ratio, ci_low=None, ci_high=None, params=row.params | {"over": "tf32"})
            yield f"{row.variant}, training: {row.dtype} over tf32", over_tf32
        over = "IEEE fp32, TF32 off" if row.params["over"] == "fp32" else row.params["over"]
        yield f"{row.variant}, training: {row.dtype} over {over}", row


def _parity(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    for row in rows:
        # On one rank, both trainings are on one device, so their difference says nothing about parallel training.
        if (row.experiment, row.metric) == ("parallel_parity", "relative_difference") and row.params["ranks"] > 1:
            yield f"{row.variant.upper()} on {row.params['ranks']} ranks: loss apart from one device's", row


def _scaled(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    """Yield (label, row) for the efficiencies of each training on the largest number of devices: first weak, then strong scaling.

    Both are needed. In weak scaling, the work grows with the number of devices while the communication stays the same, so its
    efficiency is usually higher.
    """
    cells = [r for r in rows if r.metric == "scaling_efficiency"]
    most = max((r.params["ranks"] for r in cells), default=0)
    largest = [r for r in cells if r.params["ranks"] == most]
    order = list(dict.fromkeys(r.variant for r in largest))
    for row in sorted(largest, key=lambda r: (order.index(r.variant), r.params["mode"] != "weak")):
        name = f"{row.params['model']}, {row.params['strategy'].upper()}"
        yield f"{name}: {row.params['mode']} scaling to {most} devices", row


def _best(
    rows: list[Row], kind: Callable[[Row], Hashable], score: Callable[[Row], float] = lambda row: not_none(row.value)
) -> list[Row]:
    """Return the row with the highest score of each kind. The kinds are in the order in which they occur.

    Args:
        rows: the rows.
        kind: function that returns the kind of a row.
        score: function that returns the score of a row; default: the value of the row.
    """
    kinds = dict.fromkeys(kind(row) for row in rows)
    return [max((row for row in rows if kind(row) == one), key=score) for one in kinds]


def _headline(label: str, row: Row, steady: str) -> Headline:
    if row.limit is None:
        limit = row.limit_source.partition("; ")[0]
    else:
        limit = f"{'floor' if is_floor(row) else 'limit'} {quoted_value(row.limit, row.unit)}"
    fraction = None if is_floor(row) else row.fraction_of_limit
    scale = 100 if row.unit == "fraction" else 1  # as in `quoted_value`
    ends = [None if end is None else scale * end for end in (row.value, row.ci_low, row.ci_high)]
    bounds = interval(*ends) if row.ci_low != row.ci_high else ""
    return Headline(label, quoted_value(not_none(row.value), row.unit), bounds, steady, fraction, limit, row)
