"""The entries of a troubleshooting guide, and the rules that find their causes. The entries are in guide.toml.

docs/troubleshooting.md contains the tables that `hyperion doctor --guide` prints.
"""

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

from hyperion.doctor.rules import rules


@dataclass(frozen=True)
class GuideEntry:
    """One entry of the guide.

    Args:
        section: section of the guide.
        title: heading of the entry in the guide.
        rules: names of the rules that find causes of this entry.
        components: components of `hyperion doctor` whose tests find causes of this entry.
        note: what to know about the guide's advice, or "".
    """

    section: str
    title: str
    rules: tuple[str, ...]
    components: tuple[str, ...] = ()
    note: str = ""


@functools.cache
def guide_entries() -> tuple[GuideEntry, ...]:
    """Return all entries in the order of the guide."""
    sections = tomllib.loads(Path(__file__).with_name("guide.toml").read_text(encoding="utf-8"))["section"]
    return tuple(
        GuideEntry(
            section["name"], entry["title"], tuple(entry["rules"]), tuple(entry.get("components", ())), entry.get("note", "")
        )
        for section in sections
        for entry in section["entry"]
    )


def guide_markdown() -> str:
    """Return two tables in Markdown: the rules of each entry of the guide, and all rules with their symptoms and next steps."""
    lines = ["| entry of the guide | rules | tested components | note |", "| --- | --- | --- | --- |"]
    for number, entry in enumerate(guide_entries(), 1):
        names = ", ".join(f"`{name}`" for name in entry.rules)
        lines.append(_line(f"{number}. {entry.section}: {entry.title}", names, ", ".join(entry.components), entry.note))
    lines += ["", "| rule | symptom | next step |", "| --- | --- | --- |"]
    lines += [_line(f"`{rule.id}`", rule.symptom, rule.remedy) for rule in rules()]
    return "\n".join(lines)


def _line(*cells: str) -> str:
    return " ".join(["|", *(f"{cell} |".strip() for cell in (cell.replace("|", "\\|") for cell in cells))])
