"""Decide which notebooks are up to date, and which reference run a notebook replays.

A notebook is up to date if it finished and the hash of everything on which its result depends is unchanged. Modification times of
files are not used.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hyperion.chapter.subjects import module_of
from hyperion.dependencies import files_hash, imported_modules, json_hash, reached_files
from hyperion.engines.environments import ENVIRONMENTS, absent_environments
from hyperion.paths import reference_folder, results_folder
from hyperion.reproduce.execution import NotebookFailure
from hyperion.reproduce.machine import MachineProfile
from hyperion.reproduce.notebooks import Notebook
from hyperion.reproduce.runs import OF_EARLIER_VERSION, REPLAY, Ledger, Request, earlier_seconds
from hyperion.results import Run, rows_to_csv
from hyperion.results.missing_packages import installed_since
from hyperion.results.store import METRICS, PREDICTIONS, ROWS, RUN, samples_name

# The environments of frameworks, by the chapter that uses them.
_FRAMEWORKS = {"10_frameworks": tuple(ENVIRONMENTS), "11_megatron": ("megatron-core",)}


class Freshness:
    """Compares the notebooks of a call with the results in the run of this call."""

    def __init__(self, request: Request, machine: MachineProfile, ledger: Ledger):
        self._request, self._machine, self._ledger = request, machine, ledger
        self._references: dict[str, tuple[Reference | None, str]] = {}

    def is_done(self, notebook: Notebook) -> bool:
        """Return True if the notebook is up to date now. An earlier chapter in the same call may still change its inputs."""
        reference, _ = self.reference(notebook)
        return self.is_up_to_date(notebook, self.inputs(notebook, reference))

    def is_up_to_date(self, notebook: Notebook, inputs: dict[str, str]) -> bool:
        """Return True if the notebook finished with these inputs, its data are unchanged, and its rows exist.

        A package that its rows name as missing must still be missing.
        """
        if not self._ledger.is_done(notebook.stem, inputs) or self._without_rows(notebook):
            return False
        if self._installed_since(notebook):
            return False
        return not data_changed(self._ledger.run, notebook, self._request.data_source)

    def why_again(self, notebook: Notebook, inputs: dict[str, str]) -> str:
        """Return the reason why a notebook of an earlier call runs again, or "" if it has not run before.

        Args:
            notebook: a notebook that is not up to date.
            inputs: current hashes of its inputs.
        """
        entry = self._ledger.entries.get(notebook.stem)
        if entry is None:
            return ""
        if entry.status != "done":
            return f"was {entry.status}"
        if OF_EARLIER_VERSION in entry.inputs:
            return "last run by an earlier version of Hyperion"
        changed = [name for name, digest in inputs.items() if entry.inputs.get(name) != digest]
        changed += [name for name in entry.inputs if name not in inputs]
        if changed:
            return f"changed: {', '.join(changed)}"
        if installed := self._installed_since(notebook):
            return f"installed since: {', '.join(installed)}"
        without = self._without_rows(notebook)
        return f"without rows of {', '.join(without)}" if without else "changed: its data"

    def inputs(self, notebook: Notebook, reference: "Reference | None") -> dict[str, str]:
        """Return a dict that maps the name of each input on which the notebook's result depends to its hash."""
        # Only the sizes of the notebook's own experiments are inputs, not all sizes of the profile.
        settings = self._machine.settings
        sizes = {name: settings["sizes"].get(name) for name in notebook.produces}
        parameters = {
            "profile, device or versions": self._ledger.setting,
            "sizes in the profile": settings | {"sizes": sizes},
            "the reference run": reference and [reference.machine, reference.digest],
        }
        upstream = {stem: rows_digest(self._ledger.run, stem) for stem in (*notebook.needs, *notebook.optional)}
        return hashed_inputs(notebook, parameters, upstream)

    def reference(self, notebook: Notebook) -> "tuple[Reference | None, str]":
        """Return (reference to replay, ""), or (None, reason) if no reference can be replayed.

        If the profile is not `replay`, return (None, "").
        """
        if self._machine.profile != REPLAY:
            return None, ""
        # A call asks several times for each notebook. If a reference is published again while the call runs, its digest differs
        # from the stored one, so the next call replays the notebook again.
        if notebook.stem not in self._references:
            self._references[notebook.stem] = reference_for(notebook, self._request.replay_of)
        return self._references[notebook.stem]

    def missing_rows(self, notebook: Notebook, done: dict[str, str]) -> NotebookFailure | None:
        """Return a failure if an experiment of the notebook has no rows or did not run in this execution, else None.

        Rows that an earlier execution stored are not sufficient.

        Args:
            notebook: the executed notebook.
            done: experiments that this execution measured or found to be up to date.
        """
        without = self._without_rows(notebook)
        missing = [name for name in notebook.produces if name in without or name not in done]
        remedy = f'run them in the notebook, in a chapter that open_chapter("{notebook.stem}", …, output=output) opens'
        return NotebookFailure(f"ran, but left no rows of: {', '.join(missing)}\n  next:  {remedy}") if missing else None

    def expected_s(self, notebook: Notebook) -> float:
        """Return the expected duration of a notebook in seconds.

        This is the duration of the latest complete execution in this run, else that in an earlier run with the same setting,
        else the expected duration on an idle machine from the metadata of the notebook.
        """
        known = self.known_s(notebook)
        if known is not None:
            return known
        return notebook.budget_s(self._machine.profile, len(self._machine.masks), not absent_frameworks([notebook.stem]))

    def known_s(self, notebook: Notebook) -> float | None:
        """Return the seconds of the latest complete execution of a notebook on this machine, or None if there is none."""
        entry = self._ledger.entries.get(notebook.stem)
        if entry is not None and entry.whole_s is not None:
            return entry.whole_s
        return earlier_seconds(results_folder(), self._ledger.setting, notebook.stem)

    def _installed_since(self, notebook: Notebook) -> list[str]:
        # In a replay, the reasons are those of the reference machine.
        if self._machine.profile == REPLAY:
            return []
        return installed_since(row for name in notebook.produces for row in self._ledger.run.rows(notebook.stem, name))

    def _without_rows(self, notebook: Notebook) -> list[str]:
        return [name for name in notebook.produces if not self._ledger.run.rows(notebook.stem, name)]


