"""What a notebook's result depends on, and whether what a run holds of it still stands."""

import os
from dataclasses import dataclass

from hyperion.errors import HyperionError
from hyperion.paths import expanded, results_folder
from hyperion.reproduce.execution import Fault
from hyperion.reproduce.hashes import data_changed, notebook_hash, rows_digest
from hyperion.reproduce.ledger import Ledger
from hyperion.reproduce.machine import Machine
from hyperion.reproduce.notebooks import Notebook
from hyperion.reproduce.references import Reference, reference_for
from hyperion.reproduce.runs import earlier_seconds

REPLAY = "replay"


@dataclass(frozen=True)
class Request:
    """What the caller asked for.

    Args:
        profile: auto, smoke, full, study or replay.
        data_source: auto, mirror, cache, download or synthetic.
        only: one chapter, run with all it needs; None runs the book.
        run: None continues the newest run of this setting, `new` starts one, another name continues or starts that run.
        time_budget_s: stop cleanly rather than take longer; None has no end.
        cell_timeout_s, notebook_timeout_s: seconds after which a cell or a notebook fails; None takes the profile's.
        seed: seeds everything that is drawn.
        replay_of: the reference machine to replay; None takes the first that holds the notebook.
    """

    profile: str = "auto"
    data_source: str = "auto"
    only: str | None = None
    run: str | None = None
    time_budget_s: float | None = None
    seed: int = 0
    replay_of: str | None = None
    cell_timeout_s: float | None = None
    notebook_timeout_s: float | None = None


class Standing:
    """The notebooks of a call, held against what its run remembers of them."""

    def __init__(self, request: Request, machine: Machine, ledger: Ledger):
        self._request, self._machine, self._ledger = request, machine, ledger

    def is_done(self, notebook: Notebook) -> bool:
        """Whether it will probably be up to date when its turn comes (an upstream chapter may yet change its rows)."""
        reference, _ = self.reference(notebook)
        return self.is_up_to_date(notebook, self.digest(notebook, reference))

    def is_up_to_date(self, notebook: Notebook, digest: str) -> bool:
        """Whether it finished on what it depends on now, which `digest` tells, and on the data that there are now."""
        if not self._ledger.is_done(notebook.stem, digest) or self._missing(notebook):
            return False
        return not data_changed(self._ledger.run, notebook, self._request.data_source)

    def digest(self, notebook: Notebook, reference: Reference | None) -> str:
        """Of what its result depends on."""
        parameters = {
            "setting": self._ledger.setting,
            "sizes": _of_notebook(self._machine.settings, notebook),
            "reference": reference and [reference.machine, reference.digest],
        }
        upstream = {stem: rows_digest(self._ledger.run, stem) for stem in (*notebook.needs, *notebook.optional)}
        return notebook_hash(notebook, parameters, upstream)

    def reference(self, notebook: Notebook) -> tuple[Reference | None, str]:
        """(the machine whose rows it replays, why there is none); neither where it measures."""
        if self._machine.profile != REPLAY:
            return None, ""
        return reference_for(notebook, self._request.replay_of)

    def missing_fault(self, notebook: Notebook, done: dict[str, str]) -> Fault | None:
        """Every experiment must have been measured, or found to stand, by this very go; older rows prove nothing."""
        without = self._missing(notebook)
        missing = [name for name in notebook.produces if name in without or name not in done]
        return Fault(f"ran, but left no rows of: {', '.join(missing)}") if missing else None

    def expected_s(self, notebook: Notebook) -> float:
        """Seconds that it will take: as in this run, else in an earlier one of this setting, else as it says itself."""
        entry = self._ledger.entries.get(notebook.stem)
        if entry is not None and entry.whole_s is not None:
            return entry.whole_s
        earlier = earlier_seconds(results_folder(), self._ledger.setting, notebook.stem)
        return notebook.budget_s(self._machine.profile) if earlier is None else earlier

    def _missing(self, notebook: Notebook) -> list[str]:
        return [name for name in notebook.produces if not self._ledger.run.rows(notebook.stem, name)]


def setting_of(request: Request, machine: Machine) -> dict:
    """What all notebooks of a run share; a run made under another one is not continued."""
    # `auto` with a mirror at hand and `auto` without one are two different requests.
    mirror = request.data_source in ("auto", "mirror") and bool(os.environ.get("HYPERION_DATA_MIRROR"))
    asked = {"profile": machine.profile, "data_source": request.data_source, "mirror": mirror, "seed": request.seed}
    return asked | {"replay_of": request.replay_of} | machine.setting


def demand_mirror(request: Request) -> None:
    """A mirror that somebody asked for and that is not there stops the call before anything has run."""
    named = os.environ.get("HYPERION_DATA_MIRROR")
    if request.data_source not in ("auto", "mirror") or request.profile == REPLAY or not named:
        return
    if not expanded(named).is_dir():
        remedy = "correct HYPERION_DATA_MIRROR, or unset it to use the cache, a download or synthetic data"
        raise HyperionError("HYPERION_DATA_MIRROR names no folder", where=named, next_step=remedy)


def _of_notebook(settings: dict, notebook: Notebook) -> dict:
    """The settings of a profile that a notebook's rows depend on: of sizes, those of its own experiments."""
    return settings | {"sizes": {name: settings["sizes"].get(name) for name in notebook.produces}}
