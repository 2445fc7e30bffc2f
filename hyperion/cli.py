"""The `hyperion` command.

Every option of `hyperion reproduce` can also be set with an environment variable: PROFILE=smoke means --profile smoke.

The command must start fast, so PyTorch and other packages that are slow to import are imported only inside functions.
"""

import ast
import getpass
import hashlib
import json
import os
import secrets
import signal
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from hyperion.commands.compare import compare, relaunch
from hyperion.commands.console import PlainTextConsole, console, parse_duration, run_app
from hyperion.commands.doctor import doctor
from hyperion.commands.environment import env
from hyperion.commands.export import export
from hyperion.commands.frameworks import app as frameworks_app
from hyperion.commands.megatron import app as megatron_app
from hyperion.commands.monitor import monitor
from hyperion.commands.port import app as port_app
from hyperion.errors import LARGEST_SEED, HyperionError, require_writable
from hyperion.garbage import collect_rarely
from hyperion.paths import data_folder, project_root, results_folder
from hyperion.terminal import run_command, say

FIRST_PORT = 8888
LAB = "lab"  # folder of the reader's copies of the notebooks, in the checkout
RunName = Annotated[
    str, typer.Argument(help="A run: the path or the name of its folder, `latest`, or the name of a reference machine.")
]

app = typer.Typer(
    help="Hyperion: an executable book of ML-systems engineering.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Prepared and staged data.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(frameworks_app, name="frameworks")
app.add_typer(port_app, name="port")
app.add_typer(megatron_app, name="megatron")


def main() -> int:
    """Run the command line and return the exit code.

    An error that the user can correct is printed together with its next step.
    """
    collect_rarely()
    return run_command(lambda: run_app(app, "hyperion", sys.argv[1:]))


@app.command()
def reproduce(
    profile: Annotated[
        str,
        typer.Option(
            envvar="PROFILE",
            help="smoke (takes minutes on a CPU), full (real sizes), study (more seeds), replay (measures nothing and uses the "
            "numbers of a reference machine), or auto. auto means smoke on a CPU and full on an accelerator.",
        ),
    ] = "auto",
    only: Annotated[
        str | None,
        typer.Option(
            envvar="ONLY",
            help="Run these chapters and the chapters that they need, as --only 01_hardware_exploration or --only 1.1,2.4.",
            show_default="all",
        ),
    ] = None,
    data_source: Annotated[
        str,
        typer.Option(
            envvar="DATA_SOURCE",
            help="mirror (the folder that HYPERION_DATA_MIRROR names), cache, download or synthetic. auto takes the first of "
            "these sources that is available.",
        ),
    ] = "auto",
    run: Annotated[
        str | None,
        typer.Option(
            envvar="RUN",
            help="`new` starts a new run. Any other text is the name of a run under results/: this run is continued, or started "
            "if it does not exist.",
            show_default="the newest run with the same profile, data source, seed, device and versions",
        ),
    ] = None,
    time_budget: Annotated[
        str | None,
        typer.Option(
            envvar="TIME_BUDGET",
            help="Stop cleanly after this time, as 360 (seconds), 6m or 1h30m. A later call continues.",
            show_default="no limit",
        ),
    ] = None,
    cell_timeout: Annotated[
        str | None,
        typer.Option(
            envvar="CELL_TIMEOUT",
            help="Time limit of a cell, as 900 (seconds), 15m or 2h. A cell that takes longer fails, and its notebook fails too.",
            show_default="15m in smoke, 30m in full, 6h in study, 10m in replay",
        ),
    ] = None,
    notebook_timeout: Annotated[
        str | None,
        typer.Option(
            envvar="NOTEBOOK_TIMEOUT",
            help="Time limit of a notebook, as 1800 (seconds), 30m or 4h. A notebook that takes longer fails.",
            show_default="30m in smoke, 60m in full, 12h in study, 20m in replay",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(envvar="SEED", min=0, max=LARGEST_SEED, help="Seed of all random numbers.")] = 0,
    replay_of: Annotated[
        str | None,
        typer.Option(
            envvar="REPLAY_OF",
            help="Reference machine to replay, with profile replay.",
            show_default="the first machine that has results of the chapter",
        ),
    ] = None,
) -> None:
    """Execute the notebooks in order. A second call runs only the notebooks that failed or changed.

    Results go to results/<run>/ (HYPERION_RESULTS names another folder): rows, samples, tables and pictures by subject,
    executed notebooks and their HTML pages. results/latest points to the newest finished run.

    Exit codes: 0 all notebooks are done; 1 a notebook failed or found something unexpected (the other notebooks were still
    run); 2 the request cannot be carried out; 3 the time budget ended before all notebooks were done; 130 or 143 the call was
    stopped by Ctrl-C or SIGTERM. After any of these, the same command continues where the last call ended.
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
app.command()(export)


@app.command()
def experiments(
    word: Annotated[
        str | None,
        typer.Argument(help="List only experiments with this text in their chapter, name or question.", show_default="all"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list with chapter, notebook, name and question.")] = False,
) -> None:
    """List the experiments, including those of your own subjects.

    `hyperion launches mine gemm --count 1` runs the experiment gemm alone, and `hyperion reproduce --only 1.1` runs a chapter.
    """
    from hyperion.reproduce.notebooks import read_book

    found = [
        {"chapter": notebook.number, "notebook": notebook.stem, "experiment": name, "question": _question(name)}
        for notebook in read_book(project_root())
        for name in notebook.produces
    ]
    chosen = [one for one in found if word is None or word.casefold() in " ".join(one.values()).casefold()]
    if not chosen:
        raise HyperionError(
            f"no experiment has {word!r} in its chapter, name or question", next_step="list all: hyperion experiments"
        )
    if as_json:
        print(json.dumps(chosen, indent=2))
        return
    table = Table("chapter", "experiment", "question or purpose")
    for one in chosen:
        # The notebooks of added subjects have no number.
        table.add_row(*map(escape, (one["chapter"] or one["notebook"], one["experiment"], one["question"])))
    console().print(table)


def _question(experiment: str) -> str:
    """Return the first line of the docstring of an experiment's module. The module is not imported, because it may need torch."""
    from hyperion.chapter.subjects import subject_of

    subject = subject_of(experiment)
    source = (subject.folder / f"{experiment}.py").read_text(encoding="utf-8") if subject else ""
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


# Options after the name of the watched command belong to that command.
app.command(context_settings={"allow_interspersed_args": False})(monitor)


@app.command()
def verify(run: RunName = "latest") -> None:
    """Check the files of a run against their hashes, and the rows against their rules and their samples.

    Prints one line for each statement that was proven. The last lines list what could not be proven: rows that cannot be
    recomputed from samples, and files that are missing from the manifest.
    """
    from hyperion.results import Run, find_runs, verify_run

    for store in map(Run.open, find_runs(run)):
        say(f"{store.folder}:")
        for statement in verify_run(store):
            say(f"  {statement}")


@app.command()
def report(run: RunName = "latest") -> None:
    """Write the report of a run: one HTML page with tables and pictures. The report is made only from the rows of the run.

    The report of a reference is written to the folder of the results, because references are in git and have a page of their own.
    The report of a run whose folder cannot be written is written there too. Both are named report-RUN.html.
    """
    from hyperion.book import Material, write_report
    from hyperion.paths import reference_folder, results_folder, shipped_reference_folder
    from hyperion.results import Run, find_run

    store = Run.open(find_run(run))
    references = [folder.resolve() for folder in (reference_folder(), shipped_reference_folder())]
    elsewhere = store.folder.resolve().parent in references or not os.access(store.folder, os.W_OK)
    page = results_folder() / f"report-{store.folder.name}.html" if elsewhere else None
    material = Material(store)
    say(f"report: {write_report(store, material, page)}")
    for error in material.not_drawn.values():
        raise error


@app.command()
def fetch() -> None:
    """Download all data and tokenizers into the cache. Afterwards no command needs a network."""
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
    """Check prepared and staged data: hashes, records, vocabulary, labels and pixels, and that no splits are swapped.

    For each damaged file, the output names the record and the reason. Damaged files are moved to quarantine/. The exit code is
    0 if all data are unchanged, and 1 if a file is damaged.
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
            say(f"        moved to {verdict.moved_to}; nothing was deleted")
        if verdict.next_step:
            say(f"        next:  {verdict.next_step}")
    damaged = sum(bool(verdict.findings) for verdict in verdicts)
    say(f"{len(verdicts)} data sets, {damaged} damaged" if verdicts else "nothing is prepared or staged yet")
    raise typer.Exit(1 if damaged else 0)


@app.command()
def lab(
    port: Annotated[
        int | None, typer.Option(help="Port on loopback.", min=1024, max=65535, show_default="the first free one from 8888")
    ] = None,
) -> None:
    """Start JupyterLab with your own copies of the notebooks, reachable only from this machine and with a token.

    The copies are in the folder lab/ of the checkout, so that your answers and outputs change no file in git. Also prints the ssh
    command that makes JupyterLab reachable from another machine. JupyterLab continues when the terminal closes. To stop it, press
    Ctrl-C twice, or choose File > Shut Down.
    """
    chosen = free_port() if port is None else port
    if not _is_free(chosen):
        raise HyperionError("the port is in use", where=f"127.0.0.1:{chosen}", next_step="name another port, or leave out --port")
    token = secrets.token_hex(24)
    command = lab_command(project_root(), chosen)
    try:
        notices = copy_notebooks(project_root())
    except HyperionError as error:  # for example, the checkout is read-only
        notices = [f"the notebooks cannot be copied into {LAB}/, so open the originals: {error.what}"]
    for line in (*notices, *lab_lines(chosen, token)):
        print(line, flush=True)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the program that exec starts inherits this setting
    # exec instead of a child process: the server receives the signals and the terminal, and its exit code is the command's.
    os.execve(command[0], command, lab_environment(token))


def free_port(first: int = FIRST_PORT) -> int:
    """Return the first free loopback port that is at least `first`.

    Raises:
        HyperionError: none of the 100 ports starting at `first` is free.
    """
    for port in range(first, first + 100):
        if _is_free(port):
            return port
    raise HyperionError("no free port", where=f"127.0.0.1:{first}-{first + 99}", next_step="name another port with --port")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


# By default, JupyterLab downloads news and looks for updates and extensions. Compute nodes have no network, and after
# `make fetch` nothing may open a connection. JupyterLab would still ask whether it may, so `_SETTINGS` answers.
_OFFLINE = (
    "--LabApp.news_url=None",
    "--LabApp.check_for_updates_class=jupyterlab.handlers.announcements.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
)
_SETTINGS = Path(__file__).parent / "commands"  # its folder labconfig/ has defaults of settings; see jupyterlab_server
# Otherwise some 20 lines of its log follow the lines of `lab_lines`, among them the address with "..." in place of the token.
_QUIET = ("--log-level=WARN", "--LabApp.log_level=WARN")


def lab_command(root: Path, port: int) -> list[str]:
    """Return the command that starts JupyterLab in the checkout, on the loopback address only.

    The token is passed in an environment variable and not in the command, because other users of the machine can read the
    arguments of a process.

    Raises:
        HyperionError: JupyterLab is not installed.
    """
    if find_spec("jupyterlab") is None:
        raise HyperionError("JupyterLab is not installed", where=sys.executable, next_step="pip install -e '.[lab]'")
    options = ["--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0", *_QUIET, *_OFFLINE]
    if os.geteuid() == 0:  # common in containers; without this option the server refuses to start for root
        options.append("--allow-root")
    return [sys.executable, "-s", "-m", "jupyterlab", *options, f"--ServerApp.root_dir={root}"]


def lab_environment(token: str) -> dict[str, str]:
    """Return the environment variables of JupyterLab. The settings of the user have precedence over those of this library."""
    from hyperion.reproduce.kernels import library_environment

    variables = library_environment()
    folders = [*filter(None, [variables.get("JUPYTER_CONFIG_PATH")]), str(_SETTINGS)]
    return variables | {"JUPYTER_TOKEN": token, "JUPYTER_CONFIG_PATH": os.pathsep.join(folders)}


def copy_notebooks(root: Path) -> list[str]:
    """Copy the notebooks of a checkout into its folder lab/, and return one line for each copy that is out of date.

    A copy that the reader changed is never replaced. A copy without changes is replaced if the original changed.

    Raises:
        StoreError: the folder cannot be written.
    """
    from hyperion.results.files import make_folder, write_atomically

    record = root / LAB / ".copied.json"
    copied = _copied(record)
    lines = []
    for original in sorted(root.glob("phase*/*.ipynb")):
        name = original.relative_to(root).as_posix()
        copy, content = root / LAB / name, original.read_bytes()
        digest, of_copy = _sha256(content), _sha256(copy.read_bytes()) if copy.is_file() else ""
        if digest == copied.get(name) and of_copy:
            continue
        if of_copy not in ("", digest, copied.get(name)):
            lines.append(f"{LAB}/{name} has your changes, and the original changed. To get the new original, rename your copy.")
            continue
        make_folder(copy.parent)
        write_atomically(copy, content)
        copied[name] = digest
        write_atomically(record, json.dumps(copied, indent=1).encode())
    return lines


def _copied(record: Path) -> dict[str, str]:
    """Return a dict that maps the name of each copied file to the hash of its original at the time of copying.

    Return an empty dict if the record cannot be read. Then every copy is treated as if the user may have changed it.
    """
    try:
        copied = json.loads(record.read_bytes())
    except (OSError, ValueError):
        return {}
    return copied if isinstance(copied, dict) else {}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def lab_lines(port: int, token: str) -> list[str]:
    """Return three lines: the address to open in a browser, the ssh command for another machine, and how to stop JupyterLab."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, the user id may have no entry in the password file
        user = str(os.getuid())
    return [
        f"open      http://127.0.0.1:{port}/lab/tree/{LAB}?token={token}",
        f"remotely  ssh -N -L {port}:127.0.0.1:{port} {user}@{socket.gethostname()}    then open the same address there",
        "stop      press Ctrl-C twice, or choose File > Shut Down; JupyterLab continues when the terminal closes",
    ]


app.command()(doctor)


@app.command()
def passport(
    files: Annotated[list[Path] | None, typer.Argument(help="With --verify: passport files.", show_default=False)] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check files instead of measuring.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="File to write.", show_default="results/passports/<device>.json, never over an existing file"),
    ] = None,
    time_limit: Annotated[str, typer.Option(help="Approximate time for the measurements, as 40s or 5m.")] = "5m",
) -> None:
    """Describe this machine in one file that can be shared: fingerprint, measured ceilings, floors and hashes.

    To contribute your machine, add the file under results/passports/ in a pull request. With --verify, the exit code is 0 if all
    files follow the rules. If a file breaks a rule, the output names the field and the reason, and the exit code is 1.
    """
    if verify != bool(files):
        raise HyperionError(
            "files and --verify must be given together",
            next_step="to check files: hyperion passport --verify FILE [FILE ...]; to measure: hyperion passport",
        )
    time_limit_s = parse_duration(time_limit, "--time-limit")
    from hyperion.passport import (
        PassportError,
        measure_passport,
        new_passport_path,
        not_measured,
        verify_passport,
        write_passport,
    )
    from hyperion.results.places import PASSPORTS

    if not files:
        # Both are checked first, because the measurement takes minutes.
        if output is not None and output.exists():
            raise HyperionError("there is already a file with this name", where=output, next_step="choose another --output")
        folder = results_folder() / PASSPORTS if output is None else output.parent
        require_writable(
            folder,
            HyperionError,
            action="cannot write the passport",
            unchanged="nothing was measured",
            elsewhere="name another file with --output FILE",
        )
        content = measure_passport(time_limit_s)
        path = output or new_passport_path(content, folder)
        write_passport(content, path)
        say(f"{path}: {verify_passport(path)} values")
        for line in not_measured(content):
            say(line)
    refused = False
    for path in files or ():
        try:
            say(f"{path}: {verify_passport(path)} values follow the rules")
        except PassportError as error:
            refused = True
            say(f"{path}: {error.what}")
    raise typer.Exit(int(refused))


