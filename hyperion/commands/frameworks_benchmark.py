"""The commands `hyperion frameworks` run, compare, archive, extract, validate, capabilities and docker.

The scripts in phase2_development/frameworks only call these commands.
"""

import itertools
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hyperion.commands.console import console, one_of, run_app
from hyperion.errors import HyperionError
from hyperion.paths import project_root
from hyperion.terminal import run_command, say

if TYPE_CHECKING:
    from hyperion.frameworks.plan import Plan
    from hyperion.frameworks.progress import Progress

FRAMEWORKS = "FRAMEWORKS"
_PROGRESS_INTERVAL_S = 10.0
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Configuration file.", show_default="the defaults of config.yaml")
]
FrameworkNames = Annotated[
    list[str] | None,
    typer.Option("--frameworks", help="Names such as tran,deep; also FRAMEWORKS=.", show_default="those that are enabled"),
]
OutputFolder = Annotated[
    str | None,
    typer.Option("--output-dir", help="Folder of the JSON files; also CONFIG_OUTPUT_DIR=.", show_default="results/frameworks"),
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this module to the application `hyperion frameworks`."""
    for command in (run, compare, archive, extract, validate, capabilities):
        app.command()(command)
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(docker)


def main(command: str, fixed: list[str], words_are: str = "") -> int:
    """Run a command of this module for a script, and return its exit code.

    Args:
        command: name of the command.
        fixed: arguments that the script adds before those of its user.
        words_are: option, such as "--model", whose values are the arguments before the user's first option.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    add_commands(app)
    given = sys.argv[1:]
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), given)) if words_are else []
    named = [part for word in words for part in (words_are, word)]
    arguments = [command, *fixed, *named, *given[len(words) :]]
    return run_command(lambda: run_app(app, Path(sys.argv[0]).name, arguments))


def run(
    platform: Annotated[
        str, typer.Option(callback=one_of(("auto", "amd", "nvd")), help="amd, nvd, or auto: that of this machine, or nvd.")
    ] = "auto",
    frameworks: FrameworkNames = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="llama, qwen, or tiny for their tiny twins.", show_default="the models of the configuration"),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=2, max=1_000_000, help="Optimizer steps.", show_default="training.steps")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(callback=one_of(("bf16", "fp32")), help="bf16 or fp32.", show_default="training.precision")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(callback=one_of(("wikitext-2", "synthetic")), help="wikitext-2 or synthetic.", show_default="dataset"),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Parallelism preset.", show_default="parallelism.preset")] = None,
    config_file: ConfigFile = None,
    output_dir: OutputFolder = None,
    again: Annotated[bool, typer.Option("--again", help="Repeat runs that finished before.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the selected combinations and their state, and stop.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, train nothing and write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, and train nothing.")] = False,
) -> None:
    """Train the documented models with several frameworks, and write one JSON file for each combination that ran.

    If one combination fails, the others continue. A second call repeats only combinations that failed or whose settings changed.
    Exit codes:
    0 all available combinations have a result; 1 a combination failed; 2 the request cannot be carried out; 3 none is available;
    130 or 143 stopped by SIGINT or SIGTERM, after the ranks have ended.
    """
    from hyperion.frameworks.config import load_config, require_preset
    from hyperion.frameworks.plan import asked_platform, output_folder, resolve, select_frameworks, select_models
    from hyperion.frameworks.run import exit_code, log_file, run_plans
    from hyperion.hardware import collect_facts
    from hyperion.reproduce.execution import Stopped, stoppable

    config = load_config(config_file)
    training = replace(config.training, **{name: value for name, value in (("steps", steps), ("precision", precision)) if value})
    strategy = replace(config.parallelism, preset=preset) if preset else config.parallelism
    paths = replace(config.paths, output_dir=output_dir) if output_dir else config.paths
    config = replace(config, training=training, parallelism=strategy, paths=paths)
    config = replace(config, dataset=dataset) if dataset else config
    require_preset(config, "--preset")
    names = select_frameworks(frameworks or os.environ.get(FRAMEWORKS, ""), config)
    facts = collect_facts()
    dry_run = dry_run or listing or as_json
    asked, folder = asked_platform(platform, facts, dry_run), output_folder(config)
    models = select_models(model or [], config)
    plans = [resolve(config, name, one, asked, facts, dry_run) for one in models for name in names]
    if as_json:
        print(json.dumps([asdict(plan) | {"file": plan.file_name} for plan in plans], indent=1))
        return
    if dry_run:
        _print_plans(plans, folder)
        return
    outcomes = []

    def on_start(plan: "Plan") -> None:
        say(f"{plan.framework} {plan.model} … log: {log_file(plan, folder)}")

    stopped: Stopped | None = None
    try:
        # Without this, the ranks of a framework would end with SIGTERM, and the runner would train with the next framework.
        with stoppable(), ProgressLine(console()) as line:
            for outcome in run_plans(plans, folder, facts, again, on_start, line.show):
                line.clear()
                outcomes.append(outcome)
                state = outcome.state if outcome.failed else outcome.state.partition(":")[0]
                say(f"[{len(outcomes)}/{len(plans)}] {outcome.plan.framework} {outcome.plan.model}: {state}")
    except Stopped as signal:
        stopped = signal
    _print_outcomes(outcomes, folder)
    if stopped:
        left = len(plans) - len(outcomes)
        say(f"stopped by {stopped}: {left} of {len(plans)} combinations have no outcome; the same command trains them")
    raise typer.Exit(stopped.exit_code if stopped else exit_code(outcomes))


