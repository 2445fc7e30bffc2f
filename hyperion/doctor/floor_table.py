"""Verdicts about floors as a table: for the terminal, and for a notebook."""

import pandas as pd
from rich.table import Table

from hyperion.doctor.floors import MET, NOT_MEASURED, FloorReport, Verdict

COLUMNS = ("at work", "quantity", "floor", "measured [95 % CI]", "power", "verdict", "source")
_COLOURS = {MET: "green", NOT_MEASURED: "yellow"}


def floor_frame(report: FloorReport) -> pd.DataFrame:
    """One line a verdict, in words: the floor and whose it is, what was measured with its 95 % interval, and whether that
    will do. Columns: `COLUMNS`; without a known floor there is no line.
    """
    return pd.DataFrame([_cells(verdict) for verdict in report.verdicts], columns=list(COLUMNS))


def floor_table(report: FloorReport) -> Table:
    """`floor_frame` for the terminal, verdicts in colour."""
    table = Table(*(column.replace("[", "\\[") for column in COLUMNS), pad_edge=False)
    for verdict in report.verdicts:
        cells = [cell.replace("[", "\\[") for cell in _cells(verdict)]
        cells[COLUMNS.index("verdict")] = f"[{_COLOURS.get(verdict.outcome, 'red')}]{cells[COLUMNS.index('verdict')]}[/]"
        table.add_row(*cells)
    return table


def _cells(verdict: Verdict) -> list[str]:
    floor = verdict.floor
    told = verdict.outcome + (f": {verdict.note}" if verdict.note else "")
    return [
        verdict.mode,
        f"{floor.quantity} {floor.dtype}",
        f"{floor.value:.5g} {floor.unit}",
        _measured(verdict),
        _power(verdict),
        told,
        f"{floor.source}; {floor.conditions}",
    ]


def _measured(verdict: Verdict) -> str:
    row = verdict.row
    if row is None:
        return ""
    interval = f" [{row.ci_low:.5g}, {row.ci_high:.5g}] n={row.n}" if row.n else ""
    place = f", device {row.rank}" if row.rank else ""
    return f"{row.value:.5g}{interval}{place}"


def _power(verdict: Verdict) -> str:
    return "" if verdict.row is None or verdict.row.power_w is None else f"{verdict.row.power_w:.0f} W"
