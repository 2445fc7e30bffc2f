"""`hyperion verify`, `report`, `publish` and `clean`: commands on stored runs."""

from typing import Annotated

import typer

from hyperion.terminal import say

RunName = Annotated[str, typer.Argument(help="A run: its folder or name, `latest`, or a reference machine's name.")]


def verify(run: RunName = "latest") -> None:
    """Check a run: files against their hashes, rows against their rules and their samples; one line for each proven statement.

    The last lines list what is not proven: rows that cannot be recomputed from samples, and files missing in the manifest.
    """
    from hyperion.results import Run, find_run, verify_run

    store = Run.open(find_run(run))
    say(f"{store.folder}:")
    for statement in verify_run(store):
        say(f"  {statement}")


def report(run: RunName = "latest") -> None:
    """Write a run's report: one HTML page of tables and pictures, made from its rows alone."""
    from hyperion.book import write_report
    from hyperion.results import Run, find_run

    say(f"report: {write_report(Run.open(find_run(run)))}")


def publish(run: RunName, name: Annotated[str, typer.Argument(help="The machine's name: h200.")]) -> None:
    """Make a run the reference of a machine, results/reference/NAME/, to replay and to compare with."""
    from hyperion.reproduce.publishing import publish as publish_run
    from hyperion.results import Run, find_run

    folder, left_out = publish_run(Run.open(find_run(run)), name)
    say(f"published: {folder}")
    if left_out:
        say(f"left out for their size: {', '.join(left_out)}")


def clean(
    runs: Annotated[bool, typer.Option("--runs", help="Also your own runs (never results/reference/).")] = False,
    data: Annotated[bool, typer.Option("--data", help="Also downloaded and prepared data.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list.")] = False,
) -> None:
    """Remove the caches and build products of a checkout; runs and data only on request. No file in git is touched.

    Removes only files that Hyperion wrote and marked, and follows no link. If a run or the data folder also holds another
    file, or a file that was changed, this file is listed and nothing is removed.
    """
    from hyperion.paths import data_folder, project_root, results_folder
    from hyperion.reproduce.housekeeping import removable, remove

    for path in removable(project_root(), results_folder(), data_folder(), runs=runs, staged_data=data):
        if not dry_run:
            remove(path)
        say(f"{'would remove' if dry_run else 'removed'} {path}")