app.command()(env)


@app.command()
def clean(
    runs: Annotated[bool, typer.Option("--runs", help="Also remove your own runs. results/reference/ is never removed.")] = False,
    data: Annotated[bool, typer.Option("--data", help="Also remove downloaded and prepared data.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be removed, and remove nothing.")] = False,
) -> None:
    """Remove the caches and build files of a checkout. Runs and data are removed only with --runs and --data.

    The command removes only files that Hyperion wrote and marked. It removes no file in git and follows no link. If a run or the
    data folder contains a file that Hyperion did not write, or a file that was changed, the command lists this file and removes
    nothing.
    """
    from hyperion.reproduce.housekeeping import removable, remove

    for path in removable(project_root(), results_folder(), data_folder(), runs=runs, staged_data=data):
        if not dry_run:
            remove(path)
        say(f"{'would remove' if dry_run else 'removed'} {path}")


@app.command(name="headlines")
def headline_pages(
    pages: Annotated[
        list[Path] | None,
        typer.Argument(help="Markdown pages with markers.", show_default="README.md, docs/headlines.md, docs/claims.md"),
    ] = None,
) -> None:
    """Regenerate the headlines in README.md and docs/headlines.md, and docs/claims.md, from the rows of the reference runs.

    A time or a rate is a headline if at least five launches of the same code measured it.
    """
    from hyperion.book.headline_page import update_page

    for page in pages or [Path("README.md"), Path("docs/headlines.md"), Path("docs/claims.md")]:
        for marker in update_page(page):
            say(f"{page}: made again: {marker}")


