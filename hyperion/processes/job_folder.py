"""The temporary folder through which a job's launcher, its torchrun agent and the ranks of this node exchange files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperion.results.files import write_atomically


@dataclass(frozen=True)
class JobFolder:
    """Paths of the files. All are JSON and written atomically, except the stacks, which faulthandler writes.

    request: the job, the launcher's process number and the folder of the logs.
    pid(rank): process number, written when the rank handles signals.
    record(rank): {"answer": …}, or what the rank raised (see rank_worker).
    stack(rank): the rank's stack at the last SIGUSR1 or SIGTERM.
    ends: exit codes of the ranks as torchrun saw them, or the error with which the agent refused the job.
    answers: answers of all ranks of all nodes; only with several nodes.
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
        """Return the process numbers of the ranks that have started, by rank."""
        return {int(file.stem.removeprefix("rank-")): read_json(file) for file in self.folder.glob("rank-*.pid")}


def read_json(file: Path) -> Any:
    """Return the file's content; None if there is no file."""
    return json.loads(file.read_text()) if file.exists() else None


def write_json(file: Path, content: object) -> None:
    """Write the file atomically: a reader sees all of it or no file."""
    write_atomically(file, json.dumps(content).encode())


def rank_log(logs: Path, rank: int) -> Path:
    """Return the path of the file with everything that a rank prints."""
    return logs / f"rank-{rank}.log"


def torchrun_log(logs: Path) -> Path:
    """Return the path of the file with what torchrun prints, and what a rank prints before it opens its own log."""
    return logs / "torchrun.log"
