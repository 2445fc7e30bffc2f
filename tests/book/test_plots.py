"""Every figure is drawn from rows, small, and the same each time; what has no rows is not drawn.

The export and the reference page are tested here too: both contain every figure, and one process draws each of them once.
"""

import io
import json
import re
import shutil
from dataclasses import replace

import pytest
from PIL import Image

from hyperion.book.export import export_run, reference_readme
from hyperion.book.outline import picture, sections
from hyperion.book.plots import all_plots, draw, results_folder
from hyperion.book.report import report_page
from hyperion.errors import HyperionError
from hyperion.figures.material import Material
from hyperion.results import Row, Run, rows_from_csv

pytestmark = pytest.mark.book

PLOTS = all_plots()
NAMES = [plot.name for plot in PLOTS]


@pytest.mark.parametrize("plot", PLOTS, ids=NAMES)
def test_a_figure_is_a_readable_picture_under_150_kb(material, cpu_material, plot):
    for source in (material, cpu_material):
        content = picture(plot, source)
        assert len(content) < 150_000
        image = Image.open(io.BytesIO(content))
        assert 800 <= image.width <= 1400 and 250 <= image.height <= 900


@pytest.mark.parametrize("name", NAMES)
def test_without_rows_there_is_no_figure(tmp_path, name):
    assert draw(name, Material(Run.create(tmp_path / "run", {"environment": {}}))) is None


def test_the_same_rows_give_the_same_bytes(material):
    assert draw("gemm", material) == draw("gemm", material)
    assert draw("image_grid", material) == draw("image_grid", material)


@pytest.mark.parametrize("name", ["gemm", "bandwidth"])
def test_published_numbers_are_drawn_only_when_asked(material, name):
    assert draw(name, material) != draw(name, material, published=True)


def test_an_unknown_figure_is_refused_with_the_names(material):
    with pytest.raises(HyperionError, match="no figure 'gem'") as refusal:
        draw("gem", material)
    assert "gemm" in refusal.value.next_step


def with_refused_values(material: Material, every: bool) -> Material:
    """The material with the first value of each experiment's metric refused, or every value."""
    seen, rows = set(), []
    for row in material.rows:
        refused = row.value is not None and (every or (row.experiment, row.metric) not in seen)
        seen.add((row.experiment, row.metric))
        reason = {"value": None, "value_reason": "unexpected: 7 failed its check", "n": None, "ci_low": None, "ci_high": None}
        rows.append(replace(row, **reason) if refused else row)
    found = Material(material.run)
    found.__dict__["rows"] = rows
    return found


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_refused_value_costs_its_figure_at_most_and_not_in_silence(material, name, every, capsys):
    content = draw(name, with_refused_values(material, every))
    assert content or not draw(name, material) or f"no figure {name!r}" in capsys.readouterr().out or every


def test_a_fault_of_a_figure_is_an_error_where_no_value_was_refused(material, monkeypatch, capsys):
    def fail(material):
        raise TypeError("planted")

    monkeypatch.setattr("hyperion.book.plots.all_plots", lambda: [replace(PLOTS[0], draw=fail)])
    with pytest.raises(HyperionError, match="TypeError: planted"):
        draw(PLOTS[0].name, material)
    assert draw(PLOTS[0].name, with_refused_values(material, every=False)) is None
    assert capsys.readouterr().out.startswith(f"WARNING: no figure {PLOTS[0].name!r}")


@pytest.mark.parametrize("every", [False, True])
def test_the_report_is_written_whatever_values_were_refused(material, every, monkeypatch):
    monkeypatch.setattr("hyperion.book.outline.draw", lambda name, material: None)  # see above
    assert "unexpected: 7 failed its check" in report_page(with_refused_values(material, every))


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


@pytest.fixture(scope="module")
def reference_files(run, material):
    return reference_readme(run, material)


def test_every_picture_of_the_page_comes_with_it(reference_files, material):
    page = reference_files["README.md"].decode()
    shown = set(re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page))
    drawn = [picture for section in sections(material) for picture in section.pictures]
    assert shown == set(reference_files) - {"README.md"} and len(shown) == len(drawn) + 1  # and the summary
    assert sum(map(len, reference_files.values())) < 2_000_000


def test_tables_are_well_formed_and_details_closed(reference_files):
    page = reference_files["README.md"].decode()
    assert page.startswith("# NVIDIA Test GPU\n")
    assert page.index("](benchmarks/summary.png)") < page.index("## At a glance")
    assert page.count("<details>") == page.count("</details>") > 2
    blocks = re.findall(r"(?:^\|.*\|\n)+", page, flags=re.M)
    assert len(blocks) > 8
    for block in blocks:
        lines = block.replace("\\|", "").splitlines()
        assert len({line.count("|") for line in lines}) == 1 and set(lines[1]) <= set("|-: ")
    assert "unsupported: torch.mm takes no fp8" in page and "2.11.0+cu128" in page


def test_the_page_says_synthetic(cpu_run, cpu_material):
    assert "**Synthetic data" in reference_readme(cpu_run, cpu_material)["README.md"].decode()


def test_an_empty_run_still_has_a_page(tmp_path):
    run = Run.create(tmp_path / "run", {"environment": {"cpu": {"name": "Some CPU", "cores": 2}}})
    assert reference_readme(run)["README.md"].decode().startswith("# Some CPU (2 cores)")
    assert Material(run).experiments == []
