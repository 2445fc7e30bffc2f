"""The outline of a run, shared by the report and the reference page: sections, missing values, environment."""

from dataclasses import dataclass, field

import pandas as pd

from hyperion.book.plots import draw, plots_of, results_folder, title_of
from hyperion.figures.material import ALL, Material, Plot, device_name, made_from_rows, replayed_from
from hyperion.figures.tables import tables_of
from hyperion.results import StoreError

SUMMARY = "benchmarks/summary.png"


@dataclass(frozen=True)
class Picture:
    """A figure of a section: its path in the run, its caption, its PNG bytes."""

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
    """Return the warnings about a run: replayed from another machine, synthetic data. "" without any."""
    parts = []
    if material.replayed:
        parts.append(f"Replay: measured on {', '.join(material.replayed)} and shown again, not measured on this machine.")
    if "synthetic" in material.data_sources:
        parts.append("Synthetic data: made by code, not WikiText-2 or CIFAR-10; losses and accuracies say nothing about them.")
    return " ".join(parts)


@made_from_rows("the sections")
def sections(material: Material) -> list[Section]:
    """Return one section for each experiment in the order of the rows, then the scored predictions."""
    found = [_section(material, experiment) for experiment in dict.fromkeys(e for _, e in material.experiments)]
    scored = [picture for picture in _pictures(material, ALL) if picture.path != SUMMARY]
    return found + ([Section("predictions", "Predictions scored", scored, [])] if scored else [])


def summary(material: Material) -> Picture | None:
    """Return the summary figure, None when the run has too few results for one."""
    return next((picture for picture in _pictures(material, ALL) if picture.path == SUMMARY), None)


@made_from_rows("the table of what is missing")
def missing(material: Material) -> pd.DataFrame:
    """Return values and limits that are missing, one line for each reason: columns experiment, what, missing, reason."""
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
    """Return device, versions and source of the measurements, one column for each environment."""
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
    """Group the run's experiments by environment, profile and seed."""
    groups: dict[tuple, list[tuple[str, str]]] = {}
    for pair in material.experiments:
        provenance = _provenance(material, pair)
        key = (replayed_from(material.run, *pair), *(provenance.get(name) for name in ("environment", "profile", "seed")))
        groups.setdefault(key, []).append(pair)
    return list(groups.values())


def _provenance(material: Material, pair: tuple[str, str]) -> dict:
    return (material.run.finished(*pair) or {}).get("provenance") or {}


def _lines(material: Material, experiments: list[tuple[str, str]]) -> dict:
    """Return the properties of an environment by name. Without provenance of the experiment they come from run.json."""
    here = not any(replayed_from(material.run, *pair) for pair in experiments)
    provenance = material.information if here else {}
    provenance = provenance | (_provenance(material, experiments[0]) if experiments else {})
    stored = provenance.get("environment") or {}
    if isinstance(stored, str):
        if stored not in material.environments:
            raise StoreError(
                f"the environment {stored!r:.40} of {'/'.join(experiments[0])} is not stored",
                where=material.run.folder,
                next_step="check the run: hyperion verify",
            )
        stored = material.environments[stored]
    source = stored.get("source") or {}
    packages = ", ".join(f"{name} {version}" for name, version in sorted((stored.get("packages") or {}).items()))
    changed = {True: ", with local changes", False: "", None: ", unknown whether changed"}[source.get("modified")]
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


def picture_path(experiment: str, name: str) -> str:
    """Return the path of a figure in its run: in its subject's folder, the summary above all of them."""
    if experiment == ALL:
        return SUMMARY if name == "summary" else f"benchmarks/{name}/{name}.png"
    return f"benchmarks/{results_folder(experiment)}/{name}.png"


def picture(plot: Plot, material: Material) -> bytes | None:
    """Return the PNG bytes of a figure, drawn once for a material; None when there is nothing to draw."""
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
