"""The commands `hyperion frameworks`: list, install and train with other frameworks. The rest is in frameworks_benchmark.py."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from hyperion.commands.console import console, one_of
from hyperion.commands.frameworks_benchmark import add_commands
from hyperion.errors import HyperionError
from hyperion.paths import results_folder
from hyperion.terminal import say

app = typer.Typer(help="Other training frameworks, for chapter 2.10.", no_args_is_help=True)
add_commands(app)


@app.command("list")
def list_frameworks() -> None:
    """List the frameworks, the environment of each one, and the reason if it is unavailable."""
    from hyperion.engines import STACKS

    table = Table("framework", "ranks on a CPU", "environment", "state")
    for stack in STACKS.values():
        reason = stack.why_absent()
        table.add_row(stack.name, str(stack.ranks), stack.environment or "this one", escape(reason or "ready"))
    console().print(table)


@app.command()
def install(
    names: Annotated[list[str] | None, typer.Argument(help="Environments, as fabric or deepspeed.", show_default=False)] = None,
    everything: Annotated[bool, typer.Option("--all", help="Install all environments.")] = False,
) -> None:
    """Install frameworks, each in its own environment, which uses the torch of this environment.

    No other command installs frameworks. The environments are in data/frameworks/. To uninstall a framework, remove its folder
    there. If one environment cannot be installed, the others are still installed, and the exit code is 1.
    """
    from hyperion.engines.environments import ENVIRONMENTS
    from hyperion.engines.environments import install as install_environment
    from hyperion.engines.stacks import environment_named

    if everything == bool(names):
        raise HyperionError(
            "name the frameworks to install, or give --all",
            where="hyperion frameworks install",
            next_step=f"choose from {', '.join(ENVIRONMENTS)}",
        )
    failed = []
    for name in [environment_named(name) for name in names or ENVIRONMENTS]:
        try:
            say(f"{name}: {install_environment(name, on_line=lambda line: say(f'  {line}'))}")
        except HyperionError as error:
            failed.append(name)
            say(f"{name}: FAILED\n{error}")
    if failed:
        raise typer.Exit(1)


@app.command()
def train(
    frameworks: Annotated[list[str], typer.Argument(help="Names as in `hyperion frameworks list`.")],
    work: Annotated[Path, typer.Option(help="Folder with config.json, model.safetensors and tokens.npy.")],
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps.")] = 20,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a step, over all ranks.")] = 8,
    dtype: Annotated[str, typer.Option(callback=one_of(("fp32", "bf16")), help="fp32 or bf16.")] = "fp32",
    output: Annotated[Path | None, typer.Option(help="Folder for the records.", show_default="results/frameworks/")] = None,
) -> None:
    """Train the same workload with several frameworks, one after the other, and write a JSON file for each one that ran.

    If a framework fails or is killed, the others continue. Exit codes: 0 all available frameworks trained; 1 a framework failed;
    3 none of the frameworks is available, and no file was written.
    """
    from hyperion.engines import Stack, Work, stack_named
    from hyperion.engines.launch import exit_code, launch, launch_all
    from hyperion.engines.work import stored_tokens
    from hyperion.reproduce.execution import Stopped, stoppable

    stacks = [stack_named(name) for name in frameworks]
    length = stored_tokens(work).shape[1] - 1
    what, folder = Work(str(work), steps, batch_size, length, dtype=dtype), output or results_folder() / "frameworks"

    def launch_one(stack: Stack):
        say(f"{stack.name} …")
        return launch(stack, what, folder / stack.name.replace(" ", "-"), on_line=lambda line: None)

    try:
        with stoppable():  # SIGTERM must end this command, and not only the framework that trains
            outcomes = list(launch_all(stacks, launch_one))
    except Stopped as signal:
        say(f"stopped by {signal}")
        raise typer.Exit(signal.exit_code) from None
    for outcome in outcomes:
        if outcome.record is not None:
            file = folder / f"{outcome.stack.replace(' ', '-')}.json"
            file.write_text(json.dumps(outcome.record.as_dict(), indent=1), "utf-8")
    print_summary(outcomes)
    raise typer.Exit(exit_code(outcomes))


def print_summary(outcomes: Sequence) -> None:
    """Print a table with one line per framework, and a last line that names the frameworks that failed.

    A line of the table contains the losses of the framework, or the reason why it did not train.
    """
    table = Table("framework", "ranks", "first loss", "last loss", "state")
    for outcome in outcomes:
        record = outcome.record
        numbers = [str(record.ranks), f"{record.losses[0]:.5f}", f"{record.losses[-1]:.5f}"] if record else ["", "", ""]
        table.add_row(outcome.stack, *numbers, escape(outcome.reason or "trained"))
    console().print(table)
    failed = [outcome.stack for outcome in outcomes if outcome.failed]
    say(f"{len(failed)} of {len(outcomes)} frameworks failed: {', '.join(failed)}" if failed else "no framework failed")
