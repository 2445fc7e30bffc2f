"""The command `hyperion doctor`: test all components of the stack, apply the rules of troubleshooting, and print the report."""

import json
import time
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hyperion.commands.console import console
from hyperion.errors import HyperionError
from hyperion.terminal import say


def doctor(
    floors: Annotated[
        bool, typer.Option("--floors", help="Measure this device and compare it with the least values of a healthy device.")
    ] = False,
    run: Annotated[
        str | None, typer.Option(help="With --floors: use the rows of this run instead of measuring.", show_default="measure now")
    ] = None,
    harness: Annotated[
        bool, typer.Option("--harness", help="Plant faults in measurements; the library's checks must detect them.")
    ] = False,
    numerics: Annotated[
        bool, typer.Option("--numerics", help="Compare logits, gradients and losses with float64, in every precision.")
    ] = False,
    comparison: Annotated[
        bool, typer.Option("--comparison", help="Plant slowdowns in code; `hyperion compare` must detect them.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole report as JSON. With --numerics and --floors, it contains them too.")
    ] = False,
    preflight: Annotated[
        str | None, typer.Option(help="Check what a workload needs: megatron, training, serving, inference or scaling.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="Log of a program that failed. The rules of troubleshooting also search it.")
    ] = None,
    guide: Annotated[
        bool, typer.Option("--guide", help="Print the entries of the troubleshooting guide of Stan's ML Stack, and their rules.")
    ] = False,
    fit: Annotated[
        Path | None, typer.Option(help="Find the largest batch that fits: a file with step(batch), which runs one training step.")
    ] = None,
) -> None:
    """Check this machine and this installation. Each finding comes with its evidence and its remedy.

    The report has six layers (hardware, system, framework, model, communication, extension), and three levels for each
    component: import, correctness and floor. A level that did not run is 'skip', with the reason. Then the rules of
    troubleshooting are applied to the facts of this machine. The exit code is 1 if a test or a rule failed.

    With --floors: compare measured values with floors, the smallest values that a healthy device must reach. The floors are the
    vendor's published acceptance values for this device, with their source. If the vendor publishes none, they are derived from
    the data sheet. The measurements run on one device, on both dies of an MI250X module, and on all devices. The exit code is 1
    if a floor is not met.

    With --harness: plant every measurement mistake that this library knows, and show which check detects it.

    With --numerics: compare two small training runs with the float64 numbers stored in git. If a number is wrong, the output
    names the first wrong tensor, and the exit code is 1.

    With --guide: print two tables in Markdown: the rules that find the causes of each of the 39 entries of the troubleshooting
    guide of Stan's ML Stack, and all rules. docs/troubleshooting.md contains them.

    With --comparison: make 44 comparisons of real launches, which takes half an hour. The exit code is 1 if a planted slowdown
    of 10 % is not confirmed, or if there are more false alarms than a test at the 5 % level allows.
    """
    if run is not None and not floors:
        raise HyperionError(f"--run {run} is given without --floors", next_step=f"use both: hyperion doctor --floors --run {run}")
    if run is not None and as_json:
        raise HyperionError("--json reports on this machine, and not on a run", next_step=f"leave out --json or --run {run}")
    if guide:
        from hyperion.doctor.guide import guide_markdown

        print(guide_markdown())
        raise typer.Exit
    others = {"--preflight": preflight is not None, "--fit": fit is not None, "--comparison": comparison, "--harness": harness}
    alone = [name for name, given in others.items() if given]
    if as_json and alone and preflight is None:
        raise HyperionError(f"{alone[0]} prints no JSON", where="--json", next_step=f"leave out --json or {alone[0]}")
    alone += [name for name, given in (("--numerics", numerics), ("--floors", floors)) if given and not as_json]
    if len(alone) > 1:
        remedy = "call `hyperion doctor` with one of them at a time; --json reports --numerics and --floors together"
        raise HyperionError(f"{' and '.join(alone)} are given together", next_step=remedy)
    option = alone[0] if alone else None
    if log is not None and option is not None:
        remedy = f"call `hyperion doctor --log {log}` without {option}"
        if option in ("--numerics", "--floors"):
            remedy += ", or add --json for one report of both"
        raise HyperionError(f"{option} reads no log", where=f"--log {log}", next_step=remedy)
    if preflight is not None:
        raise typer.Exit(_print_preflight(preflight, as_json))
    if fit is not None:
        raise typer.Exit(_print_fit(fit))
    if comparison:
        raise typer.Exit(_print_comparison_trials())
    if harness:
        raise typer.Exit(_print_harness())
    if as_json or not (numerics or floors):
        raise typer.Exit(_print_report(numerics, floors, log, as_json))
    raise typer.Exit(print_numerics() if numerics else _print_floors(run))


def print_numerics() -> int:
    """Print the errors of this device's results relative to float64. Return 1 if an error exceeds its tolerance, else 0."""
    from hyperion.doctor.numerics import check_numerics, numerics_table

    report = check_numerics(on_line=say)
    console().print(numerics_table(report))
    for line in filter(None, (report.note, report.conclusion)):
        say(line)
    return 0 if report.passed else 1


def _print_report(numerics: bool, floors: bool, log: Path | None, as_json: bool) -> int:
    """Test all components, apply all rules, and print the report. Return 1 if a test or a rule failed, else 0."""
    from hyperion.doctor.components import check_components
    from hyperion.doctor.report import COLOURS, make_report, report_json, report_table
    from hyperion.doctor.rules import NOT_PRESENT, apply_rules
    from hyperion.doctor.state import read_state

    started = time.monotonic()
    rules = apply_rules(read_state(log=log))
    report = make_report(check_components(numerics, floors), rules, time.monotonic() - started)
    if as_json:
        print(json.dumps(report_json(report), indent=1))
        return report.exit_code
    output = console()
    output.print(report_table(report))
    skipped: dict[str, list[str]] = {}
    findings = [(i.result, f"{i.component} ({i.level})", i.evidence, i.remedy) for i in report.items]
    findings += [(rule.result, rule.id, rule.evidence, rule.remedy) for rule in report.rules]
    for result, name, evidence, remedy in findings:
        if result == "skip":
            skipped.setdefault(evidence, []).append(name)
        elif (result, evidence) != ("ok", NOT_PRESENT):
            _print_finding(output, COLOURS, result, name, evidence, remedy)
    if log is None:
        searching = len(skipped.pop("unknown: log", []))
        _print_finding(output, COLOURS, "skip", f"{searching} rules", "they search the log of a program: give --log FILE", "")
    for reason, names in skipped.items():
        _print_finding(output, COLOURS, "skip", ", ".join(names), reason, "")
    counts = ", ".join(f"{count} {result}" for result, count in sorted(report.summary.items()))
    say(f"{len(report.items)} items and {len(report.rules)} rules in {report.seconds:.0f} s: {counts}")
    return report.exit_code


def _print_finding(output: Console, colours: dict[str, str], result: str, name: str, evidence: str, remedy: str) -> None:
    colour = colours.get(result, "white")
    output.print(f"[{colour}]{result:<6}[/] {name}: ", end="")
    say(evidence)
    if remedy:
        say(f"       next:  {remedy}")


def _print_preflight(name: str, as_json: bool) -> int:
    """Print what a workload needs and what was found. Return 1 if something is missing, else 0."""
    from dataclasses import asdict

    from hyperion.doctor.preflight import check_preflight
    from hyperion.doctor.state import read_state

    needs = check_preflight(name, read_state())
    if as_json:
        print(json.dumps([asdict(need) for need in needs], indent=1))
    for need in () if as_json else needs:
        say(f"{need.result:<5} {need.what}: found {need.found}, needed {need.needed}{f'; {need.remedy}' if need.remedy else ''}")
    return int(any(need.result == "fail" for need in needs))


def _print_fit(file: Path) -> int:
    """Print the largest batch size with which the function `step` of a Python file fits into memory.

    Return 1 if no batch fits, else 0.
    """
    from hyperion.doctor.batches import LARGEST_TRIED, largest_fitting, load_step, within_free_memory

    try:
        with within_free_memory():
            largest, tried = largest_fitting(load_step(file))
    except HyperionError:
        raise
    # A program may end with sys.exit, whose exit code would be taken for that of this command.
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        raise HyperionError(
            f"the program failed, and not for lack of memory: {type(error).__name__}: {error}",
            where=f"{file}:{lines[-1]}" if lines else file,
            next_step="correct the program",
        ) from error
    more = " or more, which were not tried" if largest == LARGEST_TRIED else ""
    say(f"the largest batch that fits: {largest}{more} (tried {', '.join(map(str, tried))})")
    return int(largest == 0)


def _print_floors(run: str | None) -> int:
    """Print the floors and the measured values of this machine or of a run. Return 1 if a floor is not met, else 0.

    A floor is the smallest value that a healthy device must reach.
    """
    from hyperion.doctor import check_floors, floor_table

    report = check_floors(run)
    if report.verdicts:
        console().print(floor_table(report))
    say(report.conclusion)
    return 1 if report.healthy is False else 0


def _print_harness() -> int:
    """Print which planted faults (deliberate measurement mistakes) were detected.

    Return 1 if a fault was not detected or a correct measurement was refused, else 0.
    """
    from hyperion.doctor.harness import self_test, self_test_conclusion, self_test_table

    results = self_test()
    console().print(self_test_table(results))
    say(self_test_conclusion(results))
    return 0 if all(result.passed for result in results) else 1


def _print_comparison_trials() -> int:
    """Compare two versions of a program several times, as `hyperion compare` does, and print the results.

    Return 1 if a planted slowdown of 10 % was missed or if there were too many false alarms, else 0.
    """
    from hyperion.doctor.comparison import conclusion, is_reliable, try_comparison

    trials, folder = try_comparison(on_line=say)
    for line in (*conclusion(trials), f"rows and every comparison: {folder}"):
        say(line)
    return 0 if is_reliable(trials) else 1
