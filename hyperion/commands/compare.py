"""The commands `hyperion compare`, which compares stored runs, and `hyperion relaunch`, which compares two versions of code."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hyperion.commands.console import console
from hyperion.terminal import say
from hyperion.untrusted import printable

if TYPE_CHECKING:
    from hyperion.measure import Relaunched
    from hyperion.results import Comparison

_COLUMNS = ("variant", "metric", "A", "B", "change", "spread", "p (corrected)", "power at 3 %", "verdict")
# Without --all, at most this many lines of a list are printed. The total number of lines is always printed.
_LINES = 20


def compare(
    a: Annotated[str, typer.Argument(help="The earlier run, or a folder of launches.")],
    b: Annotated[str, typer.Argument(help="The later run, or a folder of launches.")],
    everything: Annotated[bool, typer.Option("--all", help="Also list unchanged values, and do not shorten long lists.")] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Do not count a value that only one of A and B has as a regression.")
    ] = False,
) -> None:
    """Compare two runs, metric by metric. The exit code is 1 if there is a confirmed regression or a missing value.

    The output first lists the circumstances that differ: device, versions, profile, data, seed, sizes, throttling and clocks.
    Then it lists the changes. Values that one of the runs lacks come last.

    A change is confirmed only for launches of one call of `hyperion relaunch`, with at least five launches of A and of B. A
    confirmed change exceeds 3 %, and a randomization test over whole launches, corrected for the number of metrics, rejects "no
    change" at the 5 % level. For other runs, a change is "indicative" and does not affect the exit code. The power is the
    probability that a change of 3 % is confirmed.

    If A and B were measured on different devices, the values are listed with their ratio, and none is judged.
    """
    raise typer.Exit(print_comparison(a, b, everything, allow_missing))


def relaunch(
    work: Annotated[
        Path, typer.Argument(help="A Python file with a function work() that returns the functions to time, by name.")
    ],
    a: Annotated[Path, typer.Argument(help="The folder of the earlier code. Launches of A import from this folder first.")],
    b: Annotated[Path, typer.Argument(help="The folder of the later code. Use the folder of A to see the noise.")],
    launches: Annotated[
        int, typer.Option(min=1, help="Number of launches of A and of B. With fewer than five, no change is confirmed.")
    ] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, help="Time in seconds for sampling one function in one launch.")] = 0.6,
) -> None:
    """Find out if a change made your code slower. Both versions are launched several times, and `compare` compares the launches.

    The file imports modules from A or B and from installed packages, but not from its own folder. All launches run at the same
    time, so the memory of a GPU must be large enough for all of them. The launches are sampled in short time slices in random
    order, so that both versions are measured in the same state of the machine. Typical calls are compared, not the slowest ones.
    Each launch is stored as a run under results/. The exit code is 1 if there is a confirmed regression.
    """
    raise typer.Exit(print_relaunch(work, a, b, launches, seconds))


def print_comparison(a: str, b: str, everything: bool, allow_missing: bool = False) -> int:
    """Print the changes from A to B.

    Args:
        a: the earlier run, or a folder of launches.
        b: the later run, or a folder of launches.
        everything: if True, also print unchanged values, and all lines of long lists.
        allow_missing: if True, missing values are listed, but do not affect the result.

    Returns:
        1 if there is a confirmed regression, or if a value is missing and `allow_missing` is False. Otherwise 0.
    """
    from hyperion.results import VERDICTS, circumstances, relaunches, sensitivity, why_indicative
    from hyperion.results import compare as compare_runs

    side_a, side_b = relaunches(a), relaunches(b)
    compared = compare_runs(side_a, side_b)
    different = circumstances(side_a, side_b)
    _print_list("different circumstances", [f"{one.name}: A {one.a}; B {one.b}" for one in different], everything)
    devices = next((one for one in different if one.name == "device"), None)
    table = _table(compared, everything) if devices is None else _table_of_devices(compared, devices.a, devices.b)
    if table.row_count:
        console().print(table)
    absent = [f"{c.name} {c.metric}, {c.reason}" for c in compared if c.verdict == "missing"]
    _print_list("missing values", absent, everything)
    counts = {verdict: sum(c.verdict == verdict for c in compared) for verdict in VERDICTS}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    if devices is not None:
        shared = len(compared) - counts["missing"]
        say(f"{len(compared)} values: {shared} of different devices ({devices.a}; {devices.b}), {counts['missing']} missing")
        say("values of different devices are not judged")
        counts |= dict.fromkeys(("regression", "improvement", "indicative", "same"), 0)
    else:
        say(f"{len(compared)} values, {len(side_a)} against {len(side_b)} launches: {summary}")
        if power := sensitivity(compared):
            say(power)
        if reason := why_indicative(side_a, side_b):
            say(f"changes are indicative only: {reason}; to confirm a change, use hyperion relaunch WORK A B")
    failed = bool(counts["regression"] or (absent and not allow_missing))
    say(f"exit code {int(failed)}: {_conclusion(counts, allow_missing)}")
    return int(failed)


def _table(compared: "list[Comparison]", everything: bool) -> Table:
    from hyperion.figures.material import signed_number

    table = Table(*_COLUMNS, pad_edge=False)
    for c in compared:
        if c.verdict == "missing" or (c.verdict == "same" and not everything):
            continue
        p, power = ("", "") if c.p_value is None else (f"{c.p_value:.2g}", f"{c.power:.0%}")
        spread = "" if c.spread is None else f"{c.spread:.1%}"
        better = c.change is not None and c.change > 0
        verdict = f"indicative: {'better' if better else 'worse'}" if c.verdict == "indicative" else c.verdict
        change = "" if c.change is None else f"{signed_number(100 * c.change, 1)}%"
        numbers = (f"{c.value_a:.5g}", f"{c.value_b:.5g}", change, spread, p, power)
        table.add_row(escape(printable(c.name)), c.metric, *numbers, verdict)
    return table


def _table_of_devices(compared: "list[Comparison]", device_a: str, device_b: str) -> Table:
    """Return a table that compares the values of two devices.

    The table does not say whether the code became slower, because a difference may be due to the devices.
    """
    table = Table(
        "variant", "metric", f"A: {escape(printable(device_a))}", f"B: {escape(printable(device_b))}", "B / A", pad_edge=False
    )
    for c in compared:
        if c.value_a is not None and c.value_b is not None:
            ratio = f"{c.value_b / c.value_a:.3g}" if c.value_a else ""
            table.add_row(escape(printable(c.name)), c.metric, f"{c.value_a:.5g}", f"{c.value_b:.5g}", ratio)
    return table


def _print_list(title: str, lines: list[str], everything: bool) -> None:
    if not lines:
        return
    shown = lines if everything else lines[:_LINES]
    say(f"{title} ({len(lines)}):")
    for line in shown:
        say(f"  {line}")
    if len(shown) < len(lines):
        say(f"  and {len(lines) - len(shown)} more, with --all")


def _conclusion(counts: dict[str, int], allow_missing: bool) -> str:
    parts = [f"{counts['regression'] or 'no'} confirmed regression{'s' * (counts['regression'] > 1)}"]
    if counts["missing"]:
        parts.append(
            f"{counts['missing']} missing ({'accepted by' if allow_missing else 'would be accepted with'} --allow-missing)"
        )
    else:
        parts.append("nothing missing")
    if counts["indicative"]:
        parts.append(f"{counts['indicative']} indicative (never a failure)")
    return ", ".join(parts)


def print_relaunch(work: Path, folder_a: Path, folder_b: Path, launches: int, seconds: float) -> int:
    """Time the functions of a file with both versions of the code, store the results, and print their comparison.

    Each version runs in several processes, which are called launches.

    Args:
        work: Python file with the functions to time.
        folder_a: folder of the earlier code.
        folder_b: folder of the later code.
        launches: number of launches of each version.
        seconds: seconds of sampling per function and launch.

    Returns:
        1 if there is a confirmed regression, else 0.

    Raises:
        HyperionError: a path is wrong, the file has an error, or a launch fails. In this case, no files are left behind.
    """
    from hyperion.measure import relaunch as measure_launches
    from hyperion.results import new_run_folder

    place = new_run_folder("relaunch")
    try:
        with _progress() as report:
            relaunched = measure_launches(work, folder_a, folder_b, launches=launches, seconds=seconds, report=report)
    except BaseException:
        with contextlib.suppress(OSError):  # if the folder is already gone or has files of others, the first error matters
            place.rmdir()
        raise
    return print_launches(relaunched, work, (folder_a, folder_b), place)


def print_launches(relaunched: "Relaunched", work: Path, folders: tuple[Path, Path], place: Path) -> int:
    """Store launches in the folder `place`, print their comparison, and return the exit code of the comparison."""
    from hyperion.chapter.relaunched_runs import record_launches

    sides, sources = record_launches(relaunched, work, folders, place), [relaunched.of(side)[0].source for side in "AB"]
    code = print_comparison(*map(str, sides), everything=False)
    if sources[0] == sources[1]:
        say("A and B imported the same files, so any difference is noise, unless A and B read different files")
    say(f"to print all values:  hyperion compare --all {sides[0]} {sides[1]}")
    return code


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Context manager that yields a function (done, total, note), which shows the progress.

    On a terminal, the function draws a bar. Otherwise, it prints a line for each phase.
    """
    output = console()
    if not output.is_terminal:
        phases: list[str] = []

        def print_phase(done: int, total: int, note: str) -> None:
            if note not in phases:
                phases.append(note)
                say(f"{note} ({total})" if done < total else note)

        yield print_phase
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=output, transient=True) as progress:
        bar = progress.add_task("launching", total=None)

        def update_bar(done: int, total: int, note: str) -> None:
            if progress.tasks[bar].description != note:
                progress.reset(bar)  # each phase has its own bar and remaining time
            progress.update(bar, description=note, completed=done, total=total)

        yield update_bar
