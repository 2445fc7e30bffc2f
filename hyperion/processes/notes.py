"""The folder in which the launcher, torchrun's side and the ranks of a job on this node leave each other notes."""

import json
from dataclasses import dataclass
from pathlib import Path

from hyperion.results.files import write_atomically


@dataclass(frozen=True)
class Notes:
    """Where each note lies. All are JSON, whole or not there, except for the stacks, which faulthandler writes.

    request: the job, the launcher's process number and the folder of the logs.
    pid(rank): process number, once the rank answers to signals.
    record(rank): {"answer": …} or what it raised (see rank_worker).
    stack(rank): where it stood when it was asked.
    ends: how torchrun saw its ranks end.
    answers: of all ranks of all nodes, where there are several nodes.
    """

    folder: Path

    @property
    def request(self) -> Path:
        return self.folder / "request.json"

    @property
    def ends(self) -> Path:
        return self.folder / "ends.json"

    @property
    def answers(self) -> Path:
        return self.folder / "answers.json"

    def pid(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.pid"

    def record(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"

    def stack(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.stack"

    def pids(self) -> dict[int, int]:
        """Process numbers by rank, of the ranks that have begun."""
        return {int(file.stem.removeprefix("rank-")): read(file) for file in self.folder.glob("rank-*.pid")}


def read(note: Path):
    """What the note says; None when nobody wrote it."""
    return json.loads(note.read_text()) if note.exists() else None


def write(note: Path, content) -> None:
    """Write a note whole."""
    write_atomically(note, json.dumps(content).encode())


def log_of(logs: Path, rank: int) -> Path:
    """The file of everything that a rank prints."""
    return logs / f"rank-{rank}.log"


def log_of_torchrun(logs: Path) -> Path:
    """The file of what torchrun prints, and a rank before it has its own."""
    return logs / "torchrun.log"
