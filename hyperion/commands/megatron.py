"""The command `hyperion megatron adapt`: let megatron-core run without CUDA, or restore its published files."""

from pathlib import Path
from typing import Annotated

import typer

from hyperion.paths import expanded
from hyperion.terminal import say

app = typer.Typer(help="The adaptation of megatron-core to devices without CUDA.", no_args_is_help=True)


@app.callback()
def megatron() -> None:
    """The adaptation of megatron-core to devices without CUDA."""


@app.command("adapt")
def adapt_command(
    revert: Annotated[bool, typer.Option("--revert", help="Restore the published files, byte for byte.")] = False,
    path: Annotated[
        str | None,
        typer.Option(help="A folder `megatron/core`. The folder is changed in place.", show_default="the installed package"),
    ] = None,
) -> None:
    """Apply the changes to megatron-core. A second call changes nothing. The chapter itself uses a copy and needs no such call.

    Each changed file is printed with its reason. A file that is neither as published nor adapted is refused, and then no file is
    changed. The exit code is 2 in this case.
    """
    # Imports torch, which the other commands must not need.
    from hyperion.parallel.megatron.release import VERSION, adapt, changes, find_release

    core = find_release() if path is None else Path(expanded(path))
    reasons = {change.file: change.reason for change in changes()}
    for name in (written := adapt(core, revert=revert)):
        say(f"{name}: {'reverted' if revert else reasons[name]}")
    state = "as published" if revert else "adapted"
    say(f"megatron-core {VERSION} in {core}: {len(written)} files changed, all {len(reasons)} are {state}")
