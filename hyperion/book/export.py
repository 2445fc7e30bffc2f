"""Export a run by subject: benchmarks/<subject>/ with CSV, JSON and PNG of each experiment."""

import json

from hyperion.book.outline import picture, picture_path
from hyperion.book.plots import all_plots, results_folder
from hyperion.figures.material import ALL, Material
from hyperion.results import Row, Run, rows_to_csv
from hyperion.results.rows import COLUMNS


def export_run(run: Run, material: Material | None = None) -> list[str]:
    """Write benchmarks/<subject>/<experiment>.csv and .json with the same rows, and the figures, as one transaction.

    The same rows and samples give the same bytes.

    Args:
        material: material of the run, whose figures are not drawn again; None reads the run.

    Returns:
        The paths written, relative to the run.
    """
    material = material or Material(run)
    contents = tables(material) | pictures(material)
    run.write(contents)
    return sorted(contents)


def tables(material: Material) -> dict[str, bytes]:
    """Return CSV and JSON of every experiment by path."""
    contents = {}
    for experiment in dict.fromkeys(name for _, name in material.experiments):
        rows = material.of(experiment)
        stem = f"benchmarks/{results_folder(experiment)}/{experiment}"
        contents[f"{stem}.csv"] = rows_to_csv(rows).encode()
        contents[f"{stem}.json"] = rows_to_json(rows).encode()
    return contents


def pictures(material: Material) -> dict[str, bytes]:
    """Return the PNG of every figure that the run has rows for, by path."""
    present = {name for _, name in material.experiments} | {ALL}
    drawn = {plot: picture(plot, material) for plot in all_plots() if plot.experiment in present}
    return {picture_path(plot.experiment, plot.name): content for plot, content in drawn.items() if content}


def rows_to_json(rows: list[Row]) -> str:
    """Return the rows as a JSON list of objects with the columns of rows.csv."""
    lines = [{column: getattr(row, column) for column in COLUMNS} for row in rows]
    return json.dumps(lines, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
