"""Export a run: CSV, JSON and PNG files of each experiment to benchmarks/<subject>/, and a README.md for sites such as GitHub."""

import json
from collections.abc import Iterable

import pandas as pd

from hyperion.book.outline import (
    ONE_LAUNCH,
    UNFOLDED_LINES,
    DrawnFigure,
    Section,
    banner,
    environment,
    headlines,
    missing,
    picture,
    picture_path,
    sections,
    summary,
    versions,
)
from hyperion.book.plots import all_plots, results_folder
from hyperion.figures.material import ALL, Material, device_name, percent
from hyperion.figures.tables import INTERVAL, markdown, markdown_code, markdown_text
from hyperion.results import Row, Run, rows_to_csv
from hyperion.results.execution import unexpected_in
from hyperion.results.rows import COLUMNS

README = "README.md"


def export_run(run: Run, material: Material | None = None) -> list[str]:
    """Write the tables and figures of a run to its folder `benchmarks`.

    The tables are benchmarks/<subject>/<experiment>.csv and .json, which contain the same rows. Equal rows and samples give files
    that are equal in every byte.

    Args:
        run: the run.
        material: rows, samples and figures of the run that have already been read or drawn, for reuse. None reads the run.

    Returns:
        The paths of the written files, relative to the folder of the run. Figures that cannot be drawn are left out;
        `material.not_drawn` has their errors.
    """
    material = material or Material(run)
    contents = tables(material) | pictures(material)
    run.write(contents)
    return sorted(contents)


def tables(material: Material) -> dict[str, bytes]:
    """Return the CSV file and the JSON file of every experiment, as {path: content}."""
    contents = {}
    for experiment in dict.fromkeys(name for _, name in material.experiments):
        rows = material.of(experiment)
        stem = f"benchmarks/{results_folder(experiment)}/{experiment}"
        contents[f"{stem}.csv"] = rows_to_csv(rows).encode()
        contents[f"{stem}.json"] = rows_to_json(rows).encode()
    return contents


def pictures(material: Material) -> dict[str, bytes]:
    """Return the PNG file of every figure for which the run has rows, as {path: content}."""
    present = {name for _, name in material.experiments} | {ALL}
    drawn = {plot: picture(plot, material) for plot in all_plots() if plot.experiment in present}
    return {picture_path(plot.experiment, plot.name): content for plot, content in drawn.items() if content}


def rows_to_json(rows: list[Row]) -> str:
    """Return the rows as a JSON list of objects with the columns of rows.csv."""
    lines = [{column: getattr(row, column) for column in COLUMNS} for row in rows]
    return json.dumps(lines, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def reference_readme(run: Run, material: Material | None = None, remark: str = "") -> dict[str, bytes]:
    """Return the README.md of a run and the pictures that it shows, as {path relative to the folder of the run: content}.

    Args:
        run: the run.
        material: rows, samples and figures of the run that have already been read or drawn, for reuse. None reads the run.
        remark: a paragraph in Markdown for the start of the page, or "".

    Raises:
        HyperionError: a figure cannot be drawn.
    """
    material = material or Material(run)
    parts = sections(material)
    first = summary(material)
    for error in material.not_drawn.values():
        raise error
    shown = ([first] if first else []) + [picture for section in parts for picture in section.pictures]
    return {README: _page(material, first, parts, remark).encode()} | {picture.path: picture.content for picture in shown}


# The page is in results/reference/<machine>/.
_HEADLINES = "[docs/headlines.md](../../../docs/headlines.md)"


def _page(material: Material, first: DrawnFigure | None, found: list[Section], remark: str) -> str:
    information = material.information
    parts = [
        f"# {markdown_text(device_name(information))}",
        f"Every number and picture below is made from the rows of [`rows.csv`](rows.csv) "
        f"(profile {markdown_code(information.get('profile'))}"
        f"{_sources(material)}). The raw samples are in `samples/`. The hashes of all files are in `MANIFEST`.",
    ]
    measured_by = versions(material)
    if len(measured_by) > 1:
        parts += [
            f"**{len(measured_by)} versions of the code measured this run.** Parts that another version measured may differ for "
            f"this reason, too.{_began(material, measured_by)} The environment at the end of the page has the full hashes.",
            markdown(measured_by),
        ]
    elif len(measured_by):
        only = measured_by.iloc[0]
        changes = ", with local changes; the environment at the end of the page has their hash" * (only["local changes"] == "yes")
        parts.append(f"One version of the code measured this run: commit {markdown_code(only['commit'])}{changes}.")
    if remark:
        parts.append(remark)
    if banner(material):
        parts.append(f"> **{markdown_text(banner(material))}**")
    if refuted := unexpected_in(material.run):
        parts += ["## Unexpected", "These expectations of the notebooks did not hold in this run:"]
        parts.append("\n".join(f"- {stem}: {markdown_text(text)}" for stem, texts in refuted.items() for text in texts))
    if first:
        parts.append(f"![{markdown_text(first.caption)}]({first.path})")
    quoted = _headline_table(material)
    if len(quoted):
        parts += ["## At a glance", markdown(quoted), ONE_LAUNCH.format(_HEADLINES) + _only_weak(quoted[""])]
    for section in found:
        parts += [f"## {markdown_text(section.title)}", *_body(section)]
    absent = missing(material)
    if len(absent):
        parts += ["## Not measured, or without a limit", _folded(f"{len(absent)} entries with their reasons", markdown(absent))]
    parts += ["## Environment", markdown(environment(material))]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _began(material: Material, measured_by: pd.DataFrame) -> str:
    """Return a sentence that names the version of the code that created the run, which run.json contains.

    Later versions may have measured parts of the run again or added parts. Return "" if no rows of the first version remain.
    """
    source = (material.information.get("environment") or {}).get("source") or {}
    first = (source.get("commit") or "")[:12]
    return f" Version {first} is the oldest of them." if first and first in set(measured_by["commit"]) else ""


def _sources(material: Material) -> str:
    return f", data source {markdown_code(', '.join(material.data_sources))}" if material.data_sources else ""


def _headline_table(material: Material) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "": h.label,
                "best": h.value,
                INTERVAL: h.interval,
                "steady": h.steady,
                "% of limit": percent(h.fraction),
                "limit": h.limit,
            }
            for h in headlines(material)
        ]
    )


def _only_weak(labels: Iterable[str]) -> str:
    """Return a sentence that explains why some efficiencies of weak scaling have no strong scaling beside them, or ""."""
    found = set(labels)
    alone = [label for label in found if ": weak scaling" in label and label.replace(": weak", ": strong") not in found]
    if not alone:
        return ""
    return (
        " Without strong scaling, the efficiency of weak scaling promises too much. Where the table has no strong scaling, the "
        "host limited its steps, they were not steady, or they were not measured. The section Scaling shows what was measured."
    )


def _body(section: Section) -> list[str]:
    parts = [*section.sentences, *map(_shown, section.pictures)]
    for caption, table in section.tables:
        folded = len(table) > UNFOLDED_LINES
        parts.append(_folded(caption, markdown(table)) if folded else f"**{markdown_text(caption)}**\n\n{markdown(table)}")
    return parts


def _shown(picture: DrawnFigure) -> str:
    caption = markdown_text(picture.caption)
    return f"![{caption}]({picture.path})\n\n*{caption}*"


def _folded(summary: str, body: str) -> str:
    return f"<details>\n<summary>{markdown_text(summary)}</summary>\n\n{body.strip()}\n\n</details>"
