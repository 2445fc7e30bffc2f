"""Every figure is drawn from rows, small, and the same each time; what has no rows is not drawn.

The export, the reference page and the report are tested here too: they contain every figure, and one process draws each figure
once.
"""

import io
import json
import os
import re
import shutil
import types
from dataclasses import replace
from html import escape
from html.parser import HTMLParser

import pytest
from PIL import Image
from typer.testing import CliRunner

from hyperion.book import report
from hyperion.book.export import export_run, reference_readme
from hyperion.book.outline import banner, headlines, picture, sections
from hyperion.book.plots import all_plots, draw, results_folder
from hyperion.book.report import comparison_table, reference_machines, report_page, write_report
from hyperion.cli import app
from hyperion.errors import HyperionError
from hyperion.figures.material import Material, Plot
from hyperion.figures.style import new_figure, styled
from hyperion.figures.tables import INTERVAL, LAUNCHES_INTERVAL, SEEDS_INTERVAL, TRIALS_INTERVAL
from hyperion.paths import reference_folder
from hyperion.reproduce.publishing import export_subjects
from hyperion.results import Row, Run, StoreError, rows_from_csv
from tests.book.made_up.run import made_up_run

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


@pytest.mark.parametrize(
    ("plots", "says"),
    [
        ((Plot("losses", "gem", "", print),), "'losses' in PLOTS belongs to 'gem', which is no experiment"),
        ((Plot("losses", "reasons", "", print),), "'losses' in PLOTS belongs to 'reasons', which is no experiment"),
        (Plot("losses", "gemm", "", print), r"PLOTS is Plot\("),
    ],
)
def test_a_figure_that_no_page_would_show_is_refused(monkeypatch, plots, says):
    module = types.SimpleNamespace(PLOTS=plots)
    monkeypatch.setattr("hyperion.chapter.subjects.Subject.figures", property(lambda subject: module))
    with pytest.raises(HyperionError, match=says) as refusal:
        all_plots()
    assert refusal.value.where.name == "figures.py" and "figures," not in f"{refusal.value.next_step},"


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


@pytest.fixture(scope="module")
def refused(material):
    """Materials with refused values, by whether every value was refused."""
    return {every: with_refused_values(material, every) for every in (False, True)}


@pytest.fixture
def not_painted(monkeypatch):
    """Lay out and draw figures to the end, but on no canvas: what the painted ones look like is tested above."""

    def drawn(figure) -> bytes:
        with styled():
            figure.draw_without_rendering()
        return b"drawn"

    monkeypatch.setattr("hyperion.book.plots.png", drawn)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_refused_value_costs_its_figure_at_most_and_not_in_silence(material, refused, not_painted, name, every, capsys):
    content = draw(name, refused[every])
    assert content or f"no figure {name!r}" in capsys.readouterr().out or every or not draw(name, material)


def test_a_fault_of_a_figure_is_an_error_where_no_value_was_refused(material, monkeypatch, capsys):
    def fail(material):
        raise TypeError("planted")

    # A figure of one experiment: the made-up rows of another experiment contain a refused value.
    gemm = next(plot for plot in PLOTS if plot.name == "gemm")
    monkeypatch.setattr("hyperion.book.plots.all_plots", lambda: [replace(gemm, draw=fail)])
    with pytest.raises(HyperionError, match="TypeError: planted") as fault:
        draw("gemm", material)
    assert str(fault.value.where).rpartition(":")[0] == __file__
    assert draw("gemm", with_refused_values(material, every=False)) is None
    assert capsys.readouterr().out.startswith("WARNING: no figure 'gemm'")


def test_a_figure_that_cannot_be_drawn_costs_no_table_no_page_and_no_other_figure(run, tmp_path, monkeypatch):
    def fail(material):
        raise TypeError("planted")

    def draws(material):
        with styled():
            return new_figure("Some", "machine", 1)[0]

    broken, whole = (next(plot for plot in PLOTS if plot.experiment == name) for name in ("bandwidth", "gemm"))
    for module in ("plots", "export"):
        plots = [replace(broken, draw=fail), replace(whole, draw=draws)]
        monkeypatch.setattr(f"hyperion.book.{module}.all_plots", lambda plots=plots: plots)
    copy = Run.open(shutil.copytree(run.folder, tmp_path / "copy"))
    ledger = types.SimpleNamespace(run=copy, exported="", keep_exported=lambda digest: pytest.fail("it is not complete"))
    failure = export_subjects(ledger)
    assert failure.count("FAILED to draw") == 1 and f"FAILED to draw {broken.name}: " in failure and "Traceback" in failure
    folder = copy.folder / "benchmarks" / results_folder("bandwidth")
    assert (folder / "bandwidth.csv").is_file() and (folder / f"{whole.name}.png").is_file()
    assert not (folder / f"{broken.name}.png").exists()
    assert f"The figure {escape(repr(broken.name))} is missing: " in copy.read("report.html").decode()
    with pytest.raises(HyperionError, match="TypeError: planted"):
        reference_readme(copy)
    done = CliRunner().invoke(app, ["report", str(copy.folder)])
    assert isinstance(done.exception, HyperionError) and done.stdout.startswith("report: ")


