"""Each entry of the troubleshooting guide is mapped to rules that exist and find its message, and the page is current."""

import re
from collections import Counter
from pathlib import Path

import pytest

from hyperion.doctor.components import components
from hyperion.doctor.guide import guide_entries, guide_markdown
from hyperion.doctor.rules import rules
from hyperion.doctor.state import State
from hyperion.hardware import collect_facts

PAGE = Path(__file__).resolve().parents[2] / "docs/troubleshooting.md"


def quoted_messages() -> list[tuple[int, str]]:
    """Return the number of each entry whose title quotes a message, and the message."""
    found = []
    for number, entry in enumerate(guide_entries(), 1):
        for quoted in re.findall('"(.+?)"', entry.title):
            # One title quotes the same message with several modules: "No module named 'a' / 'b'".
            first, *others = quoted.split(" / ")
            found += [(number, message) for message in (first, *(f"No module named {name}" for name in others))]
    return found


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


def test_the_messages_of_all_entries_that_quote_one_are_searched_below():
    assert sorted({number for number, _ in quoted_messages()}) == [5, *range(24, 36), 39]


@pytest.mark.parametrize(("number", "message"), quoted_messages())
def test_a_rule_of_the_entry_finds_the_message_that_the_guide_quotes(number, message):
    about_logs = {rule.id: rule for rule in rules() if rule.needs == ("log",)}
    mapped = [about_logs[name] for name in guide_entries()[number - 1].rules if name in about_logs]
    for log in (message, f"first line\n{message}\nlast line\n"):
        assert "warn" in [rule.apply(State(log=log)).result for rule in mapped], log
