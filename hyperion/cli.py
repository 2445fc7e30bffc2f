"""The `hyperion` command. Every option of `hyperion reproduce` is also a variable: PROFILE=smoke means --profile smoke.

It must start fast: PyTorch and other slow packages are imported inside functions only.
"""

import getpass
import json
import os
import secrets
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from hyperion.commands.compare import compare, relaunch
from hyperion.commands.console import PlainTextConsole, console, parse_duration, run_app
from hyperion.errors import LARGEST_SEED, HyperionError
from hyperion.paths import data_folder, project_root, results_folder
from hyperion.terminal import run_command, say

FIRST_PORT = 8888
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
RunName = Annotated[str, typer.Argument(help="A run: its folder or name, `latest`, or a reference machine's name.")]

app = typer.Typer(
    help="Hyperion: an executable book of ML-systems engineering.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Prepared and staged data.", no_args_is_help=True)
app.add_typer(data_app, name="data")


def main() -> int:
    """Run the command line and return the exit code; an error that a user can correct is printed with its next step."""
    return run_command(lambda: run_app(app, "hyperion", sys.argv[1:]))


@app.command()
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


app.command()(compare)
app.command()(relaunch)


@app.command()
def verify(run: RunName = "latest") -> None:
    """Check a run: files against their hashes, rows against their rules and their samples; one line for each proven statement.

    The last lines list what is not proven: rows that cannot be recomputed from samples, and files missing in the manifest.
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
    """Stage all data and tokenizers while there is a network; afterwards no command needs one."""
    from hyperion.data import fetch_all

    reports = fetch_all()
    for entry in reports:
        say(f"{entry.status:<7} {entry.name}: {entry.detail}")
    if any(entry.status != "ok" for entry in reports):
        raise typer.Exit(1)


@data_app.command("verify")
def verify_data(
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
    from hyperion.data.prepare.verify import verify

    verdicts = verify(folder)
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


@app.command()
def lab(
    port: Annotated[int | None, typer.Option(help="Port on loopback.", show_default="the first free one from 8888")] = None,
) -> None:
    """Start JupyterLab on this checkout, on loopback with a token; print the ssh line for a remote node."""
    from hyperion.reproduce.kernels import library_environment

    chosen = free_port() if port is None else port
    token = secrets.token_hex(24)
    command = lab_command(project_root(), chosen)
    print("\n".join(lab_lines(chosen, token)), flush=True)
    # exec, not a child: signals, the terminal and the exit code are those of the server.
    os.execve(command[0], command, {**library_environment(), "JUPYTER_TOKEN": token})


def free_port(first: int = FIRST_PORT) -> int:
    """Return the first free loopback port from `first` on.

    Raises:
        HyperionError: a hundred ports in a row are taken.
    """
    for port in range(first, first + 100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise HyperionError("no free port", where=f"127.0.0.1:{first}-{first + 99}", next_step="name another with --port")


def lab_command(root: Path, port: int) -> list[str]:
    """Return the command that serves the checkout on loopback only.

    The token is passed in the environment: other users of the machine can read a process's arguments.

    Raises:
        HyperionError: JupyterLab is not installed.
    """
    if find_spec("jupyterlab") is None:
        raise HyperionError("JupyterLab is not installed", where=sys.executable, next_step="pip install -e '.[lab]'")
    options = ["--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
    if os.geteuid() == 0:  # common in containers; the server refuses to start for root without this option
        options.append("--allow-root")
    return [sys.executable, "-s", "-m", "jupyterlab", *options, f"--ServerApp.root_dir={root}"]


def lab_lines(port: int, token: str) -> list[str]:
    """Return the address to open, and the ssh command to type first on another machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, the user's number may have no entry in the password file
        user = str(os.getuid())
    return [
        f"open      http://127.0.0.1:{port}/lab?token={token}",
        f"remotely  ssh -N -L {port}:127.0.0.1:{port} {user}@{socket.gethostname()}    then open the same address there",
    ]


@app.command()
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


def print_numerics() -> int:
    """Print this device's numbers next to the float64 ones; return 1 when one exceeds its tolerance."""
    from hyperion.doctor.numerics import check_numerics, numerics_table

    report = check_numerics(on_line=say)
    console().print(numerics_table(report))
    for line in filter(None, (report.note, report.conclusion)):
        say(line)
    return 0 if report.passed else 1


