"""`hyperion doctor` and `hyperion env`: checks of this machine and installation, and its fingerprint."""

import json
from typing import Annotated

import typer

from hyperion.commands.console import console
from hyperion.errors import HyperionError
from hyperion.terminal import say

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    floors: Annotated[
        bool, typer.Option("--floors", help="Measure this device and compare it with the least that a healthy one reaches.")
    ] = False,
    run: Annotated[
        str | None, typer.Option(help="With --floors: read a run instead of measuring.", show_default="measure now")
    ] = None,
    harness: Annotated[bool, typer.Option("--harness", help="Plant faults that the measurements must catch.")] = False,
    numerics: Annotated[
        bool, typer.Option("--numerics", help="Compare logits, gradients and losses with float64, in every precision.")
    ] = False,
    comparison: Annotated[bool, typer.Option("--comparison", help="Plant slowdowns that `compare` must catch.")] = False,
) -> None:
    """Check this machine and installation; each finding comes with its evidence and its remedy.

    With --floors: the vendor's published acceptance floors of this device, cited; without those, bounds derived from its
    data sheet; on one device, on both dies of an MI250X module, on all. Exit code 1 when one is not met.

    With --harness: plant every measurement mistake that this library knows, and show which check refuses it.

    With --numerics: two small trainings against the float64 numbers stored in git; exit code 1 names the first wrong tensor.

    With --comparison: 44 comparisons of real launches in half an hour; exit code 1 unless every planted 10 % is confirmed and
    false alarms are no more frequent than a rule with 5 % allows.
    """
    if run is not None and not floors:
        raise HyperionError("--run goes with --floors", next_step=f"hyperion doctor --floors --run {run}")
    if numerics:
        raise typer.Exit(print_numerics())
    if comparison:
        raise typer.Exit(_print_comparison_trials())
    raise typer.Exit(_print_harness() if harness else _print_floors(run) if floors else _print_checks())


def env() -> None:
    """Print this machine's fingerprint as it goes into run.json: versions, device, driver."""
    from hyperion.hardware import fingerprint

    say(json.dumps(fingerprint(), indent=1, sort_keys=True))


def print_numerics() -> int:
    """Print this device's numbers next to the float64 ones; return 1 when one exceeds its tolerance."""
    from hyperion.doctor.numerics import check_numerics, numerics_table

    output = console()
    report = check_numerics(on_line=lambda line: output.print(line, markup=False))
    output.print(numerics_table(report))
    for line in filter(None, (report.note, report.conclusion)):
        output.print(line, markup=False, soft_wrap=True)
    return 0 if report.passed else 1


def _print_checks() -> int:
    """Print every finding with its evidence and remedy; return 1 when one is a failure."""
    from hyperion.doctor import run_checks

    output, results = console(), run_checks()
    for result in results:
        colour = _COLOURS.get(result.status, "white")
        output.print(f"[{colour}]{result.status:<5}[/] {result.id}: ", end="")
        output.print(result.evidence, markup=False, highlight=False, soft_wrap=True)
        if result.remedy:
            output.print(f"      next:  {result.remedy}", markup=False, highlight=False, soft_wrap=True)
    return 1 if any(result.status == "fail" for result in results) else 0


def _print_floors(run: str | None) -> int:
    """Print the floors and the measured values of this machine or of a run; return 1 when a floor is not met."""
    from hyperion.doctor import check_floors, floor_table

    report, output = check_floors(run), console()
    if report.verdicts:
        output.print(floor_table(report))
    output.print(report.conclusion, markup=False, soft_wrap=True)
    return 1 if report.healthy is False else 0


def _print_harness() -> int:
    """Print which planted faults were refused; return 1 when a fault passed or a correct measurement was refused."""
    from hyperion.doctor.harness import self_test, self_test_conclusion, self_test_table

    results, output = self_test(), console()
    output.print(self_test_table(results))
    output.print(self_test_conclusion(results), markup=False, soft_wrap=True)
    return 0 if all(result.passed for result in results) else 1


def _print_comparison_trials() -> int:
    """Print the comparisons of real launches; return 1 when a planted 10 % was missed or false alarms were too many."""
    from hyperion.doctor.comparison import conclusion, is_reliable, try_comparison

    output = console()
    trials, folder = try_comparison(on_line=lambda line: output.print(line, markup=False))
    for line in (*conclusion(trials), f"rows and every comparison: {folder}"):
        output.print(line, markup=False, soft_wrap=True)
    return 0 if is_reliable(trials) else 1
