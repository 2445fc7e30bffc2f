"""The closing table: what each notebook came to."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from hyperion.reproduce.stopping import told
from hyperion.results import Row

_STYLES = {
    "done": "green",
    "up to date": "green",
    "failed": "red",
    "unexpected": "red",
    "blocked": "yellow",
    "interrupted": "yellow",
}


@dataclass(frozen=True)
class Line:
    """One notebook's line.

    Args:
        status: done, up to date, unexpected, failed, blocked, skipped, unfinished or interrupted.
        seconds: wall time of its latest go; None when it was never run.
        rows: the rows it has in the run.
        note: why, where that is to be said.
    """

    status: str
    seconds: float | None
    rows: list[Row]
    note: str = ""


def best_fraction(rows: list[Row]) -> str:
    """The rate nearest to its limit: '93 % (gemm_tflops bfloat16)', '' where no rate has one."""
    rates = [row for row in rows if _is_rate(row) and row.fraction_of_limit is not None]
    if not rates:
        return ""
    best = max(rates, key=lambda row: row.fraction_of_limit)
    return f"{best.fraction_of_limit:.0%} ({' '.join(filter(None, [best.metric, best.dtype]))})"


def show_table(console: Console, lines: dict[str, Line]) -> None:
    """Print the table; wide enough for its text where no terminal sets a width."""
    table = Table(title=None, pad_edge=False)
    for heading, justify in (("notebook", "left"), ("status", "left"), ("time", "right"), ("rows", "right")):
        table.add_column(heading, justify=justify, no_wrap=True)
    table.add_column("best fraction of limit")
    table.add_column("note")
    for stem, line in lines.items():
        status = f"[{_STYLES[line.status]}]{line.status}[/]" if line.status in _STYLES else line.status
        seconds = "" if line.seconds is None else told(line.seconds)
        rows = str(len(line.rows)) if line.rows else ""
        table.add_row(stem, status, seconds, rows, best_fraction(line.rows), line.note.replace("[", "\\["))
    (console if console.is_terminal else Console(file=console.file, width=160)).print(table)
    console.file.flush()


def _is_rate(row: Row) -> bool:
    metric = row.definition
    return metric.direction == "higher" and (metric.unit.endswith("/s") or metric.unit == "TFLOPS")
