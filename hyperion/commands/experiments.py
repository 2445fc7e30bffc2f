"""The command `hyperion experiments`: a list of all experiments, with the chapter that runs each and its question."""

import ast
import json
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from hyperion.commands.console import console
from hyperion.errors import HyperionError
from hyperion.paths import project_root


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
        table.add_row(*(escape(one[key]) for key in ("chapter", "experiment", "question")))
    console().print(table)


def _question(experiment: str) -> str:
    """Return the first line of the docstring of an experiment's module. The module is not imported, because it may need torch."""
    from hyperion.chapter.subjects import subject_of

    subject = subject_of(experiment)
    source = (subject.folder / f"{experiment}.py").read_text(encoding="utf-8") if subject else ""
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
