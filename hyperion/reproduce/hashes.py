"""Hashes of everything that a notebook's result depends on: a result is stale when its hash changes. File times do not count."""

import hashlib
import json
from collections.abc import Mapping

from hyperion.chapter.subjects import module_of
from hyperion.dependencies import files_hash, imported_modules, reached_files
from hyperion.reproduce.notebooks import Notebook
from hyperion.results import Run, rows_to_csv


def notebook_hash(notebook: Notebook, parameters: Mapping, upstream: Mapping[str, str | None]) -> str:
    """Return the hash of a notebook's text, the library files it imports, its parameters and its upstream rows; 16 hex digits.

    Args:
        parameters: its parameters and its sizes in the profile (JSON-able, no paths).
        upstream: digest of the rows of every chapter it needs, None where there are none.
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
    """Return the library modules that the notebook uses directly: those its cells import, and its experiments."""
    modules = {module_of(experiment) for experiment in notebook.produces}
    for source in notebook.code:
        plain = "\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("%", "!")))
        modules |= imported_modules(plain)
    return modules


def data_changed(run: Run, notebook: Notebook, data_source: str) -> bool:
    """Return True if the data of a notebook's experiments have other contents, or another location, than when they ran."""
    from hyperion.data.prepare.catalog import data_identity  # imports numpy and tokenizers, which not every call needs

    identities = [(run.finished(notebook.stem, experiment) or {}).get("data") for experiment in notebook.produces]
    return any(data and data_identity(data, data_source) != data for data in identities)


def rows_digest(run: Run, notebook: str) -> str | None:
    """Return the digest of a notebook's rows in a run; None without rows."""
    rows = run.rows(notebook)
    if not rows:
        return None
    return hashlib.sha256("".join(sorted(rows_to_csv(rows).splitlines(keepends=True))).encode()).hexdigest()[:16]
