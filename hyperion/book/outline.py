"""A run told in order, for the report and the reference page alike: headlines, sections, what is missing, environment."""

from dataclasses import dataclass, field

import pandas as pd

from hyperion.book.display_text import quoted_value
from hyperion.book.machines import device_name, replayed_from
from hyperion.book.material import Material, measured, subject_of
from hyperion.book.plots import ALL, draw, plots_of
from hyperion.book.tables import is_floor, tables_of
from hyperion.results import Row

SUMMARY = "benchmarks/summary.png"
TITLES = {
    "gemm": "Matrix products",
    "bandwidth": "Memory bandwidth",
    "roofline": "Roofline",
    "text_pipeline": "Text",
    "image_pipeline": "Images",
    "leakage": "No look ahead",
    "ngram_baselines": "Counting models",
    "language_model": "Language model",
    "image_classifier": "Image classifier",
}


@dataclass(frozen=True)
class Picture:
    """A figure of a section: where it lies in the run, what to see in it, its PNG bytes."""

    path: str
    caption: str
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class Section:
    """One experiment: its pictures, and (caption, table) pairs."""

    experiment: str
    title: str
    pictures: list[Picture]
    tables: list[tuple[str, pd.DataFrame]]


@dataclass(frozen=True)
class Headline:
    """One number that a reader wants first.

    Args:
        label: what it is.
        value: with its unit.
        fraction: share of the limit, None when there is no limit.
        limit: the limit in words, or why there is none.
    """

    label: str
    value: str
    fraction: float | None
    limit: str


def headlines(material: Material) -> list[Headline]:
    """The best value of each kind that the run holds."""
    rows = [row for row in measured(material.rows) if row.params.get("cache") != "hot"]
    products = [r for r in rows if r.metric == "gemm_tflops" and "plain_loop_calls" not in r.params]
    copies = [r for r in rows if r.metric == "bandwidth_gb_s" and r.variant == "copy"]
    largest = max((r.params["elements"] for r in copies), default=0)
    found = [(f"matrix product, {r.dtype}", r) for r in _best_by_dtype(products)]
    found += [(f"memory copy, {r.dtype}", r) for r in copies if r.params["elements"] == largest]
    found += [("perplexity per token, valid split", r) for r in rows if _trained_perplexity(r)]
    found += [("accuracy, test split", r) for r in rows if r.metric == "accuracy" and r.params.get("split") == "test"]
    found += [(f"{r.variant}, training", r) for r in rows
              if r.metric in ("tokens_per_s", "images_per_s") and r.params.get("step") == "steady"]  # fmt: skip
    return [_headline(label, row) for label, row in found]


def banner(material: Material) -> str:
    """What a reader must know before believing a number: replayed from elsewhere, or made of synthetic data; else ""."""
    parts = []
    if material.replayed:
        parts.append(
            f"Replay: measured on {', '.join(material.replayed)} and shown again, not measured on this machine."
        )
    if "synthetic" in material.data_sources:
        parts.append(
            "Synthetic data: made by code, not WikiText-2 or CIFAR-10; losses and accuracies say nothing about them."
        )
    return " ".join(parts)


def sections(material: Material) -> list[Section]:
    """Every experiment in the order of the rows, the scored predictions last."""
    told = [_section(material, experiment) for experiment in dict.fromkeys(e for _, e in material.experiments)]
    scored = [picture for picture in _pictures(material, ALL) if picture.path != SUMMARY]
    return told + ([Section("predictions", "Predictions scored", scored, [])] if scored else [])


def summary(material: Material) -> Picture | None:
    """The run in one picture, None when it holds too little for one."""
    return next((picture for picture in _pictures(material, ALL) if picture.path == SUMMARY), None)


def missing(material: Material) -> pd.DataFrame:
    """What was skipped, unsupported or without limit, and why: columns experiment, what, missing, reason; one line a reason."""
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


def environment(material: Material) -> pd.DataFrame:
    """Device, versions and source that the experiments were measured with: a column for each way they were."""
    columns = {}
    for experiments in _measured_alike(material):
        machine = replayed_from(material.run, *experiments[0])
        title = f"of {machine} (replay)" if machine else "of this run"
        columns[f"{title}: {', '.join(e for _, e in experiments)}"] = _lines(material, experiments)
    if len(columns) == 1:
        columns = {title.partition(":")[0]: lines for title, lines in columns.items()}
    columns = columns or {"of this run": _lines(material, [])}
    names = dict.fromkeys(
        name for lines in columns.values() for name, value in lines.items() if value not in (None, "")
    )
    shown = [[name, *(_shown(lines.get(name)) for lines in columns.values())] for name in names]
    return pd.DataFrame(shown, columns=["", *columns])


