"""`hyperion compare`: what changed between two runs or sets of launches, as a table, and under which circumstances."""

from rich.markup import escape
from rich.table import Table

from hyperion.commands.console import console
from hyperion.results import VERDICTS, Comparison, circumstances, compare, relaunches, sensitivity, why_indicative
from hyperion.untrusted import printable

_COLUMNS = ("variant", "metric", "A", "B", "change", "spread", "p (corrected)", "power at 3 %", "verdict")
# Lines of a list without --all; the total is always printed.
_LINES = 20


def print_comparison(a: str, b: str, everything: bool, allow_missing: bool = False) -> int:
    """Print what changed from A to B, with `everything` also what did not.

    Args:
        allow_missing: values that a run lacks are listed, but do not count as a regression.

    Returns:
        1 on a confirmed regression, or on a missing value unless these are allowed; else 0.
    """
    side_a, side_b = relaunches(a), relaunches(b)
    compared, output = compare(side_a, side_b), console()
    _print_list(
        "different circumstances", [f"{one.name}: A {one.a}; B {one.b}" for one in circumstances(side_a, side_b)], everything
    )
    table = _table(compared, everything)
    if table.row_count:
        output.print(table)
    absent = [f"{c.name} {c.metric}, {c.reason}" for c in compared if c.verdict == "missing"]
    _print_list("missing values", absent, everything)
    counts = {verdict: sum(c.verdict == verdict for c in compared) for verdict in VERDICTS}
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    output.print(f"{len(compared)} values, {len(side_a)} against {len(side_b)} launches: {told}", markup=False)
    if words := sensitivity(compared):
        output.print(words, markup=False)
    if why := why_indicative(side_a, side_b):
        output.print(f"indicative only: {why}; to confirm a change: hyperion relaunch WORK A B", markup=False)
    failed = bool(counts["regression"] or (absent and not allow_missing))
    output.print(f"exit code {int(failed)}: {_conclusion(counts, allow_missing)}", markup=False)
    return int(failed)


def _table(compared: list[Comparison], everything: bool) -> Table:
    table = Table(*_COLUMNS, pad_edge=False)
    for c in compared:
        if c.verdict == "missing" or (c.verdict == "same" and not everything):
            continue
        p, power = ("", "") if c.p_value is None else (f"{c.p_value:.2g}", f"{c.power:.0%}")
        spread = "" if c.spread is None else f"{c.spread:.1%}"
        verdict = f"indicative: {'better' if c.change > 0 else 'worse'}" if c.verdict == "indicative" else c.verdict
        numbers = (f"{c.value_a:.5g}", f"{c.value_b:.5g}", f"{c.change:+.1%}", spread, p, power)
        table.add_row(escape(printable(c.name)), c.metric, *numbers, verdict)
    return table


def _print_list(title: str, lines: list[str], everything: bool) -> None:
    if not lines:
        return
    output, shown = console(), lines if everything else lines[:_LINES]
    output.print(f"{title} ({len(lines)}):", markup=False)
    for line in shown:
        output.print(f"  {printable(line)}", markup=False, highlight=False, soft_wrap=True)
    if len(shown) < len(lines):
        output.print(f"  and {len(lines) - len(shown)} more, with --all", markup=False)


def _conclusion(counts: dict[str, int], allow_missing: bool) -> str:
    parts = [f"{counts['regression'] or 'no'} confirmed regression{'s' * (counts['regression'] > 1)}"]
    if counts["missing"]:
        parts.append(f"{counts['missing']} missing (--allow-missing {'is given' if allow_missing else 'would accept that'})")
    else:
        parts.append("nothing missing")
    if counts["indicative"]:
        parts.append(f"{counts['indicative']} indicative (never a failure)")
    return ", ".join(parts)