@app.command()
def launches(
    name: Annotated[str, typer.Argument(help="Name of the folder of all launches, such as h200-launches.")],
    experiments: Annotated[list[str], typer.Argument(help="Experiments, such as gemm bandwidth language_training_speed.")],
    count: Annotated[int, typer.Option(min=1, help="Number of launches.")] = 5,
    profile: Annotated[str, typer.Option(envvar="PROFILE", help="smoke, full, study or auto.")] = "auto",
    data_source: Annotated[str, typer.Option(envvar="DATA_SOURCE", help="As in `hyperion reproduce`.")] = "auto",
) -> None:
    """Measure experiments in several launches, each in new processes. `hyperion headlines` needs at least five launches.

    The runs are results/NAME/1, results/NAME/2, …. A second call measures only what is missing. `hyperion publish NAME NAME`
    copies them to the reference results.
    """
    from hyperion.reproduce.launches import measure_launches
    from hyperion.results.places import checked_name

    folder = results_folder() / checked_name(name)
    measure_launches(folder, experiments, count, profile=profile, data_source=data_source, on_line=say)
    say(f"launches: {folder}")


@app.command()
def publish(
    run: Annotated[str, typer.Argument(help="Path or name of a run, `latest`, or the name of a folder of launches.")],
    name: Annotated[str, typer.Argument(help="Name of the machine, such as h200, or of the launches, such as h200-launches.")],
    pages: Annotated[bool, typer.Option(help="Also copy the pages of the executed notebooks, as far as there is room.")] = True,
) -> None:
    """Copy a run to results/reference/NAME/ as the reference of a machine. Other runs can be compared with a reference, and
    `--profile replay` uses its numbers.

    If RUN is a folder of launches, the rows and samples of all launches are copied. A replay does not use them.
    """
    from hyperion.reproduce.launches import publish_launches
    from hyperion.reproduce.publishing import publish as publish_run
    from hyperion.results import Run, find_runs

    found = find_runs(run)
    if len(found) > 1:
        say(f"published: {publish_launches(found, name)}")
        return
    folder, left_out = publish_run(Run.open(found[0]), name, pages=pages)
    say(f"published: {folder}")
    if left_out:
        say(f"not published, because the size limit is reached: {', '.join(left_out)}")
