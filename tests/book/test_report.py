"""The report is one page that needs nothing else and hides nothing."""

import re
import shutil
from html.parser import HTMLParser

import pytest

from hyperion.book.outline import banner, headlines, sections
from hyperion.book.report import comparison_table, reference_machines, report_page, write_report
from hyperion.figures.material import Material
from hyperion.results import Run, StoreError
from tests.book.made_up import made_up_run

pytestmark = pytest.mark.book


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
    again.drawn.update(material.drawn)  # that drawing again gives the same bytes is shown in test_export.py
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
    best = table.loc["matrix product, bf16, cold caches"]
    assert best["other"] == best["this run"] and best["this run / other"] == "1"
    assert best["MI250X, as published"] == "121.07 TFLOPS"


def test_other_data_are_another_quantity(material, tmp_path):
    synthetic = Material(made_up_run(tmp_path / "invented", source="synthetic"))
    table = comparison_table(material, [synthetic]).set_index("")
    told = {label.partition(", ")[2]: label for label in table.index}
    assert table.loc[told["perplexity per token, valid split"], "invented"] == ""
    assert table.loc["matrix product, bf16, cold caches", "invented"] != ""


def test_a_run_is_not_its_own_reference(material, tmp_path):
    names = {m.run.folder.name for m in reference_machines(material)}
    assert names and not any("synthetic" in name for name in names)
    name = sorted(names)[0]
    replayed = Material(made_up_run(tmp_path / "again", replay=f"replay:{name}:"))
    assert name not in {m.run.folder.name for m in reference_machines(replayed)}
