"""What a run remembers of each notebook, so that the next call knows what is left to do."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.results import Run, StoreError
from hyperion.results.execution import LEDGER
from hyperion.results.typed import from_json
from hyperion.untrusted import inner_path, read_json


@dataclass(frozen=True)
class Entry:
    """One notebook's latest go in a run.

    Args:
        status: done, unexpected, failed, interrupted or unfinished.
        hash: what the result depends on, as `hashes.notebook_hash` gives it.
        seconds: wall time of that go.
        rows: rows it left in the run.
        note: one line on a failure.
        remeasure: whether something was unexpected, so that the next go must not keep the measurements behind it.
        unexpected: what was unexpected in that go, a sentence each.
        whole_s: wall time of the latest go that measured all of its experiments, this one or an earlier one.
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
    """The notebooks of one run and the setting they share; each change is one transaction with its files."""

    def __init__(self, run: Run, setting: dict, entries: dict[str, Entry], exported: str = ""):
        self.run, self.setting, self.entries = run, setting, entries
        self.exported = exported  # digest of the rows and the code that the tables and pictures were last made from

    @classmethod
    def new(cls, run: Run, setting: dict) -> "Ledger":
        ledger = cls(run, setting, {})
        run.write({LEDGER: ledger._content()})
        return ledger

    @classmethod
    def of(cls, run: Run) -> "Ledger":
        """The ledger of an existing run.

        Raises:
            HyperionError: it was edited, or has another form.
        """
        content = from_json(_Content, run.document(LEDGER), LEDGER)
        return cls(run, content.setting, content.notebooks, content.exported)

    def keep(self, stem: str, entry: Entry, files: dict[str, bytes] | None = None) -> None:
        """Write a notebook's entry together with its executed copy."""
        self.entries[stem] = entry
        self.run.write({**(files or {}), LEDGER: self._content()})

    def keep_exported(self, digest: str) -> None:
        """Write down what the tables and pictures were made from."""
        self.exported = digest
        self.run.write({LEDGER: self._content()})

    def is_done(self, stem: str, digest: str) -> bool:
        """Whether the notebook finished in this run and nothing it depends on has changed since."""
        entry = self.entries.get(stem)
        return entry is not None and (entry.status, entry.hash) == ("done", digest)

    def _content(self) -> bytes:
        entries = {stem: asdict(entry) for stem, entry in self.entries.items()}
        content = {"setting": self.setting, "notebooks": entries, "exported": self.exported}
        return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def peek(folder: Path) -> dict:
    """A run's ledger as it stands on disk, for choosing among runs; nothing is verified yet.

    Raises:
        StoreError: it is no ledger.
    """
    remedy = "start afresh with RUN=new, or delete that run"
    path = inner_path(folder, LEDGER, StoreError, remedy)
    try:
        content = from_json(_Content, read_json(path, StoreError, remedy), LEDGER)
    except (HyperionError, OSError) as error:
        raise StoreError(f"edited or damaged: {error}", where=path, next_step=remedy) from error
    return {"setting": content.setting, "notebooks": {stem: asdict(entry) for stem, entry in content.notebooks.items()}}
