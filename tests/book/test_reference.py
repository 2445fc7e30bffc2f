"""The reference page: Markdown whose pictures exist and whose numbers come from rows."""

import re

import pytest

from hyperion.book.export import reference_readme
from hyperion.book.outline import sections
from hyperion.figures.material import Material
from hyperion.results import Run


@pytest.fixture(scope="module")
def files(run, material):
    return reference_readme(run, material)


def test_every_picture_of_the_page_comes_with_it(files, material):
    page = files["README.md"].decode()
    shown = set(re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page))
    drawn = [picture for section in sections(material) for picture in section.pictures]
    assert shown == set(files) - {"README.md"} and len(shown) == len(drawn) + 1  # and the summary
    assert sum(map(len, files.values())) < 2_000_000


def test_tables_are_well_formed_and_details_closed(files):
    page = files["README.md"].decode()
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
