"""`hyperion fetch` and `hyperion data verify`: stage the data, and check it."""

from pathlib import Path
from typing import Annotated

import typer

from hyperion.terminal import say

app = typer.Typer(help="Prepared and staged data.", no_args_is_help=True)


def fetch() -> None:
    """Stage all data and tokenizers while there is a network; afterwards no command needs one."""
    from hyperion.data import fetch_all

    reports = fetch_all()
    for entry in reports:
        say(f"{entry.status:<7} {entry.name}: {entry.detail}")
    if any(entry.status != "ok" for entry in reports):
        raise typer.Exit(1)


@app.command()
def verify(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="A prepared folder, or a folder of prepared folders.", show_default="all of data/processed and data/raw"
        ),
    ] = None,
) -> None:
    """Check prepared and staged data: hashes, records, vocabulary, labels, pixels, and that no splits are swapped.

    Damaged files are named with record and reason, and moved to quarantine/. Exit code 0 when all data are unchanged, 1 when
    something is damaged.
    """
    from hyperion.data.prepare.verify import verify as verify_data

    verdicts = verify_data(folder)
    for verdict in verdicts:
        say(f"{'damaged' if verdict.findings else 'ok':<8}{verdict.folder}")
        if verdict.origin:
            say(f"        {verdict.origin}")
        for finding in verdict.findings:
            say(f"        {finding.file}: {finding.fault}")
        if verdict.moved_to is not None:
            say(f"        moved to {verdict.moved_to}, nothing was deleted")
        if verdict.next_step:
            say(f"        next:  {verdict.next_step}")
    damaged = sum(bool(verdict.findings) for verdict in verdicts)
    say(f"{len(verdicts)} data sets, {damaged} damaged" if verdicts else "nothing is prepared or staged yet")
    raise typer.Exit(1 if damaged else 0)
