"""`hyperion doctor`: findings with their remedies, floors, numerics, and the tests of the harness and of the comparison."""

from hyperion.commands.console import console
from hyperion.doctor import check_floors, floor_table, run_checks

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def print_checks() -> int:
    """Print every finding with its evidence and remedy; 1 when something must be put right."""
    output, results = console(), run_checks()
    for result in results:
        colour = _COLOURS.get(result.status, "white")
        output.print(f"[{colour}]{result.status:<5}[/] {result.id}: ", end="")
        output.print(result.evidence, markup=False, highlight=False, soft_wrap=True)
        if result.remedy:
            output.print(f"      next:  {result.remedy}", markup=False, highlight=False, soft_wrap=True)
    return 1 if any(result.status == "fail" for result in results) else 0


def print_floors(run: str | None) -> int:
    """Print the floors of this machine, or of a run, and what was measured; 1 when one is not met."""
    report, output = check_floors(run), console()
    if report.verdicts:
        output.print(floor_table(report))
    output.print(report.conclusion, markup=False, soft_wrap=True)
    return 1 if report.healthy is False else 0


def print_numerics() -> int:
    """Print what this device computes beside what float64 gave; 1 when a number is further off than its tolerance."""
    from hyperion.doctor.numerics import check_numerics
    from hyperion.doctor.numerics_table import numerics_table

    output = console()
    report = check_numerics(on_line=lambda line: output.print(line, markup=False))
    output.print(numerics_table(report))
    for line in filter(None, (report.note, report.conclusion)):
        output.print(line, markup=False, soft_wrap=True)
    return 0 if report.passed else 1


def print_harness() -> int:
    """Print which planted faults were refused; 1 when one was not, or when a sound measurement was."""
    from hyperion.doctor.harness import self_test, self_test_conclusion, self_test_table

    results, output = self_test(), console()
    output.print(self_test_table(results))
    output.print(self_test_conclusion(results), markup=False, soft_wrap=True)
    return 0 if all(result.passed for result in results) else 1


def print_comparison_trials() -> int:
    """Print how comparisons of real launches came out; 1 when a planted 10 % was missed or false alarms were too many."""
    from hyperion.doctor.comparison import conclusion, keeps_its_word, try_comparison

    output = console()
    trials, folder = try_comparison(on_line=lambda line: output.print(line, markup=False))
    for line in (*conclusion(trials), f"rows and every comparison: {folder}"):
        output.print(line, markup=False, soft_wrap=True)
    return 0 if keeps_its_word(trials) else 1