def hashed_inputs(notebook: Notebook, parameters: Mapping, upstream: Mapping[str, str | None]) -> dict[str, str]:
    """Return a dict that maps the name of each input on which a notebook's result depends to its hash.

    Args:
        notebook: the notebook.
        parameters: parameters of the notebook. The keys are the names that are shown if a parameter changes. The values are
            JSON-serializable and contain no paths.
        upstream: for every chapter that the notebook needs, the digest of its rows, or None if there are no rows.
    """
    inputs = {
        "the notebook": [notebook.cells, notebook.needs, notebook.optional, notebook.produces],
        "files of the library": files_hash(reached_files(library_modules(notebook))),
        **parameters,
        **{f"rows of {stem}": digest for stem, digest in upstream.items()},
    }
    return {name: json_hash(value) for name, value in inputs.items()}


def library_modules(notebook: Notebook) -> set[str]:
    """Return the library modules that the notebook uses directly: modules that its cells import, and its experiments."""
    modules = {module_of(experiment) for experiment in notebook.produces}
    for source in notebook.code:
        # Magics and shell commands are not Python, so they are removed before the cell is parsed for imports.
        plain = "\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("%", "!")))
        modules |= imported_modules(plain)
    return modules


def data_changed(run: Run, notebook: Notebook, data_source: str) -> bool:
    """Return True if the data of a notebook's experiments changed in content or location after the experiments ran."""
    from hyperion.data.prepare.catalog import data_identity  # imported here, because it loads numpy and tokenizers

    identities = [(run.finished(notebook.stem, experiment) or {}).get("data") for experiment in notebook.produces]
    return any(data and data_identity(data, data_source) != data for data in identities)


def rows_digest(run: Run, notebook: str) -> str | None:
    """Return the digest of a notebook's rows in a run, or None if there are no rows."""
    rows = run.rows(notebook)
    if not rows:
        return None
    # The lines are sorted, because the order in which experiments were measured does not affect later chapters.
    return hashlib.sha256("".join(sorted(rows_to_csv(rows).splitlines(keepends=True))).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Reference:
    """A machine whose reference run contains every experiment that a notebook needs, so that the notebook can show its results.

    Args:
        machine: name of the machine.
        digest: hash of everything that a replay of the notebook reads from the reference run.
    """

    machine: str
    digest: str


def reference_for(notebook: Notebook, machine: str | None) -> tuple[Reference | None, str]:
    """Return (reference that a notebook replays, ""), or (None, reason) if there is none.

    Args:
        notebook: the notebook to replay.
        machine: name of a reference machine. None takes the first machine that has results of the notebook.
    """
    # Imported here, because they load PyTorch, which only replays need.
    from hyperion.chapter.profiles import reference_runs
    from hyperion.chapter.subjects import experiment_named, subject_of

    machines = [run.folder.name for run in reference_runs()]
    for name in [machine] if machine else machines:
        run = Run.open(reference_folder() / name)
        stored = run.experiments()
        finished = [stored.get(f"{notebook.stem}/{experiment}") for experiment in notebook.produces]
        missing = [experiment for experiment, found in zip(notebook.produces, finished, strict=True) if not found]
        # A reference run may be older than an experiment. If the notebook also works without its values, it is replayed.
        if any(finished) and all(subject_of(experiment) and experiment_named(experiment).stand_in for experiment in missing):
            return Reference(name, _reference_digest(run, notebook, finished)), ""
    return (
        None,
        f"no rows of this chapter in the reference run{'' if machine else 's'} ({machine or ', '.join(machines) or 'none'})",
    )


def _reference_digest(run: Run, notebook: Notebook, finished: list[dict | None]) -> str:
    # `finished` contains the hashes of the experiments' inputs. A republished reference can have the same inputs but other rows
    # and samples, so the hashes of its files are included.
    names = {RUN, ROWS, METRICS, PREDICTIONS, *(samples_name(notebook.stem, experiment) for experiment in notebook.produces)}
    files = {name: digest for name, digest in run.hashes().items() if name in names}
    return json_hash([finished, files])


def absent_frameworks(chapters: Iterable[str]) -> list[str]:
    """Return the environments of frameworks that these chapters use and that are not installed."""
    wanted = {name for chapter in chapters for name in _FRAMEWORKS.get(chapter, ())}
    return [name for name in absent_environments() if name in wanted]