def compare(
    results_dir: Annotated[
        Path | None, typer.Option(help="Folder with result files.", show_default="CONFIG_OUTPUT_DIR or results/frameworks")
    ] = None,
    platform: Annotated[list[str] | None, typer.Option(help="Platforms: amd, nvd, cpu.", show_default="all")] = None,
    frameworks: Annotated[list[str] | None, typer.Option(help="Names such as tran,deep.", show_default="all")] = None,
    precision: Annotated[list[str] | None, typer.Option(help="Precisions, such as bf16.", show_default="all")] = None,
    output: Annotated[Path | None, typer.Option(help="The picture.", show_default="comparison.plot, beside the results")] = None,
    price: Annotated[
        list[str] | None, typer.Option(help="Price of a GPU hour, as amd=1.5.", show_default="comparison.price_per_gpu_hour")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Compare although the work differs. The report says how.")] = False,
    config_file: ConfigFile = None,
) -> None:
    """Compare result files, and write a table, a picture and a report.

    A framework is called faster only if the interval of its speed-up excludes a tie.

    With prices of a GPU hour, the table and the report also show the price of a million tokens. No price is assumed.
    Results for the same model are refused if their workloads differ in batch, sequence length, steps, learning rate, precision,
    data set, initial state, row order, optimizer, clipping or dtypes. Values that a file does not state are listed.
    """
    from hyperion.frameworks.comparison import (
        CAVEAT,
        choose_prices,
        compare_results,
        draw,
        load_results,
        markdown,
        price_note,
        table,
    )
    from hyperion.frameworks.config import load_config
    from hyperion.frameworks.plan import output_folder, select_frameworks

    if output is not None and output.suffix != ".png":
        raise HyperionError(f"{output.name!r} does not end in .png", where="--output", next_step="the picture is a PNG file")
    config = load_config(config_file)
    folder = results_dir or output_folder(config)
    chosen = select_frameworks(frameworks, config, extra=("mega",)) if frameworks else None
    results = load_results(folder, platform, chosen, precision)
    prices = choose_prices(config.comparison.price_per_gpu_hour, config.comparison.price_source, price or ())
    comparison = compare_results(results, force, prices)
    console().print(table(comparison))
    for line in comparison.verdicts:
        say(line)
    for line in comparison.unknown:
        say(line)
    say(CAVEAT)
    if prices:
        say(price_note(prices))
    picture = output or folder / config.comparison.plot
    for path in (picture, report := picture.with_name(config.comparison.report)):
        path.parent.mkdir(parents=True, exist_ok=True)
    from hyperion.results.files import write_atomically

    write_atomically(picture, draw(comparison, config.comparison.dpi))
    write_atomically(report, markdown(comparison, picture.name).encode())
    say(f"picture: {picture}\nreport:  {report}")


def archive(
    output: Annotated[Path | None, typer.Argument(help="The zip file.", show_default="archive.zip, beside the results")] = None,
    results_dir: Annotated[
        Path | None, typer.Option(help="Folder with result files.", show_default="CONFIG_OUTPUT_DIR or results/frameworks")
    ] = None,
    config_file: ConfigFile = None,
) -> None:
    """Pack the result files, logs, events and the comparison of a folder into a zip file with SHA-256 sums.

    The command refuses to make an archive if there is no result, if a file is invalid, or if the archive already exists.
    """
    from hyperion.frameworks.archive import write_archive
    from hyperion.frameworks.config import load_config
    from hyperion.frameworks.plan import output_folder

    config = load_config(config_file)
    folder = results_dir or output_folder(config)
    file = output or folder / "archive.zip"
    for name in write_archive(folder, file, [config.comparison.report, config.comparison.plot]):
        say(f"  {name}")
    say(f"archive: {file}")


def extract(
    log: Annotated[Path, typer.Argument(help="Log of Megatron-LM, Megatron-DeepSpeed or Primus.")],
    framework: Annotated[str, typer.Option(callback=one_of(("prim", "mgds", "mega")), help="prim, mgds or mega.")],
    platform: Annotated[str, typer.Option(callback=one_of(("amd", "nvd")), help="amd or nvd.")],
    model: Annotated[str, typer.Option(callback=one_of(("llama", "qwen")), help="llama or qwen.")],
    num_gpus: Annotated[int, typer.Option(min=1, help="GPUs of the run.")],
    sequence_length: Annotated[int, typer.Option(min=1, help="Scored tokens of a row.")],
    micro_batch_size: Annotated[int, typer.Option(min=1, help="Rows of a micro-batch.")],
    tensor: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="Pipeline-parallel size.")] = 1,
    dataset: Annotated[str, typer.Option(help="Data of the run.")] = "unknown",
    precision: Annotated[str, typer.Option(help="Format of matrix products, such as bf16.")] = "unknown",
    strategy: Annotated[str, typer.Option(help="Name of the parallelism.")] = "unknown",
    output_dir: OutputFolder = None,
    config_file: ConfigFile = None,
) -> None:
    """Make a result file from the log of a run that was started by hand. A log in an unknown format is an error.

    An existing result with the same name and other content is not replaced.

    The log does not contain the values of the options. A data set or a precision that is not given is "unknown" in the result.
    """
    from hyperion.frameworks.config import load_config
    from hyperion.frameworks.logs import RunFacts, result_of_log
    from hyperion.frameworks.plan import output_folder
    from hyperion.frameworks.result import write_result
    from hyperion.paths import expanded

    config = load_config(config_file)
    sizes = (num_gpus, sequence_length, micro_batch_size, tensor, pipeline, strategy, config.benchmark.skip_first_steps)
    result = result_of_log(log, RunFacts(framework, platform, model, dataset, precision, *sizes))
    say(f"result: {write_result(result, expanded(output_dir) if output_dir else output_folder(config))}")


