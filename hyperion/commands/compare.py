"""`hyperion compare`: what changed between two runs or sets of relaunches, as a table."""

from rich.table import Table

from hyperion.commands.console import console
from hyperion.results import compare, relaunches, sensitivity

_COLUMNS = ("variant", "metric", "A", "B", "change", "spread", "p (Holm)", "power at 3 %", "verdict")
_VERDICTS = ("regression", "improvement", "unconfirmed", "same")


def print_comparison(a: str, b: str, everything: bool) -> int:
    """Print what changed from A to B, with `everything` also what did not; 1 on a confirmed regression, else 0."""
    side_a, side_b = relaunches(a), relaunches(b)
    compared, table, output = compare(side_a, side_b), Table(*_COLUMNS, pad_edge=False), console()
    for c in compared:
        if everything or c.verdict != "same":
            p, power = ("", "") if c.p_value is None else (f"{c.p_value:.2g}", f"{c.power:.0%}")
            numbers = (f"{c.median_a:.5g}", f"{c.median_b:.5g}", f"{c.change:+.1%}", f"{c.spread:.1%}", p, power)
            table.add_row(c.name.replace("[", "\\["), c.metric, *numbers, c.verdict)
    if table.row_count:
        output.print(table)
    counts = {verdict: sum(c.verdict == verdict for c in compared) for verdict in _VERDICTS}
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    output.print(f"{len(compared)} values, {len(side_a)} against {len(side_b)} relaunches: {told}", markup=False)
    if words := sensitivity(compared):
        output.print(words, markup=False)
    return 1 if counts["regression"] else 0
