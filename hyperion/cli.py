"""The `hyperion` command. Every option of `hyperion reproduce` is also a variable: PROFILE=smoke means --profile smoke."""

import sys

import typer

from hyperion.commands.compare import compare, relaunch
from hyperion.commands.console import run_app
from hyperion.commands.data import app as data_app
from hyperion.commands.data import fetch
from hyperion.commands.doctor import doctor, env
from hyperion.commands.lab import lab
from hyperion.commands.passport import passport
from hyperion.commands.reproduce import reproduce
from hyperion.commands.runs import clean, publish, report, verify
from hyperion.terminal import run_command

app = typer.Typer(
    help="Hyperion: an executable book of ML-systems engineering.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# `hyperion --help` lists them in this order.
for command in (reproduce, compare, relaunch, verify, report, fetch, lab, doctor, passport, env, clean, publish):
    app.command()(command)
app.add_typer(data_app, name="data")


def main() -> int:
    """Run the command line and return the exit code; an error that a user can correct is printed with its next step."""
    return run_command(lambda: run_app(app, "hyperion", sys.argv[1:]))
