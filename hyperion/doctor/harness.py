"""The harness's self-test as a table: every planted fault, what a reader would have believed, and the check that refused it."""

from collections.abc import Sequence

from rich.table import Table

from hyperion.doctor.harness_faults import ALL_FAULTS
from hyperion.hardware import detect
from hyperion.measure.faults.planted_faults import FaultResult, run_self_test


def self_test() -> list[FaultResult]:
    """Plant every fault on this machine's device; some 15 s on a CPU."""
    return run_self_test(detect(), ALL_FAULTS)


def self_test_table(results: Sequence[FaultResult]) -> Table:
    """One line a fault; what is not caught, and a clean twin that does not pass, stand out."""
    table = Table("planted fault", "what would have been believed", "caught", "by, and its words", "clean twin", pad_edge=False)
    for r in results:
        caught, twin = ("yes" if r.caught else "[red]NO[/]", "passes" if r.twin_passes else f"[red]{_plain(r.twin_message)}[/]")
        table.add_row(r.name, _plain(r.believed), caught, f"{r.check}: {_plain(r.message)}", twin)
    return table


def self_test_conclusion(results: Sequence[FaultResult]) -> str:
    """The verdict in one line."""
    wrong = [r.name for r in results if not r.passed]
    caught, passing = sum(r.caught for r in results), sum(r.twin_passes for r in results)
    told = f"{caught} of {len(results)} planted faults caught, {passing} of {len(results)} clean twins pass"
    told += f", in {sum(r.seconds for r in results):.0f} s"
    return told + (f"; not told apart: {', '.join(wrong)}" if wrong else "")


def _plain(text: str) -> str:
    """Text in which rich takes nothing for a style, shortened to what a table holds."""
    return (text if len(text) <= 160 else f"{text[:159]}…").replace("[", "\\[")
