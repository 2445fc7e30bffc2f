"""`hyperion reproduce`: execute the notebooks."""

from typing import Annotated

import typer

from hyperion.commands.console import PlainTextConsole
from hyperion.errors import LARGEST_SEED


def reproduce(
    profile: Annotated[
        str,
        typer.Option(
            envvar="PROFILE",
            help="smoke (minutes on a CPU), full (real sizes), study (more seeds), replay (no measurement: the numbers of "
            "a reference machine), or auto: smoke on a CPU, full on an accelerator.",
        ),
    ] = "auto",
    only: Annotated[
        str | None,
        typer.Option(envvar="ONLY", help="One chapter and what it needs: --only 01_hardware_exploration.", show_default="all"),
    ] = None,
    data_source: Annotated[
        str,
        typer.Option(
            envvar="DATA_SOURCE",
            help="mirror (folder in HYPERION_DATA_MIRROR), cache, download or synthetic; auto: the first one available.",
        ),
    ] = "auto",
    run: Annotated[
        str | None,
        typer.Option(
            envvar="RUN",
            help="`new` starts a run, another name continues or starts that one under results/.",
            show_default="the newest of the same profile, data source, seed, device and versions",
        ),
    ] = None,
    time_budget: Annotated[
        str | None,
        typer.Option(
            envvar="TIME_BUDGET",
            help="Stop cleanly after this time: 360, 6m, 1h30m. A later call continues.",
            show_default="no limit",
        ),
    ] = None,
    cell_timeout: Annotated[
        str | None,
        typer.Option(
            envvar="CELL_TIMEOUT",
            help="A cell that takes longer fails, and its notebook with it: 900, 15m, 2h.",
            show_default="15m in smoke, 20m in full, 6h in study, 10m in replay",
        ),
    ] = None,
    notebook_timeout: Annotated[
        str | None,
        typer.Option(
            envvar="NOTEBOOK_TIMEOUT",
            help="A notebook that takes longer fails: 1800, 30m, 4h.",
            show_default="30m in smoke, 40m in full, 12h in study, 20m in replay",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(envvar="SEED", min=0, max=LARGEST_SEED, help="Seed of all random numbers.")] = 0,
    replay_of: Annotated[
        str | None,
        typer.Option(
            envvar="REPLAY_OF",
            help="With profile replay: the reference machine.",
            show_default="the first that holds the chapter",
        ),
    ] = None,
) -> None:
    """Execute the notebooks in order; a second call runs only what failed or changed.

    Results go to results/<run>/ (HYPERION_RESULTS names another folder): rows, samples, tables and pictures by subject,
    executed notebooks and their HTML. results/latest points to the newest finished run.

    Exit codes: 0 all done; 1 a notebook failed or found something unexpected (the others were still run); 2 the request
    cannot be met; 3 the time budget ended first; 130 or 143 stopped by Ctrl-C or SIGTERM. After each of them, the same
    command continues where the last call ended.
    """
    from hyperion.commands.console import parse_duration
    from hyperion.reproduce import Request
    from hyperion.reproduce import reproduce as run_book

    # `make` passes unset variables as empty strings.
    request = Request(
        profile=profile or "auto",
        data_source=data_source or "auto",
        only=only or None,
        run=run or None,
        time_budget_s=parse_duration(time_budget, "TIME_BUDGET") if time_budget else None,
        cell_timeout_s=parse_duration(cell_timeout, "CELL_TIMEOUT") if cell_timeout else None,
        notebook_timeout_s=parse_duration(notebook_timeout, "NOTEBOOK_TIMEOUT") if notebook_timeout else None,
        seed=seed,
        replay_of=replay_of or None,
    )
    raise typer.Exit(run_book(request, console=PlainTextConsole()))
