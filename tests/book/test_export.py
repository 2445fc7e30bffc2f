"""Export by subject: CSV and JSON hold the same rows, and nothing changes between two calls."""

import json
import shutil

import pytest

from hyperion.book.export import export_run
from hyperion.book.plots import results_folder
from hyperion.results import Row, Run, rows_from_csv


@pytest.mark.slow
def test_csv_and_json_hold_the_same_rows_and_pictures_lie_beside(run, material, tmp_path):
    copy = Run.open(shutil.copytree(run.folder, tmp_path / "copy"))
    names = export_run(copy)
    subjects = {results_folder(row.experiment) for row in copy.rows()}
    assert {name.split("/")[1] for name in names} == subjects | {"predictions", "summary.png"}
    assert {"benchmarks/hardware/gemm.png", "benchmarks/baseline/perplexity.png"} <= set(names)
    exported = []
    for name in (name for name in names if name.endswith(".csv")):
        rows = rows_from_csv(copy.read(name).decode())
        lines = json.loads(copy.read(name.removesuffix("csv") + "json"))
        units = [line.pop("unit") for line in lines]
        assert [Row(**line) for line in lines] == rows and units == [row.unit for row in rows]
        exported += rows
    assert exported and sorted((r.key for r in exported), key=str) == sorted((r.key for r in copy.rows()), key=str)
    before = {name: copy.read(name) for name in names}
    # `material` was read and drawn apart from the copy's.
    assert export_run(copy, material) == names and {name: copy.read(name) for name in names} == before
    assert set(names) <= set(copy.verify())
