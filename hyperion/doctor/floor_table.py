"""Verdicts about floors as a table for the terminal."""

from rich.table import Table

from hyperion.doctor.floors import MET, NOT_MEASURED, FloorReport, Verdict

_COLOURS = {MET: "green", NOT_MEASURED: "yellow"}


def floor_table(report: FloorReport) -> Table:
    """One line a verdict: the floor and whose it is, what was measured with its 95 % interval, and whether that will do."""
    table = Table(*("at work", "quantity", "floor", "measured [95 % CI]", "power", "verdict", "source"), pad_edge=False)
    for verdict in report.verdicts:
        floor = verdict.floor
        named = f"{floor.quantity} {floor.dtype}"
        told = f"[{_COLOURS.get(verdict.outcome, 'red')}]{verdict.outcome}[/]" + (f": {verdict.note}" if verdict.note else "")
        least, source = f"{floor.value:.5g} {floor.unit}", f"{floor.source}; {floor.conditions}"
        table.add_row(verdict.mode, named, least, _measured(verdict), _power(verdict), told, source)
    return table


def _measured(verdict: Verdict) -> str:
    row = verdict.row
    if row is None:
        return ""
    interval = f" \\[{row.ci_low:.5g}, {row.ci_high:.5g}] n={row.n}" if row.n else ""
    place = f", device {row.rank}" if row.rank else ""
    return f"{row.value:.5g}{interval}{place}"


def _power(verdict: Verdict) -> str:
    return "" if verdict.row is None or verdict.row.power_w is None else f"{verdict.row.power_w:.0f} W"
