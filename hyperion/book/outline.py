"""A run told in order, for the report and the reference page alike: sections, what is missing, environment."""

from dataclasses import dataclass, field

import pandas as pd

from hyperion.book.plots import draw, plots_of, results_folder, title_of
from hyperion.figures.material import Material, device_name, made_from_rows, replayed_from
from hyperion.figures.plot import ALL, Plot
from hyperion.figures.tables import tables_of
from hyperion.results import StoreError

SUMMARY = "benchmarks/summary.png"


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


def banner(material: Material) -> str:
    """What a reader must know before believing a number: replayed from elsewhere, or made of synthetic data; else ""."""
    parts = []
    if material.replayed:
        parts.append(f"Replay: measured on {', '.join(material.replayed)} and shown again, not measured on this machine.")
    if "synthetic" in material.data_sources:
        parts.append("Synthetic data: made by code, not WikiText-2 or CIFAR-10; losses and accuracies say nothing about them.")
    return " ".join(parts)


@made_from_rows("the sections")
def sections(material: Material) -> list[Section]:
    """Every experiment in the order of the rows, the scored predictions last."""
    told = [_section(material, experiment) for experiment in dict.fromkeys(e for _, e in material.experiments)]
    scored = [picture for picture in _pictures(material, ALL) if picture.path != SUMMARY]
    return told + ([Section("predictions", "Predictions scored", scored, [])] if scored else [])


def summary(material: Material) -> Picture | None:
    """The run in one picture, None when it holds too little for one."""
    return next((picture for picture in _pictures(material, ALL) if picture.path == SUMMARY), None)


@made_from_rows("the table of what is missing")
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


@made_from_rows("the table of environments")
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
    names = dict.fromkeys(name for lines in columns.values() for name, value in lines.items() if value not in (None, ""))
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
    kept = told.get("environment") or {}
    if isinstance(kept, str):
        if kept not in material.environments:
            raise StoreError(
                f"no environment {kept!r:.40} is stored, in which {'/'.join(experiments[0])} was measured",
                where=material.run.folder,
                next_step="check the run: hyperion verify",
            )
        kept = material.environments[kept]
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
        "collective settings": ", ".join(f"{k}={v}" for k, v in (kept.get("collective_settings") or {}).items()),
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
    return f"benchmarks/{results_folder(experiment)}/{name}.png"


def picture(plot: Plot, material: Material) -> bytes | None:
    """PNG bytes of a figure as pages and folders hold it, drawn once for a material; None when there is nothing to draw."""
    if plot.name not in material.drawn:
        material.drawn[plot.name] = draw(plot.name, material)
    return material.drawn[plot.name]


def _section(material: Material, experiment: str) -> Section:
    machines = {replayed_from(material.run, *pair) for pair in material.experiments if pair[1] == experiment} - {""}
    replayed = f" (replayed from {', '.join(sorted(machines))})" if machines else ""
    title = title_of(experiment) + replayed
    return Section(experiment, title, _pictures(material, experiment), tables_of(material.of(experiment)))


def _pictures(material: Material, experiment: str) -> list[Picture]:
    drawn = [(plot, picture(plot, material)) for plot in plots_of(experiment)]
    return [Picture(picture_path(experiment, plot.name), plot.caption, content) for plot, content in drawn if content]