def validate(
    files: Annotated[list[Path], typer.Argument(help="Result files.")],
    migrate: Annotated[bool, typer.Option("--migrate", help="Convert files of older generations.")] = False,
    values: Annotated[
        list[str] | None, typer.Option("--set", help="With --migrate: what an older file does not state, as precision=bf16.")
    ] = None,
    output_dir: Annotated[Path | None, typer.Option(help="With --migrate: new folder.", show_default="that of the file")] = None,
) -> None:
    """Check the fields of result files, and compare their values with the series in the same file.

    The exit code is 1 if a file is refused.

    With --migrate, a file in an older format is converted to the present format and written under its documented name. An
    existing file with this name is not replaced.
    """
    from hyperion.frameworks.result import migrate as migrated
    from hyperion.frameworks.result import read_result, write_result

    if (values or output_dir) and not migrate:
        raise HyperionError("--set and --output-dir do nothing without --migrate", next_step="add --migrate, or leave them out")
    known, refused = {}, False
    for word in values or ():
        name, separator, value = word.partition("=")
        if not separator or name not in ("platform", "framework", "model", "dataset", "precision"):
            next_step = "write --set platform=, framework=, model=, dataset= or precision= with a value"
            raise HyperionError(f"{word!r} sets nothing", where="--set", next_step=next_step)
        known[name] = value
    for path in files:
        try:
            if migrate:
                say(f"{path}: written again as {write_result(migrated(path, known), output_dir or path.parent, path)}")
            else:
                say(f"{path}: {' '.join(read_result(path).key)}, valid")
        except HyperionError as error:
            refused = True
            say(f"{path}: REFUSED\n{error}")
    raise typer.Exit(int(refused))


def capabilities(
    results_dir: Annotated[Path | None, typer.Option(help="Folder with result files.", show_default="results/frameworks")] = None,
    config_file: ConfigFile = None,
) -> None:
    """Print the capabilities of each framework on this machine, and the values that its result files contain.

    A probe finds a capability by importing the part of the framework that provides it.
    """
    from hyperion.frameworks.capabilities import MARKS, capability_rows
    from hyperion.frameworks.config import load_config
    from hyperion.frameworks.plan import output_folder

    config = load_config(config_file)
    headings, rows = capability_rows(config, results_dir or output_folder(config))
    table = Table(*headings)
    for row in rows:
        table.add_row(*map(escape, row))
    console().print(table)
    say(MARKS)


