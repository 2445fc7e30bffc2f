"""Which committed reference run can a notebook be replayed from?"""

import hashlib
import json
from dataclasses import dataclass

from hyperion.errors import HyperionError
from hyperion.paths import reference_folder
from hyperion.reproduce.notebooks import Notebook
from hyperion.results import Run
from hyperion.results.store import METRICS, PREDICTIONS, ROWS, RUN, samples_name


@dataclass(frozen=True)
class Reference:
    """A machine whose reference run holds every experiment of a notebook.

    Args:
        digest: hash over all that a replay of the notebook takes from that run.
    """

    machine: str
    digest: str


def reference_for(notebook: Notebook, machine: str | None) -> tuple[Reference | None, str]:
    """The named machine's reference run, or the first that holds the notebook; else None and the reason.

    Raises:
        HyperionError: no reference run of that name; the message lists them.
    """
    from hyperion.experiments.replay import reference_runs  # its room imports PyTorch: seconds, for replays alone

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
            return Reference(name, _digest(run, notebook, finished)), ""
    return (None, f"no rows of it in the reference run{'' if machine else 's'} ({machine or ', '.join(machines) or 'none'})")


def _digest(run: Run, notebook: Notebook, finished: list[dict]) -> str:
    """A reference published again under the same inputs has other rows and samples, which the manifest's hashes tell."""
    names = {RUN, ROWS, METRICS, PREDICTIONS, *(samples_name(notebook.stem, experiment) for experiment in notebook.produces)}
    taken = {name: digest for name, digest in run.hashes().items() if name in names}
    return hashlib.sha256(json.dumps([finished, taken], sort_keys=True).encode()).hexdigest()[:16]