def _shown(value) -> str:
    return "" if value is None else str(value)


def _measured_alike(material: Material) -> list[list[tuple[str, str]]]:
    """The run's experiments, those together that were measured in one environment with one profile and seed."""
    groups: dict[tuple, list[tuple[str, str]]] = {}
    for pair in material.experiments:
        told = _provenance(material, pair)
        key = (replayed_from(material.run, *pair), *(told.get(name) for name in ("environment", "profile", "seed")))
        groups.setdefault(key, []).append(pair)
    return list(groups.values())


def _provenance(material: Material, pair: tuple[str, str]) -> dict:
    return (material.run.finished(*pair) or {}).get("provenance") or {}


def _lines(material: Material, experiments: list[tuple[str, str]]) -> dict:
    """What was measured with what, by name; where an experiment of this machine has no provenance, run.json tells."""
    here = not any(replayed_from(material.run, *pair) for pair in experiments)
    told = material.information if here else {}
    told = told | (_provenance(material, experiments[0]) if experiments else {})
    kept = told.get("environment", {})
    if isinstance(kept, str):
        kept = material.run.environments()[kept]
    source = kept.get("source") or {}
    packages = ", ".join(f"{name} {version}" for name, version in sorted((kept.get("packages") or {}).items()))
    changed = {True: ", with local changes", False: "", None: ", unknown whether changed"}[source.get("modified")]
    sources = sorted({row.data_source for row in material.rows if (row.notebook, row.experiment) in experiments} - {""})
    return {
        "device": device_name({"environment": kept}),
        "devices": len(kept.get("gpus") or []) or "",
        "CPU": (kept.get("cpu") or {}).get("name"),
        "torch": kept.get("torch"),
        "CUDA": kept.get("cuda"),
        "ROCm (HIP)": kept.get("hip"),
        "driver": kept.get("driver"),
        "collectives": kept.get("collectives"),
        "Python": kept.get("python"),
        "packages": packages,
        "operating system": " ".join(filter(None, (kept.get("os"), kept.get("kernel")))),
        "profile": told.get("profile"),
        "seed": told.get("seed"),
        "data source": ", ".join(sources) or "none used",
        "commit": f"{source['commit']}{changed}" if source.get("commit") else None,
        "source sha256": source.get("hash"),
    }


def picture_path(experiment: str, name: str) -> str:
    """Where a figure lies in its run: with its subject, the one that sums up the run above all of them."""
    if experiment == ALL:
        return SUMMARY if name == "summary" else f"benchmarks/{name}/{name}.png"
    return f"benchmarks/{subject_of(experiment)}/{name}.png"


def _section(material: Material, experiment: str) -> Section:
    machines = {replayed_from(material.run, *pair) for pair in material.experiments if pair[1] == experiment} - {""}
    replayed = f" (replayed from {', '.join(sorted(machines))})" if machines else ""
    title = TITLES.get(experiment, experiment.replace("_", " ").capitalize()) + replayed
    return Section(experiment, title, _pictures(material, experiment), tables_of(material.of(experiment)))


def _pictures(material: Material, experiment: str) -> list[Picture]:
    drawn = [(plot, draw(plot.name, material)) for plot in plots_of(experiment)]
    return [Picture(picture_path(experiment, plot.name), plot.caption, content) for plot, content in drawn if content]


def _best_by_dtype(rows: list[Row]) -> list[Row]:
    dtypes = dict.fromkeys(row.dtype for row in rows)
    return [max((row for row in rows if row.dtype == dtype), key=lambda row: row.value) for dtype in dtypes]


def _trained_perplexity(row: Row) -> bool:
    return (
        row.metric == "perplexity_token" and row.experiment == "language_model" and row.params.get("split") == "valid"
    )


def _headline(label: str, row: Row) -> Headline:
    if row.limit is None:
        limit = row.limit_source.partition("; ")[0]
    else:
        limit = f"{'floor' if is_floor(row) else 'limit'} {quoted_value(row.limit, row.unit)}"
    fraction = None if is_floor(row) else row.fraction_of_limit
    return Headline(label, quoted_value(row.value, row.unit), fraction, limit)
