"""What passes between the driver and the kernel that executes a notebook for it, besides the notebook's own text.

The driver names a file; the kernel adds a line to it for each experiment that it measures or finds kept, and for each
result that is not as it must be. So the driver knows what this very execution did, whatever rows lay in the run before.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyperion.results.store import Run

LOG = "HYPERION_EXECUTION_LOG"
REMEASURE = "HYPERION_REMEASURE"
MEASURED, KEPT = "measured", "kept"
# A row that lost its value, and a claim of the notebook that does not hold.
UNEXPECTED_ROW, UNEXPECTED_CLAIM = "unexpected row", "unexpected claim"
# In a run: what the driver remembers of each notebook.
LEDGER = "reproduce.json"


def note_experiment(notebook: str, experiment: str, what: str) -> None:
    """Tell the driver, where there is one, that an experiment was MEASURED or KEPT."""
    _note([notebook, experiment, what])


def note_unexpected(notebook: str, sentence: str, what: str) -> None:
    """Tell the driver, where there is one, of an UNEXPECTED_ROW or an UNEXPECTED_CLAIM."""
    _note([notebook, sentence, what])


def executed(log: Path, notebook: str) -> dict[str, str]:
    """{experiment: MEASURED or KEPT} of a notebook, by its execution's log; measured once is measured."""
    found: dict[str, str] = {}
    for experiment, what in _noted(log, notebook):
        if what in (MEASURED, KEPT) and found.get(experiment) != MEASURED:
            found[experiment] = what
    return found


def unexpected(log: Path, notebook: str, *kinds: str) -> list[str]:
    """The sentences on what was unexpected in a notebook, by its execution's log, each once.

    Args:
        kinds: UNEXPECTED_ROW, UNEXPECTED_CLAIM or both; both when left out.
    """
    wanted = kinds or (UNEXPECTED_ROW, UNEXPECTED_CLAIM)
    return list(dict.fromkeys(sentence for sentence, what in _noted(log, notebook) if what in wanted))


def unexpected_in(run: "Run") -> dict[str, list[str]]:
    """{notebook: sentences on what was unexpected in its latest go}, of those notebooks of a run that have any."""
    if not (run.folder / LEDGER).is_file():
        return {}
    notebooks = json.loads(run.read(LEDGER))["notebooks"]
    return {stem: entry["unexpected"] for stem, entry in notebooks.items() if entry.get("unexpected")}


def must_remeasure() -> bool:
    """Whether the driver asks for new measurements: something was unexpected in those that the notebook has."""
    return os.environ.get(REMEASURE) == "1"


def _note(line: list[str]) -> None:
    log = os.environ.get(LOG)
    if log:
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _noted(log: Path, notebook: str) -> list[tuple[str, str]]:
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [(about, what) for stem, about, what in map(json.loads, lines) if stem == notebook]
