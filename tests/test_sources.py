"""docs/sources.md names every document from which the library takes values or statements, with the day when it was recorded."""

import datetime
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/sources.md").read_text(encoding="utf-8")


def documents(path: str) -> set[str]:
    """Return the documents that a TOML file of the library names: addresses of `sources`, and texts of `source`."""
    content = tomllib.loads((ROOT / path).read_text(encoding="utf-8"))
    if "sources" in content:
        return {source["url"] for source in content["sources"].values()}
    tables = [entry for value in content.values() for entry in (value if isinstance(value, list) else [value])]
    return {entry["source"] for entry in tables if "source" in entry}


@pytest.mark.parametrize(
    ("path", "least"),
    [
        ("hyperion/hardware/specs.toml", 15),
        ("hyperion/hardware/cpu_specs.toml", 2),
        ("hyperion/hardware/floors.toml", 5),
        ("hyperion/install/support.toml", 4),
        ("hyperion/install/variables.toml", 20),
    ],
)
def test_every_document_of_a_table_is_on_the_page_and_no_other(path, least):
    found = documents(path)
    assert len(found) >= least
    section = PAGE.partition(f"`{path}`\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    assert {re.sub(r".*\]\((.*)\)$", r"\1", row[0].removeprefix("| ")) for row in rows} == found


def test_every_paper_that_a_docstring_cites_is_on_the_page():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "hyperion").rglob("*.py"))
    assert set(re.findall(r"arXiv[: ]\s*(\d{4}\.\d{5})", text)) == set(re.findall(r"\[arXiv (\d{4}\.\d{5})\]", PAGE))


def test_every_entry_has_the_day_when_it_was_recorded():
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    days = [row[-1].strip() for row in rows if row[-1].strip() != "recorded"]
    assert len(days) > 50
    assert all(datetime.date.fromisoformat(day) >= datetime.date(2026, 1, 1) for day in days)