def test_the_report_of_a_reference_changes_no_file_of_the_reference(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERION_RESULTS", str(tmp_path / "results"))
    folder = reference_folder() / "h100-precision"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = CliRunner().invoke(app, ["report", "h100-precision"])
    page = tmp_path / "results/report-h100-precision.html"
    assert done.exit_code == 0 and page.is_file() and "NVIDIA H100" in page.read_text("utf-8")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_the_report_of_a_run_that_cannot_be_written_is_beside_the_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERION_RESULTS", str(tmp_path / "results"))
    folder, access = tmp_path / "archive/mine", os.access
    Run.create(folder, {"profile": "smoke", "environment": {"gpus": []}})
    before = sorted(folder.iterdir())
    monkeypatch.setattr(os, "access", lambda path, mode, **how: path != folder and access(path, mode, **how))
    done = CliRunner().invoke(app, ["report", str(folder)])
    page = tmp_path / "results/report-mine.html"
    assert done.exit_code == 0 and page.is_file() and sorted(folder.iterdir()) == before, done.output


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
    # On average 30 kB for each picture and the tables under it, so that a reference of the whole book fits into git.
    assert sum(map(len, reference_files.values())) < 30_000 * len(reference_files)


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
    assert "[docs/headlines.md](../../../docs/headlines.md) lists" in page


def test_the_page_says_synthetic(cpu_run, cpu_material):
    assert "**Synthetic data" in reference_readme(cpu_run, cpu_material)["README.md"].decode()


def test_an_empty_run_still_has_a_page(tmp_path):
    run = Run.create(tmp_path / "run", {"environment": {"cpu": {"name": "Some CPU", "cores": 2}}})
    assert reference_readme(run)["README.md"].decode().startswith("# Some CPU (2 cores)")
    assert Material(run).experiments == []


class Balanced(HTMLParser):
    """Fails on a tag closed out of order."""

    VOID = ("meta", "img", "br", "link", "input")

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(material):
    return report_page(material)


def test_the_page_stands_alone(page, material):
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    assert page.count("data:image/png;base64,") == sum(len(section.pictures) for section in sections(material))
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []


def test_it_shows_headlines_missing_values_environment_and_published_tables(page):
    for expected in (
        "NVIDIA Test GPU",
        "% of its limit",
        "unsupported: torch.mm takes no fp8",
        "2.11.0+cu128",
        "570.86",
        "Not measured by this run.",
        "not a Vision Transformer",
        "without warm-up",
        "data mirror",
        "Comparison with other machines",
    ):
        assert expected in page, expected


def test_synthetic_data_and_replay_are_announced(cpu_material, tmp_path):
    assert "Synthetic data: made by code" in banner(cpu_material)
    replayed = Material(made_up_run(tmp_path / "replay", replay="replay:h200:"))
    assert "Replay: measured on h200" in banner(replayed) and "h200 (replay)" in replayed.machine("gemm")


def test_the_written_page_is_vouched_for_and_the_same_each_time(page, material, run, tmp_path):
    copy = Run.open(shutil.copytree(run.folder, tmp_path / run.folder.name))
    again = Material(copy)
    again.drawn.update(material.drawn)  # that drawing again gives the same bytes is shown above
    path = write_report(copy, again)
    assert path.read_bytes() == copy.read("report.html") == page.encode()
    assert path.name in copy.verify()


def test_edited_rows_are_refused(run, tmp_path):
    copy = Run.open(shutil.copytree(run.folder, tmp_path / "copy"))
    with open(copy.folder / "rows.csv", "a") as rows:
        rows.write("edited")
    with pytest.raises(StoreError, match=r"truncated or edited"):
        write_report(copy)


def test_the_same_quantity_stands_in_one_line_with_its_ratio(material, tmp_path):
    other = Material(Run.open(shutil.copytree(material.run.folder, tmp_path / "other")))
    table = comparison_table(material, [other]).set_index("")
    assert table.index.tolist() == [headline.label for headline in headlines(material)]
    product = table.loc["matrix product, 16,384 × 16,384, bf16, cold caches"]
    assert product["other"] == product["this run"] and product["this run / other"] == "1"
    # Only products of up to 8192 are published.
    assert "MI250X, as published" not in table or product["MI250X, as published"] == ""
    row = next(row for row in material.rows if (row.experiment, row.dtype, row.params.get("m")) == ("gemm", "bf16", 8192))
    assert report._published_value(types.SimpleNamespace(row=row)) == "121.07 TFLOPS"


def test_other_data_are_another_quantity(material, tmp_path):
    synthetic = Material(made_up_run(tmp_path / "invented", source="synthetic"))
    table = comparison_table(material, [synthetic]).set_index("")
    told = {label.partition(", ")[2]: label for label in table.index}
    assert table.loc[told["perplexity per token, test split"], "invented"] == ""
    assert table.loc["matrix product, 16,384 × 16,384, bf16, cold caches", "invented"] != ""


def test_machines_without_any_of_the_values_have_no_empty_columns(material, tmp_path, monkeypatch):
    other, nothing = (Material(Run.open(shutil.copytree(material.run.folder, tmp_path / name))) for name in ("other", "nothing"))
    monkeypatch.setattr(report, "headlines", lambda asked: [] if asked is nothing else headlines(asked))
    columns = comparison_table(material, [other, nothing]).columns
    assert "other" in columns and not any("nothing" in column for column in columns)


def test_a_run_is_not_its_own_reference(material, tmp_path):
    names = {m.run.folder.name for m in reference_machines(material)}
    assert names and not any("synthetic" in name for name in names)
    name = sorted(names)[0]
    replayed = Material(made_up_run(tmp_path / "again", replay=f"replay:{name}:"))
    assert name not in {m.run.folder.name for m in reference_machines(replayed)}


@pytest.mark.parametrize("page", sorted(reference_folder().glob("*/README.md")), ids=lambda page: page.parent.name)
def test_committed_pages_say_which_variation_an_interval_contains(page):
    headers = set(re.findall(r"(?<=\| )95 % interval[^|]*(?= \|)", page.read_text()))
    assert headers <= {INTERVAL, SEEDS_INTERVAL, TRIALS_INTERVAL, LAUNCHES_INTERVAL}
