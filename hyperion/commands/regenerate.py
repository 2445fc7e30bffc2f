"""Commands that recompute files of the repository: `python -m hyperion.commands.regenerate COMMAND`.

These files are stored in git. They must be recomputed only after a change of the library, so the commands are not part of
`hyperion`.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from hyperion.commands.console import run_app
from hyperion.terminal import run_command

app = typer.Typer(help="Compute files of the repository again.", no_args_is_help=True, add_completion=False)
Runs = Annotated[list[Path], typer.Argument(help="Folders of runs, such as results/reference/h200x2.")]


@app.command()
def curves(runs: Runs) -> None:
    """Fit the curves that predict rates. They are fitted to reference runs and written to hyperion/chapter/efficiency.toml."""
    from hyperion.commands.efficiency_fit import write_curves

    path, count = write_curves(_runs_in(runs))
    print(f"{count} curves in {path}")


@app.command()
def predictions(runs: Runs) -> None:
    """Print docs/predictions.md: the errors of the predictions, and the coverage of their intervals."""
    from hyperion.commands.efficiency_fit import Reference, score_page

    print(score_page([Reference.open(folder) for folder in _runs_in(runs)]), end="")


@app.command()
def numerics(
    write: Annotated[bool, typer.Option("--write", help="Replace the pack in git instead of comparing with it.")] = False,
) -> None:
    """Recompute the pack, which is the float64 results that `hyperion doctor --numerics` compares with.

    The exit code is 1 if the new pack differs from the pack in git.
    """
    from hyperion.doctor.numerics import PACK, TOLERANCE_OF_PACK, difference_from_pack, write_pack

    if write:
        write_pack()
        print(f"{PACK}: {PACK.stat().st_size / 1e3:.0f} kB")
        return
    worst, name = difference_from_pack()
    print(f"largest difference from the pack in git: {worst:.2g}, in {name}")
    raise typer.Exit(0 if worst <= TOLERANCE_OF_PACK else 1)


@app.command()
def trained_models() -> None:
    """Train the models of the profile `smoke` on real data, and write their weights to hyperion/workloads/trained/."""
    from hyperion.workloads.trained_models import write_weights_of_library

    for path, loss in write_weights_of_library().items():
        print(f"{path}: held-out loss {loss:.4f}")


def _runs_in(folders: list[Path]) -> list[Path]:
    """Return the folders that are runs, and print the names of the others.

    The pattern `results/reference/*` also matches folders of launches and of comparisons, which are not runs.
    """
    from hyperion.results import is_run

    runs = [folder for folder in folders if not folder.is_dir() or is_run(folder)]
    for folder in folders:
        if folder not in runs:
            print(f"left out: {folder} is not a run", file=sys.stderr)
    return runs


if __name__ == "__main__":
    sys.exit(run_command(lambda: run_app(app, "python -m hyperion.commands.regenerate", sys.argv[1:])))
