"""When is a notebook's earlier result still its result? Decided by hashes of all it depends on, never by times."""

import ast
import hashlib
import json
from collections.abc import Mapping

from hyperion.chapter.registry import module_of
from hyperion.dependencies import files_hash, imported_modules, reached_files
from hyperion.reproduce.notebooks import Notebook
from hyperion.results import Run, rows_to_csv


def notebook_hash(notebook: Notebook, parameters: Mapping, upstream: Mapping[str, str | None]) -> str:
    """Hash of the notebook's text, the library files it reaches, its parameters and its upstream rows; 16 hex digits.

    Args:
        parameters: what it is called with, the profile's sizes for it included (JSON-able, no paths).
        upstream: digest of the rows of every chapter it builds on, None where there are none.
    """
    depends = {
        "cells": notebook.cells,
        "needs": [notebook.needs, notebook.optional, notebook.produces],
        "library": files_hash(reached_files(library_modules(notebook))),
        "parameters": parameters,
        "upstream": upstream,
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]


def library_modules(notebook: Notebook) -> set[str]:
    """Modules of the library that the notebook starts from: those its cells import, and its experiments by name."""
    modules = {module_of(experiment) for experiment in notebook.produces}
    for source in notebook.code:
        plain = "\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("%", "!")))
        try:
            ast.parse(plain)
        except SyntaxError:
            continue  # imports nothing; its text is in the hash, and executing it will name the mistake
        modules |= imported_modules(plain)
    return modules


def data_changed(run: Run, notebook: Notebook, data_source: str) -> bool:
    """Whether the files that a notebook's experiments were made from have other contents now, or lie elsewhere."""
    from hyperion.data.prepare.identity import data_identity  # numpy and tokenizers, which a call may not need

    taken = [(run.finished(notebook.stem, experiment) or {}).get("data") for experiment in notebook.produces]
    return any(data and data_identity(data, data_source) != data for data in taken)


def rows_digest(run: Run, notebook: str) -> str | None:
    """Digest of the rows that a notebook left in a run; None where it left none."""
    rows = run.rows(notebook)
    if not rows:
        return None
    return hashlib.sha256("".join(sorted(rows_to_csv(rows).splitlines(keepends=True))).encode()).hexdigest()[:16]
