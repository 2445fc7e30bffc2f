"""The report of `hyperion doctor`: one item for each component and level, the findings of the rules, and the exit code."""

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table

from hyperion.doctor.checks import Status
from hyperion.forms import read_form

LAYERS = ("hardware", "system", "framework", "model", "communication", "extension")
LEVELS = ("import", "correctness", "floor")
Layer = Literal["hardware", "system", "framework", "model", "communication", "extension"]
Level = Literal["import", "correctness", "floor"]
SCHEMA_VERSION = 1
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Item:
    """The result of one component at one level.

    Args:
        layer: layer of the component.
        component: name of the component.
        level: 'import' (the component is installed and can be loaded), 'correctness' (a test compared a result of the component
            with a known result) or 'floor' (a test compared its rate with the smallest rate of a healthy machine).
        found: whether the component is on this machine. False also if no test of it ran.
        version: version of the component, or "" if it has none.
        tested: what the test did, or "" if nothing was tested.
        result: 'ok', 'warn', 'fail', 'skip' (not tested, the evidence says why) or 'absent' (optional and not installed).
        evidence: what the test observed, or why it did not run.
        remedy: the next step for 'warn' and 'fail', else "".
        seconds: duration of the test.
    """

    layer: Layer
    component: str
    level: Level
    found: bool
    version: str
    tested: str
    result: Status
    evidence: str
    remedy: str
    seconds: float

    def __post_init__(self) -> None:
        """Check that an item with a result also has a test, evidence and, if needed, a remedy.

        Raises:
            ValueError: the result is 'ok', 'warn' or 'fail' and no test ran, or the evidence or the remedy is missing.
        """
        if self.result in ("ok", "warn", "fail") and not self.tested:
            raise ValueError(f"{self.component} at level {self.level} is {self.result!r}, but no test ran")
        if not self.evidence:
            raise ValueError(f"{self.component} at level {self.level} has no evidence")
        if self.result in ("warn", "fail") and not self.remedy:
            raise ValueError(f"{self.component} at level {self.level} is {self.result!r}, and has no remedy")


@dataclass(frozen=True)
class RuleResult:
    """The result of one rule of troubleshooting.

    Args:
        id: name of the rule.
        symptom: what a user sees.
        result: 'ok' (the cause is not present), 'warn', 'fail', or 'skip' (a fact that the rule needs is unknown).
        evidence: the facts that the rule found, or the facts that are unknown, or "".
        remedy: the next step for 'warn' and 'fail', else "".
    """

    id: str
    symptom: str
    result: Status
    evidence: str
    remedy: str


@dataclass(frozen=True)
class DoctorReport:
    """The whole report.

    Args:
        schema_version: version of this format.
        items: one item for each component and level, by layer.
        rules: one result for each rule.
        summary: number of items and rules by result.
        exit_code: 0, or 1 if an item or a rule failed. The exit code 2 means that there is no report.
        seconds: duration of all tests and rules, without the start of the program.
    """

    schema_version: int
    items: tuple[Item, ...]
    rules: tuple[RuleResult, ...]
    summary: dict[str, int]
    exit_code: int
    seconds: float


def make_report(items: Iterable[Item], rules: Iterable[RuleResult], seconds: float) -> DoctorReport:
    """Return the report of these items and rules."""
    items = tuple(sorted(items, key=lambda item: LAYERS.index(item.layer)))  # sorted() keeps the order within a layer
    rules = tuple(rules)
    summary = Counter(entry.result for entry in (*items, *rules))
    return DoctorReport(SCHEMA_VERSION, items, rules, dict(summary), int(summary["fail"] > 0), round(seconds, 2))


def report_json(report: DoctorReport) -> dict[str, Any]:
    """Return the report as JSON values, after a check against its schema.

    Raises:
        FieldError: a field does not fit the schema.
    """
    content = asdict(report)
    read_form(DoctorReport, content, "report")
    return content


@functools.cache
def report_schema() -> dict[str, Any]:
    """Return the JSON schema of the report. It accepts no unknown field, and no value that `make_report` cannot return."""
    from pydantic import TypeAdapter

    schema = TypeAdapter(DoctorReport).json_schema()
    for part in (schema, *schema["$defs"].values()):
        part["additionalProperties"] = False
    fields, item = schema["properties"], schema["$defs"]["Item"]
    fields["schema_version"]["const"] = SCHEMA_VERSION
    fields["exit_code"]["enum"] = [0, 1]
    fields["items"]["minItems"] = 1
    fields["summary"]["additionalProperties"]["minimum"] = 1
    fields["summary"]["propertyNames"] = item["properties"]["result"]
    for seconds in (fields["seconds"], item["properties"]["seconds"]):
        seconds["minimum"] = 0
    item["properties"]["evidence"]["minLength"] = 1
    # An item is "ok" only if something was tested.
    item["if"] = {"properties": {"result": {"const": "ok"}}}
    item["then"] = {"properties": {"tested": {"minLength": 1}}}
    return schema


def report_table(report: DoctorReport) -> Table:
    """Return a table with one line for each component, and one column for each level."""
    table = Table("layer", "component", "version", *LEVELS, pad_edge=False)
    lines: dict[tuple[str, str], dict[str, Item]] = {}
    for item in report.items:
        lines.setdefault((item.layer, item.component), {})[item.level] = item
    last = ""
    for (layer, component), by_level in lines.items():
        version = next((item.version for item in by_level.values() if item.version), "")
        cells = [_cell(by_level[level]) for level in LEVELS]
        table.add_row(layer if layer != last else "", component, version, *cells)
        last = layer
    return table


def _cell(item: Item) -> str:
    text = f"ok {item.seconds:.1f} s" if item.result == "ok" else item.result
    colour = COLOURS.get(item.result)
    return f"[{colour}]{text}[/]" if colour else text
