"""`hyperion relaunch`: launches of two versions of a reader's code that take turns, kept as runs, and what compares them."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hyperion.chapter.relaunched_runs import record_launches
from hyperion.commands.compare import print_comparison
from hyperion.commands.console import console
from hyperion.measure import Relaunched, relaunch
from hyperion.results import new_run_folder


def print_relaunch(work: Path, folder_a: Path, folder_b: Path, launches: int, seconds: float) -> int:
    """Time the file's functions in launches of both sides, keep them, and print their comparison; 1 on a confirmed regression.

    Raises:
        HyperionError: a path, the file's functions or a launch is at fault; then nothing is left behind.
    """
    place = new_run_folder("relaunch")
    try:
        with _progress() as report:
            relaunched = relaunch(work, folder_a, folder_b, launches=launches, seconds=seconds, report=report)
    except BaseException:
        place.rmdir()
        raise
    return print_launches(relaunched, work, (folder_a, folder_b), place)


def print_launches(relaunched: Relaunched, work: Path, folders: tuple[Path, Path], place: Path) -> int:
    """Keep launches below a folder and print what `hyperion compare` prints of them; its exit code."""
    sides, sources = record_launches(relaunched, work, folders, place), [relaunched.of(side)[0].source for side in "AB"]
    code, output = print_comparison(*map(str, sides), everything=False), console()
    if sources[0] == sources[1]:
        output.print("A and B imported the same files: what differs is noise, unless they read others", markup=False)
    output.print(f"again, with every value:  hyperion compare --all {sides[0]} {sides[1]}", markup=False, soft_wrap=True)
    return code


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal; in a log, a line for each new phase."""
    output = console()
    if not output.is_terminal:
        phases: list[str] = []

        def tell(done: int, total: int, note: str) -> None:
            if note not in phases:
                phases.append(note)
                output.print(f"{note} ({total})" if done < total else note, markup=False)

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=output, transient=True) as progress:
        bar = progress.add_task("launching", total=None)

        def show(done: int, total: int, note: str) -> None:
            if progress.tasks[bar].description != note:
                progress.reset(bar)  # the time left is that of this phase
            progress.update(bar, description=note, completed=done, total=total)

        yield show
