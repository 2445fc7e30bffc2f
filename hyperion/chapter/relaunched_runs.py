"""Store the results of `hyperion relaunch` as runs, so that `hyperion compare` can compare them.

`hyperion relaunch` compares two versions of code, A and B. It times each version in several new processes, called launches. A run
is a folder with stored results.
"""

import hashlib
import uuid
from pathlib import Path

from hyperion.chapter.chapter import run_information
from hyperion.hardware.facts import git_state
from hyperion.measure import SIDES, Launched, Relaunched
from hyperion.results import Run

NOTEBOOK = "relaunch"
# A param of every row. In a round, each launch takes samples once. If a whole round was slower than others, this effect is
# removed from the value and the interval. The raw samples are stored uncorrected.
_LEVELLED = {"turns": "levelled by round"}


def record_launches(relaunched: Relaunched, work: Path, folders: tuple[Path, Path], place: Path) -> tuple[Path, Path]:
    """Store the results of every launch in its own run folder: place/A/1, place/A/2, …, place/B/1, place/B/2, ….

    A launch is a process that timed one version of the code, A or B. The number in the path is the launch number.

    Args:
        relaunched: result of `hyperion.measure.relaunch` with the results of all launches.
        work: file whose functions were timed. Its name without the extension is the name of the experiment.
        folders: folders with the source code of versions A and B.
        place: existing folder in which the run folders are created.

    Returns:
        The folders place/A and place/B.
    """
    information, plan = run_information(NOTEBOOK, "", 0), relaunched.plan
    asked = {
        "call": uuid.uuid4().hex[:16],
        "work": work.name,
        "work_sha256": hashlib.sha256(work.read_bytes()).hexdigest(),
        "rounds": plan.rounds,
        "slice_s": plan.slice_s,
        "calls": plan.calls,
    }
    for side, folder in zip(SIDES, folders, strict=True):
        of_side = relaunched.of(side)
        version = {"folder": folder.resolve().name} | git_state(folder, within=".")
        for launched in of_side:
            facts = (
                asked
                | version
                | {"side": side, "launch": launched.number, "launches": len(of_side)}
                | {"source": launched.source, "files": launched.files}
            )
            run = Run.create(place / side / str(launched.number), information | {"relaunch": facts})
            _record(run, launched, work.stem, facts)
    return place / SIDES[0], place / SIDES[1]


def _record(run: Run, launched: Launched, experiment: str, facts: dict) -> None:
    rows = [
        answer.row(notebook=NOTEBOOK, experiment=experiment, variant=name, params=_LEVELLED)
        for name, answer in launched.answers.items()
    ]
    environment = run.information()["environment"]
    provenance = {"profile": NOTEBOOK, "seed": 0, "sizes": facts, "source": environment["source"]}
    # The inputs of a launch are the timed functions and the source code that it imported.
    digest = hashlib.sha256(f"{facts['work_sha256']} {launched.source}".encode()).hexdigest()[:16]
    run.record(NOTEBOOK, experiment, rows, launched.samples, input_hash=digest, provenance=provenance, environment=environment)
