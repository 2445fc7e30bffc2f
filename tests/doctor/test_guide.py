"""Each entry of the troubleshooting guide is mapped to rules that exist, and the page with the mapping is current."""

from collections import Counter
from pathlib import Path

from hyperion.doctor.components import components
from hyperion.doctor.guide import guide_entries, guide_markdown
from hyperion.doctor.rules import rules
from hyperion.hardware import collect_facts

PAGE = Path(__file__).resolve().parents[2] / "docs/troubleshooting.md"


def test_each_of_the_39_entries_has_rules_and_components_that_exist():
    entries, known = guide_entries(), {rule.id for rule in rules()}
    tested = {component.name for component in components(collect_facts())}
    assert len(entries) == len({entry.title for entry in entries}) == 39
    # The number of entries in each section of the guide.
    assert list(Counter(entry.section for entry in entries).values()) == [2, 3, 3, 2, 4, 2, 4, 3, 9, 7]
    for entry in entries:
        assert entry.rules and set(entry.rules) <= known, entry
        assert len(set(entry.rules)) == len(entry.rules) and set(entry.components) <= tested, entry


def test_the_page_has_the_tables_that_the_command_prints():
    text = PAGE.read_text("utf-8").split("<!-- guide -->\n")[1].split("\n<!-- end of guide -->")[0]
    assert text == guide_markdown(), "put the output of `hyperion doctor --guide` between the markers of docs/troubleshooting.md"
