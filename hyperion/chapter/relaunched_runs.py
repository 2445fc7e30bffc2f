"""Store the launches of `hyperion relaunch` as runs. Each of the two versions gets one folder, as `hyperion compare` needs it."""

import hashlib
import uuid
from pathlib import Path

from hyperion.chapter.chapter import run_information
from hyperion.hardware.facts import git_state
from hyperion.measure import SIDES, Launched, Relaunched
from hyperion.results import Run

NOTEBOOK = "relaunch"
# A param of every row. A round is one launch of both versions. If a whole round was slower than the other rounds, this effect is
# removed from the value and the interval. The raw samples are stored without this correction.
_LEVELLED = {"turns": "levelled by round"}


def record_launches(relaunched: Relaunched, work: Path, folders: tuple[Path, Path], place: Path) -> tuple[Path, Path]:
    """Write every launch as a run: place/A/1, place/A/2, …, place/B/1, place/B/2, ….

    Args:
        relaunched: the launches of both versions.
        work: the file whose functions were timed. Its name without the ending is the name of the experiment.
        folders: the folders with the source code of version A and version B.
        place: an existing folder in which the runs are written.

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
    digest = hashlib.sha256(f"{facts['work_sha256']} {launched.source}".encode()).hexdigest()[:16]
    run.record(NOTEBOOK, experiment, rows, launched.samples, input_hash=digest, provenance=provenance, environment=environment)
