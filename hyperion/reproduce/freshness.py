"""Decide which notebooks are up to date, from hashes of what their results depend on, and which run they replay.

File times do not count: a notebook is stale when a hash changes.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from hyperion.chapter.subjects import module_of
from hyperion.dependencies import files_hash, imported_modules, reached_files
from hyperion.errors import HyperionError
from hyperion.paths import reference_folder, results_folder
from hyperion.reproduce.execution import NotebookFailure
from hyperion.reproduce.machine import MachineProfile
from hyperion.reproduce.notebooks import Notebook
from hyperion.reproduce.runs import REPLAY, Ledger, Request, earlier_seconds
from hyperion.results import Run, rows_to_csv
from hyperion.results.store import METRICS, PREDICTIONS, ROWS, RUN, samples_name


class Freshness:
    """Compares the notebooks of a call with the results that its run holds."""

    def __init__(self, request: Request, machine: MachineProfile, ledger: Ledger):
        self._request, self._machine, self._ledger = request, machine, ledger

    def is_done(self, notebook: Notebook) -> bool:
        """Return True if the notebook is up to date now; an earlier chapter of this call may still change its inputs."""
        reference, _ = self.reference(notebook)
        return self.is_up_to_date(notebook, self.digest(notebook, reference))

    def is_up_to_date(self, notebook: Notebook, digest: str) -> bool:
        """Return True if the notebook finished with this digest, on data that are unchanged, and its rows are there."""
        if not self._ledger.is_done(notebook.stem, digest) or self._without_rows(notebook):
            return False
        return not data_changed(self._ledger.run, notebook, self._request.data_source)

    def digest(self, notebook: Notebook, reference: "Reference | None") -> str:
        """Return the hash of everything that the notebook's result depends on."""
        # Of the profile's sizes, those of the notebook's own experiments only.
        settings = self._machine.settings
        sizes = {name: settings["sizes"].get(name) for name in notebook.produces}
        parameters = {
            "setting": self._ledger.setting,
            "sizes": settings | {"sizes": sizes},
            "reference": reference and [reference.machine, reference.digest],
        }
        upstream = {stem: rows_digest(self._ledger.run, stem) for stem in (*notebook.needs, *notebook.optional)}
        return notebook_hash(notebook, parameters, upstream)

    def reference(self, notebook: Notebook) -> "tuple[Reference | None, str]":
        """Return (reference run to replay, reason why there is none); both are empty unless the profile is `replay`."""
        if self._machine.profile != REPLAY:
            return None, ""
        return reference_for(notebook, self._request.replay_of)

    def missing_rows(self, notebook: Notebook, done: dict[str, str]) -> NotebookFailure | None:
        """Return a failure if an experiment left no rows, or did not run this time; older rows prove nothing.

        Args:
            done: experiments that this execution measured or found up to date.
        """
        without = self._without_rows(notebook)
        missing = [name for name in notebook.produces if name in without or name not in done]
        return NotebookFailure(f"ran, but left no rows of: {', '.join(missing)}") if missing else None

    def expected_s(self, notebook: Notebook) -> float:
        """Return the expected seconds: as in this run, else as in an earlier run of this setting, else from its metadata."""
        entry = self._ledger.entries.get(notebook.stem)
        if entry is not None and entry.whole_s is not None:
            return entry.whole_s
        earlier = earlier_seconds(results_folder(), self._ledger.setting, notebook.stem)
        return notebook.budget_s(self._machine.profile) if earlier is None else earlier

    def _without_rows(self, notebook: Notebook) -> list[str]:
        return [name for name in notebook.produces if not self._ledger.run.rows(notebook.stem, name)]


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


@dataclass(frozen=True)
class Reference:
    """A machine whose reference run holds every experiment of a notebook.

    Args:
        digest: hash of everything that a replay of the notebook reads from that run.
    """

    machine: str
    digest: str


def reference_for(notebook: Notebook, machine: str | None) -> tuple[Reference | None, str]:
    """Return the reference run of the named machine, or the first that holds the notebook; else None and the reason.

    Raises:
        HyperionError: there is no reference run of that name.
    """
    from hyperion.chapter.profiles import reference_runs  # its package imports PyTorch, which only replays need here

    machines = [run.folder.name for run in reference_runs()]
    if machine is not None and machine not in machines:
        raise HyperionError(
            f"no reference run of {machine!r}",
            where=reference_folder(),
            next_step=f"use REPLAY_OF= with one of: {', '.join(machines) or 'there is none yet'}",
        )
    for name in [machine] if machine else machines:
        run = Run.open(reference_folder() / name)
        finished = [run.finished(notebook.stem, experiment) for experiment in notebook.produces]
        if finished and all(finished):
            return Reference(name, _reference_digest(run, notebook, finished)), ""
    return (None, f"no rows of it in the reference run{'' if machine else 's'} ({machine or ', '.join(machines) or 'none'})")


def _reference_digest(run: Run, notebook: Notebook, finished: list[dict | None]) -> str:
    # `finished` holds the hashes of the experiments' inputs. A reference that was published again can have the same inputs
    # but other rows and samples, so the hashes of its files are included.
    names = {RUN, ROWS, METRICS, PREDICTIONS, *(samples_name(notebook.stem, experiment) for experiment in notebook.produces)}
    files = {name: digest for name, digest in run.hashes().items() if name in names}
    return hashlib.sha256(json.dumps([finished, files], sort_keys=True).encode()).hexdigest()[:16]