def docker(
    context: typer.Context,
    platform: Annotated[str, typer.Option(callback=one_of(("amd",)), help="amd.")] = "amd",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the line and start nothing. docker is not needed.")] = False,
    config_file: ConfigFile = None,
) -> None:
    """Run train_amd.sh in a container. Further arguments, the configuration and its environment variables are passed to it."""
    from hyperion.frameworks.config import load_config
    from hyperion.frameworks.docker import docker_command

    command = docker_command(load_config(config_file), project_root(), platform, context.args, os.environ, config_file)
    if dry_run:
        print(shlex.join(command))
        return
    if shutil.which("docker") is None:
        raise HyperionError("docker is not installed", where="PATH", next_step="install docker, or print the line with --dry-run")
    os.execvp(command[0], command)


class ProgressLine:
    """Shows the latest step of a run. A terminal shows one line that changes. Other outputs get a line every 10 s.

    Args:
        console: the console to print to.
        clock: function that returns the time in seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self._console, self._clock, self._said_s = console, clock, -math.inf
        # No refresh thread is used, because it would take CPU time from ranks that run on the CPU.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def show(self, plan: "Plan", progress: "Progress") -> None:
        """Show the progress of a run."""
        from hyperion.reproduce.execution import format_duration

        loss = "" if progress.loss is None else f", loss {progress.loss:.4f}"
        left = "" if progress.left_s is None else f", about {format_duration(progress.left_s)} left"
        line = f"{plan.framework} {plan.model}: step {progress.step}/{progress.steps}{loss}{left}"
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live.start()
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._clock() - self._said_s >= _PROGRESS_INTERVAL_S:
            self._said_s = self._clock()
            say(f"  {line}")

    def clear(self) -> None:
        """Remove the line from a terminal. The next run starts another one."""
        self._live.stop()
        self._said_s = -math.inf


def _print_plans(plans: list, folder: Path) -> None:
    from hyperion.frameworks.shapes import is_tiny

    table = Table("framework", "model", "platform", "devices", "TP·PP·DP, GA", "batch x length", "precision", "file", "state")
    for plan in plans:
        division = plan.parallelism
        sizes = (division.tensor_model_parallel_size, division.pipeline_model_parallel_size, division.data_parallel_size)
        shape = f"{plan.work['global_batch_size']} x {plan.work['sequence_length']}, {plan.work['steps']} steps"
        parts = f"{'·'.join(map(str, sizes))}, {division.gradient_accumulation_steps}"
        state = _state(plan.reason or "ready")
        table.add_row(
            plan.framework, plan.model, plan.platform, str(plan.devices), parts, shape, plan.precision, plan.file_name, state
        )
    console().print(table)
    _print_reasons([(plan, plan.reason) for plan in plans])
    for plan in plans:
        if plan.command and not is_tiny(plan.model):
            variables = [f"{name}={shlex.quote(value)}" for name, value in plan.environment.items()]
            place = f", in {plan.folder}" if plan.folder else ""
            say(f"{plan.framework} {plan.model} runs{place}: {' '.join([*variables, shlex.join(plan.command)])}")
    say(f"results: {folder}; nothing was trained or written")


def _print_reasons(states: list) -> None:
    """Print each reason once, with the combinations that it applies to."""
    reasons: dict[str, list[str]] = {}
    for plan, state in states:
        if ":" in state:
            reasons.setdefault(f"{plan.framework}: {state}", []).append(plan.model)
    for reason, models in reasons.items():
        say(f"{reason} ({', '.join(models)})")


def _state(state: str) -> str:
    return escape(state.partition(":")[0])


def _print_outcomes(outcomes: list, folder: Path) -> None:
    table = Table("framework", "model", "devices", "tokens/s/GPU", "step (s)", "last loss", "file", "state")
    for outcome in outcomes:
        plan, result = outcome.plan, outcome.result
        numbers = [""] * 4
        if result:
            metrics = result.performance_metrics
            each, mean = metrics.tokens_per_second_per_gpu, metrics.avg_step_time_seconds
            numbers = [f"{each:,.0f}", f"{mean:.4g}", f"{result.loss_values[-1]:.4f}", result.file_name]
        table.add_row(plan.framework, plan.model, str(plan.devices), *numbers, _state(outcome.state))
    console().print(table)
    _print_reasons([(outcome.plan, outcome.state) for outcome in outcomes])
    failed = [f"{outcome.plan.framework} {outcome.plan.model}" for outcome in outcomes if outcome.failed]
    say(f"{len(failed)} of {len(outcomes)} combinations failed: {', '.join(failed)}" if failed else "no combination failed")
    say(f"results: {folder}")
