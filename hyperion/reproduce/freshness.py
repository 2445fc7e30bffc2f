"""Decide which notebooks are up to date, from hashes of what their results depend on, and which run they replay."""

import hashlib
import json
from dataclasses import dataclass

from hyperion.errors import HyperionError
from hyperion.paths import reference_folder, results_folder
from hyperion.reproduce.execution import NotebookFailure
from hyperion.reproduce.hashes import data_changed, notebook_hash, rows_digest
from hyperion.reproduce.ledger import Ledger
from hyperion.reproduce.machine import MachineProfile
from hyperion.reproduce.notebooks import Notebook
from hyperion.reproduce.runs import REPLAY, Request, earlier_seconds
from hyperion.results import Run
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
        parameters = {
            "setting": self._ledger.setting,
            "sizes": self._settings_of(notebook),
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

    def _settings_of(self, notebook: Notebook) -> dict:
        """Return the profile's settings that the notebook's rows depend on: the sizes of its own experiments only."""
        settings = self._machine.settings
        return settings | {"sizes": {name: settings["sizes"].get(name) for name in notebook.produces}}

    def _without_rows(self, notebook: Notebook) -> list[str]:
        return [name for name in notebook.produces if not self._ledger.run.rows(notebook.stem, name)]


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
