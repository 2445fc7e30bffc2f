"""The `hyperion` command. Every option of `make reproduce` is also a variable: PROFILE=smoke means --profile smoke."""

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from hyperion.errors import LARGEST_SEED, HyperionError
from hyperion.terminal import INTERRUPTED, run_command, say
from hyperion.untrusted import printable

app = typer.Typer(
    help="Hyperion: an executable book of ML-systems engineering.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_commands = typer.Typer(help="Prepared and staged data.", no_args_is_help=True)
app.add_typer(data_commands, name="data")
# What a wrong option raises: click's class, from click itself or from the copy of it that newer typers bring along.
_UsageError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
RunName = Annotated[str, typer.Argument(help="A run: its folder or name, `latest`, or a reference machine's name.")]


def main() -> int:
    """Run the command line and return the exit code; an error that a user can correct is printed with its next step."""
    return run_command(_run_app)


def _run_app() -> int:
    command = typer.main.get_command(app)
    try:
        # Not app(), which would take it for exit code 1, a regression, when the reader of standard output ends first.
        with command.make_context("hyperion", sys.argv[1:]) as context:
            command.invoke(context)
    except typer.Exit as ending:
        return ending.exit_code
    except typer.Abort:
        return INTERRUPTED
    except _UsageError as error:
        shown = io.StringIO()
        error.show(shown)
        print(printable(shown.getvalue()), end="", file=sys.stderr)
        return error.exit_code
    return 0


@app.command()
def reproduce(
    profile: Annotated[
        str,
        typer.Option(
            envvar="PROFILE",
            help="smoke (minutes on a CPU), full (real sizes), study (more seeds), replay (nothing measured: the numbers of "
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
            help="mirror (folder in HYPERION_DATA_MIRROR), cache, download or synthetic; auto: the first there is.",
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
            help="Stop cleanly rather than take longer: 360, 6m, 1h30m. A later call goes on.",
            show_default="no end",
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
    seed: Annotated[int, typer.Option(envvar="SEED", min=0, max=LARGEST_SEED, help="Seeds everything that is drawn.")] = 0,
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

    Exit codes: 0 all done; 1 a notebook failed or found something unexpected (the others went on); 2 the request cannot
    be met; 3 the time budget ended first; 130 or 143 stopped by Ctrl-C or SIGTERM. After each of them the same command
    goes on where it ended.
    """
    from hyperion.commands.console import PlainTextConsole
    from hyperion.reproduce import Request
    from hyperion.reproduce import reproduce as run_book
    from hyperion.reproduce.stopping import seconds_of

    # An empty variable (make passes those) is one not given.
    request = Request(
        profile=profile or "auto",
        data_source=data_source or "auto",
        only=only or None,
        run=run or None,
        time_budget_s=seconds_of(time_budget, "TIME_BUDGET") if time_budget else None,
        cell_timeout_s=seconds_of(cell_timeout, "CELL_TIMEOUT") if cell_timeout else None,
        notebook_timeout_s=seconds_of(notebook_timeout, "NOTEBOOK_TIMEOUT") if notebook_timeout else None,
        seed=seed,
        replay_of=replay_of or None,
    )
    raise typer.Exit(run_book(request, console=PlainTextConsole()))


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="The earlier run, or a folder of launches.")],
    b: Annotated[str, typer.Argument(help="The later run, or a folder of launches.")],
    everything: Annotated[bool, typer.Option("--all", help="List everything: what stayed the same, and long lists.")] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="A value that only one side has is no regression.")
    ] = False,
) -> None:
    """Compare two runs, metric by metric; exit code 1 on a confirmed regression or a missing value.

    Circumstances that differ (device, versions, profile, data, seed, sizes, throttling, clocks) come first, values that a
    run lacks last. A change is confirmed between launches of one call of `hyperion relaunch`, five a side: it exceeds 3 %,
    and a randomization test over whole launches, corrected for all metrics, finds it at 5 %. In other runs it is
    "indicative" and does not change the exit code. The power is the chance that a change of 3 % had been confirmed.
    """
    from hyperion.commands.compare import print_comparison

    raise typer.Exit(print_comparison(a, b, everything, allow_missing))


@app.command()
def relaunch(
    work: Annotated[Path, typer.Argument(help="A Python file whose work() returns functions to time, by name.")],
    a: Annotated[Path, typer.Argument(help="The earlier code: the folder that its launches import from first.")],
    b: Annotated[Path, typer.Argument(help="The later code; the same folder again shows the noise.")],
    launches: Annotated[int, typer.Option(min=1, help="Of each side; fewer than five confirm nothing.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, help="Sampling of a function in one launch, in all.")] = 0.6,
) -> None:
    """Did a change make my code slower? Five launches of each version take turns; then `compare` says.

    The file imports from A or B and what is installed, not from its own folder. All launches are alive at once (on a GPU:
    with memory for all of them) and sampled in short slices in random order, so that all see the same minutes of the
    machine. A typical call is compared, not the slowest. Each launch becomes a run under results/. 1 on a regression.
    """
    from hyperion.commands.relaunch import print_relaunch

    raise typer.Exit(print_relaunch(work, a, b, launches, seconds))


@app.command()
def verify(run: RunName = "latest") -> None:
    """Check a run: files against their hashes, rows against their rules and their samples; one line a proven statement.

    The last lines say what is not proven: rows that their samples do not determine, files that the manifest does not name.
    """
    from hyperion.results import Run, find_run, verify_run

    store = Run.open(find_run(run))
    say(f"{store.folder}:")
    for statement in verify_run(store):
        say(f"  {statement}")


@app.command()
def report(run: RunName = "latest") -> None:
    """Write a run's report: one HTML page of tables and pictures, made from its rows alone."""
    from hyperion.book import write_report
    from hyperion.results import Run, find_run

    say(f"report: {write_report(Run.open(find_run(run)))}")


@app.command()
def fetch() -> None:
    """Stage all data and tokenizers while there is a network; afterwards nothing needs one."""
    from hyperion.data import fetch_all

    _report_of(fetch_all())


@data_commands.command("verify")
def verify_data(
    folder: Annotated[
        Path | None,
        typer.Argument(help="A prepared folder, or a folder of such.", show_default="all of data/processed and data/raw"),
    ] = None,
) -> None:
    """Check prepared and staged data: hashes, records, vocabulary, labels, pixels, and that no split took another's place.

    What is damaged is named by file and record and moved aside, into quarantine/, with the reason. Exit code 0 when all is
    as it was written, 1 when something is not.
    """
    from hyperion.commands.data import print_verdicts

    raise typer.Exit(print_verdicts(folder))


@app.command()
def lab(
    port: Annotated[int | None, typer.Option(help="Port on loopback.", show_default="the first free one from 8888")] = None,
) -> None:
    """JupyterLab on this checkout, on loopback with a token; prints the ssh line for a remote node."""
    from hyperion.paths import project_root
    from hyperion.reproduce.lab import serve_lab

    serve_lab(project_root(), port)


@app.command()
def doctor(
    floors: Annotated[
        bool, typer.Option("--floors", help="Measure what a healthy device reaches at least, and hold it against that.")
    ] = False,
    run: Annotated[
        str | None, typer.Option(help="With --floors: read a run instead of measuring.", show_default="measure now")
    ] = None,
    harness: Annotated[bool, typer.Option("--harness", help="Plant faults for the measurements to catch.")] = False,
    numerics: Annotated[
        bool, typer.Option("--numerics", help="Compare logits, gradients and losses with float64, in every precision.")
    ] = False,
    comparison: Annotated[bool, typer.Option("--comparison", help="Plant slowdowns for `compare` to catch.")] = False,
) -> None:
    """Check this machine and installation; each finding comes with its evidence and its remedy.

    With --floors: the vendor's published acceptance floors of this device, cited, else sanity bounds of ours from its data
    sheet; on one device, on both dies of an MI250X module, on all. Exit code 1 when one is not met.

    With --harness: every way to measure wrongly that this library knows, planted into a measurement, and what refused it.

    With --numerics: two small trainings against the float64 numbers kept in git; 1 names the first tensor that is off.

    With --comparison: 44 comparisons of real launches in half an hour; 1 unless every planted 10 % is confirmed, and in not
    more comparisons than a rule with 5 % would something that was not planted.
    """
    from hyperion.commands import doctor as visit

    if run is not None and not floors:
        raise HyperionError("--run goes with --floors", next_step=f"hyperion doctor --floors --run {run}")
    if numerics:
        raise typer.Exit(visit.print_numerics())
    if comparison:
        raise typer.Exit(visit.print_comparison_trials())
    raise typer.Exit(visit.print_harness() if harness else visit.print_floors(run) if floors else visit.print_checks())


@app.command()
def passport(
    files: Annotated[list[Path] | None, typer.Argument(help="With --verify: passport files.", show_default=False)] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check files instead of measuring.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Where to write it.", show_default="results/passports/<device>.json")
    ] = None,
    time_limit: Annotated[str, typer.Option(help="About how long it may take: 40s, 5m.")] = "5m",
) -> None:
    """What this machine is and reaches, in one file that can be shared: fingerprint, ceilings, floors, hashes.

    To contribute your machine, add the file under results/passports/ in a pull request. With --verify: exit code 0 when all
    files keep the rules, 1 with the field and the reason when one does not.
    """
    if verify != bool(files):
        raise HyperionError("files and --verify go together", next_step="hyperion passport --verify FILE [FILE ...]")
    from hyperion.commands import passport as office
    from hyperion.reproduce.stopping import seconds_of

    raise typer.Exit(office.verify(files) if verify else office.write(seconds_of(time_limit, "--time-limit"), output))


@app.command()
def env() -> None:
    """Print this machine's fingerprint as it goes into run.json: versions, device, driver."""
    import json

    from hyperion.hardware import fingerprint

    say(json.dumps(fingerprint(), indent=1, sort_keys=True))


@app.command()
def clean(
    runs: Annotated[bool, typer.Option("--runs", help="Also your own runs (never results/reference/).")] = False,
    data: Annotated[bool, typer.Option("--data", help="Also downloaded and prepared data.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list.")] = False,
) -> None:
    """Remove the caches and build products of a checkout; runs and data only when asked. Nothing in git is touched.

    Only what Hyperion wrote and marked is removed, and no link is followed. If a run or the data folder also holds something
    else, or a file that was changed, it is listed and nothing is removed.
    """
    from hyperion.paths import data_folder, project_root, results_folder
    from hyperion.reproduce.housekeeping import removable, remove

    for path in removable(project_root(), results_folder(), data_folder(), runs=runs, staged_data=data):
        if not dry_run:
            remove(path)
        say(f"{'would remove' if dry_run else 'removed'} {path}")


@app.command()
def publish(run: RunName, name: Annotated[str, typer.Argument(help="The machine's name: h200.")]) -> None:
    """Make a run the reference of a machine, results/reference/NAME/, for everybody to replay and compare with."""
    from hyperion.reproduce.publishing import publish as publish_run
    from hyperion.results import Run, find_run

    folder, left_out = publish_run(Run.open(find_run(run)), name)
    say(f"published: {folder}")
    if left_out:
        say(f"left out for their size: {', '.join(left_out)}")


def _report_of(reports: list) -> None:
    for entry in reports:
        say(f"{entry.status:<7} {entry.name}: {entry.detail}")
    if any(entry.status != "ok" for entry in reports):
        raise typer.Exit(1)


if __name__ == "__main__":
    sys.exit(main())