def _print_checks() -> int:
    """Print every finding with its evidence and remedy; return 1 when one is a failure."""
    from hyperion.doctor import run_checks

    output, results = console(), run_checks()
    for result in results:
        colour = _COLOURS.get(result.status, "white")
        output.print(f"[{colour}]{result.status:<5}[/] {result.id}: ", end="")
        say(result.evidence)
        if result.remedy:
            say(f"      next:  {result.remedy}")
    return 1 if any(result.status == "fail" for result in results) else 0


def _print_floors(run: str | None) -> int:
    """Print the floors and the measured values of this machine or of a run; return 1 when a floor is not met."""
    from hyperion.doctor import check_floors, floor_table

    report = check_floors(run)
    if report.verdicts:
        console().print(floor_table(report))
    say(report.conclusion)
    return 1 if report.healthy is False else 0


def _print_harness() -> int:
    """Print which planted faults were refused; return 1 when a fault passed or a correct measurement was refused."""
    from hyperion.doctor.harness import self_test, self_test_conclusion, self_test_table

    results = self_test()
    console().print(self_test_table(results))
    say(self_test_conclusion(results))
    return 0 if all(result.passed for result in results) else 1


def _print_comparison_trials() -> int:
    """Print the comparisons of real launches; return 1 when a planted 10 % was missed or false alarms were too many."""
    from hyperion.doctor.comparison import conclusion, is_reliable, try_comparison

    trials, folder = try_comparison(on_line=say)
    for line in (*conclusion(trials), f"rows and every comparison: {folder}"):
        say(line)
    return 0 if is_reliable(trials) else 1


@app.command()
def passport(
    files: Annotated[list[Path] | None, typer.Argument(help="With --verify: passport files.", show_default=False)] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check files instead of measuring.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Where to write it.", show_default="results/passports/<device>.json")
    ] = None,
    time_limit: Annotated[str, typer.Option(help="Approximate time to take: 40s, 5m.")] = "5m",
) -> None:
    """Write what this machine is and reaches into one file that can be shared: fingerprint, ceilings, floors, hashes.

    To contribute your machine, add the file under results/passports/ in a pull request. With --verify: exit code 0 when all
    files follow the rules, 1 with the field and the reason when one does not.
    """
    if verify != bool(files):
        raise HyperionError("files and --verify go together", next_step="hyperion passport --verify FILE [FILE ...]")
    time_limit_s = parse_duration(time_limit, "--time-limit")
    from hyperion.passport import PassportError, measure_passport, passport_name, verify_passport, write_passport
    from hyperion.results.store import PASSPORTS

    if not files:
        content = measure_passport(time_limit_s)
        path = output or results_folder() / PASSPORTS / passport_name(content)
        write_passport(content, path)
        say(f"{path}: {verify_passport(path)} values")
    refused = False
    for path in files or ():
        try:
            say(f"{path}: {verify_passport(path)} values keep the rules")
        except PassportError as error:
            refused = True
            say(f"{path}: {error.what}")
    raise typer.Exit(int(refused))


@app.command()
def env() -> None:
    """Print this machine's fingerprint as it goes into run.json: versions, device, driver."""
    from hyperion.hardware import fingerprint

    say(json.dumps(fingerprint(), indent=1, sort_keys=True))


@app.command()
def clean(
    runs: Annotated[bool, typer.Option("--runs", help="Also your own runs (never results/reference/).")] = False,
    data: Annotated[bool, typer.Option("--data", help="Also downloaded and prepared data.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list.")] = False,
) -> None:
    """Remove the caches and build products of a checkout; runs and data only on request. No file in git is touched.

    Removes only files that Hyperion wrote and marked, and follows no link. If a run or the data folder also holds another
    file, or a file that was changed, this file is listed and nothing is removed.
    """
    from hyperion.reproduce.housekeeping import removable, remove

    for path in removable(project_root(), results_folder(), data_folder(), runs=runs, staged_data=data):
        if not dry_run:
            remove(path)
        say(f"{'would remove' if dry_run else 'removed'} {path}")


@app.command()
def publish(run: RunName, name: Annotated[str, typer.Argument(help="The machine's name: h200.")]) -> None:
    """Make a run the reference of a machine, results/reference/NAME/, to replay and to compare with."""
    from hyperion.reproduce.publishing import publish as publish_run
    from hyperion.results import Run, find_run

    folder, left_out = publish_run(Run.open(find_run(run)), name)
    say(f"published: {folder}")
    if left_out:
        say(f"left out for their size: {', '.join(left_out)}")
