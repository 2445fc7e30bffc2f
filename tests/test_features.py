"""docs/features.md: every id is there once, and everything that it names exists."""

import ast
import csv
import functools
import json
import re
from pathlib import Path

import pytest
import typer

from hyperion.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/features.md").read_text("utf-8")
IDS = {
    f"{letter}{number}" for letter, last in {"H": 49, "M": 26, "F": 31, "G": 17, "N": 14}.items() for number in range(1, last + 1)
}
STATES = {"works", "partly", "missing", "not measured here"}
HEADER = ["id", "feature", "shown by", "state", "what is missing"]
TEST = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)")
EXPERIMENT = re.compile(r"(\d\d_\w+)/(\w+)")
ITEM = re.compile(r"`([^`]+)`(?: \(([\w-]+(?:, [\w-]+)*)\))?")


def rows_of(page: str) -> list[list[str]]:
    """Return the cells of each row of the tables, without headers."""
    rows = []
    for line in page.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
            if cells != HEADER and set(cells) != {"---"}:
                rows.append(cells)
    return rows


def faults_of_row(cells: list[str]) -> list[str]:
    """Return what is wrong with the form of a row, or with something that it names."""
    if len(cells) != len(HEADER):
        return [f"{len(cells)} cells instead of {len(HEADER)}"]
    name, feature, shown, state, lacks = cells
    faults = []
    if not re.fullmatch(r"[HMFGN]\d+", name):
        faults.append(f"no id: {name!r}")
    if not 0 < len(feature.split()) <= 8:
        faults.append(f"{len(feature.split())} words in {feature!r}")
    if state not in STATES:
        faults.append(f"unknown state {state!r}")
    if bool(lacks) == (state == "works"):
        faults.append("what is missing is stated exactly if the state is another than works")
    items = shown.split("; ") if shown else []
    if bool(items) == (state == "missing"):
        faults.append("something shows it exactly if the state is another than missing")
    if state == "works" and not any(TEST.search(item) or item.endswith(")") for item in items):
        faults.append("works without a test or a row of a reference run")
    return faults + [fault for item in items for fault in faults_of_item(item)]


@functools.cache
def faults_of_item(item: str) -> list[str]:
    """Return what is wrong with one entry of the column `shown by`."""
    match = ITEM.fullmatch(item)
    if match is None:
        return [f"not one name in backticks: {item!r}"]
    name, runs = match[1], (match[2] or "").split(", ") if match[2] else []
    if test := TEST.fullmatch(name):
        fault = "" if test[2] in functions(test[1]) else f"no such test: {name}"
    elif experiment := EXPERIMENT.fullmatch(name):
        absent = [run for run in runs if (experiment[1], experiment[2]) not in measured(run)]
        fault = "" if experiment[2] in experiments(experiment[1]) else f"no such experiment: {name}"
        fault = fault or (f"no values of {name} in {', '.join(absent)}" if absent else "")
        runs = []
    elif name.startswith("hyperion "):
        fault = fault_of_command(name.split()[1:])
    elif name.startswith("make "):
        fault = "" if name.removeprefix("make ") in make_targets() else f"no such target: {name}"
    else:
        fault = "" if (ROOT / name).is_file() else f"no such file: {name}"
    return [fault] if fault else [f"only an experiment has reference runs: {item}"] if runs else []


@functools.cache
def functions(path: str) -> set[str]:
    file = ROOT / path
    tree = ast.parse(file.read_text("utf-8")) if file.is_file() else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@functools.cache
def experiments(notebook: str) -> set[str]:
    """Return the experiments that the cells of a notebook run."""
    cells = [cell for file in ROOT.glob(f"phase*/{notebook}.ipynb") for cell in json.loads(file.read_text("utf-8"))["cells"]]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return set(re.findall(r'chapter\.run\("(\w+)"\)', code))


@functools.cache
def measured(run: str) -> set[tuple[str, str]]:
    """Return (notebook, experiment) of the rows with a value, of a reference run or of all its launches."""
    folder = ROOT / "results/reference" / run
    found = set()
    for file in (folder / "rows.csv", *folder.glob("*/rows.csv")):
        if file.is_file():
            with file.open(newline="", encoding="utf-8") as text:
                found |= {(row["notebook"], row["experiment"]) for row in csv.DictReader(text) if row["value"]}
    return found


@functools.cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


@functools.cache
def whole_command():
    return typer.main.get_command(app)


def fault_of_command(words: list[str]) -> str:
    """Return "" if the subcommand and its options exist, else what does not."""
    command, wanted = whole_command(), ["hyperion", *words]
    while words and not words[0].startswith("-"):
        command = getattr(command, "commands", {}).get(words[0])
        words = words[1:]
        if command is None:
            return f"no such command: {' '.join(wanted)}"
    if hasattr(command, "commands"):
        return f"incomplete command: {' '.join(wanted)}"
    options = {option for parameter in command.params for option in parameter.opts}
    unknown = [word for word in words if word not in options]
    return f"no such option: {' '.join(wanted)}" if unknown else ""


def faults_of_page(page: str) -> list[str]:
    rows = rows_of(page)
    found = [cells[0] for cells in rows]
    faults = [f"{name} occurs {found.count(name)} times" for name in sorted({name for name in found if found.count(name) > 1})]
    faults += [f"{name} lacks" for name in sorted(IDS - set(found))] + [f"{name} is unknown" for name in sorted(set(found) - IDS)]
    return faults + [f"{cells[0]}: {fault}" for cells in rows for fault in faults_of_row(cells)]


def test_every_feature_is_there_once_and_everything_that_it_names_exists():
    assert faults_of_page(PAGE) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("::test_published_counts`", "::test_published_count`", "H13: no such test: tests/models/test_reference.py"),
        ("`hyperion data verify`", "`hyperion data check`", "H7: no such command: hyperion data check"),
        ("`hyperion data verify`", "`hyperion data`", "H7: incomplete command: hyperion data"),
        ("`hyperion env --install`", "`hyperion env --instal`", "N2: no such option: hyperion env --instal"),
        ("`make setup`; `req", "`make up`; `req", "H45: no such target: make up"),
        ("`11_megatron/pipeline_bubble`", "`11_megatron/bubble`", "G4: no such experiment: 11_megatron/bubble"),
        ("leakage` (h100, h200x2)", "leakage` (h100, h200x4)", "H8: no values of 02_core_framework/leakage in h200x4"),
        ("`LICENSE`", "`LICENCE`", "H45: no such file: LICENCE"),
        ("| H3 | ", "| H2 | ", "H3 lacks"),
        ("| H3 | ", "| H2 | ", "H2 occurs 2 times"),
        ("| works | |\n| H9", "| absent | |\n| H9", "H8: unknown state 'absent'"),
        ("| N3 | support level of each architecture |", "| N3 |", "N3: 4 cells instead of 5"),
        ("| works | |\n| H9", "| works | something |\n| H9", "H8: what is missing is stated"),
        ("| works | |\n| H9", "| missing | nothing |\n| H9", "H8: something shows it"),
    ],
)
def test_a_page_that_is_wrong_is_refused(old, new, fault):
    assert PAGE.count(old) >= 1
    assert any(found.startswith(fault) for found in faults_of_page(PAGE.replace(old, new, 1)))
