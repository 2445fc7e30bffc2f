"""The ledger of a run: the status of each notebook, from which the next call decides what is left to do."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from hyperion.errors import HyperionError
from hyperion.forms import read_form
from hyperion.results import Run, StoreError
from hyperion.results.execution import LEDGER
from hyperion.untrusted import inner_path, read_json


@dataclass(frozen=True)
class Entry:
    """The latest execution of a notebook in a run.

    Args:
        status: done, unexpected, failed, interrupted or unfinished.
        hash: hash of everything that the result depends on, from `hashes.notebook_hash`.
        seconds: wall time of this execution.
        rows: number of its rows in the run.
        note: one line about a failure.
        remeasure: the next execution measures its experiments anew, because a result was unexpected.
        unexpected: the unexpected results, one sentence each.
        whole_s: wall time of the latest execution that measured all experiments, this one or an earlier one.
    """

    status: str
    hash: str
    seconds: float
    rows: int
    note: str = ""
    remeasure: bool = False
    unexpected: tuple[str, ...] = ()
    whole_s: float | None = None


@dataclass(frozen=True)
class _Content:
    setting: dict
    notebooks: dict[str, Entry]
    exported: str = ""


class Ledger:
    """The entries of a run's notebooks and the setting they share; an entry and its files are written in one transaction."""

    def __init__(self, run: Run, setting: dict, entries: dict[str, Entry], exported: str = ""):
        self.run, self.setting, self.entries = run, setting, entries
        self.exported = exported  # digest of the rows and the code of the tables and pictures

    @classmethod
    def new(cls, run: Run, setting: dict) -> "Ledger":
        """Create and store the ledger of a new run."""
        ledger = cls(run, setting, {})
        run.write({LEDGER: ledger._content()})
        return ledger

    @classmethod
    def of(cls, run: Run) -> "Ledger":
        """Read the ledger of an existing run.

        Raises:
            HyperionError: it was edited or is malformed.
        """
        content = cast(_Content, read_form(_Content, run.document(LEDGER), LEDGER))
        return cls(run, content.setting, content.notebooks, content.exported)

    def keep(self, stem: str, entry: Entry, files: dict[str, bytes] | None = None) -> None:
        """Store a notebook's entry together with its executed copy."""
        self.entries[stem] = entry
        self.run.write({**(files or {}), LEDGER: self._content()})

    def keep_exported(self, digest: str) -> None:
        """Store the digest of the rows and the code of the tables and pictures."""
        self.exported = digest
        self.run.write({LEDGER: self._content()})

    def is_done(self, stem: str, digest: str) -> bool:
        """Return True if the notebook finished in this run and what it depends on is unchanged."""
        entry = self.entries.get(stem)
        return entry is not None and (entry.status, entry.hash) == ("done", digest)

    def _content(self) -> bytes:
        entries = {stem: asdict(entry) for stem, entry in self.entries.items()}
        content = {"setting": self.setting, "notebooks": entries, "exported": self.exported}
        return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def peek(folder: Path) -> dict:
    """Read a run's ledger without verifying the run, to choose among runs.

    Raises:
        StoreError: it is no ledger.
    """
    remedy = "start afresh with RUN=new, or delete that run"
    path = inner_path(folder, LEDGER, StoreError, remedy)
    try:
        content = cast(_Content, read_form(_Content, read_json(path, StoreError, remedy), LEDGER))
    except (HyperionError, OSError) as error:
        raise StoreError(f"edited or damaged: {error}", where=path, next_step=remedy) from error
    return {"setting": content.setting, "notebooks": {stem: asdict(entry) for stem, entry in content.notebooks.items()}}
