"""The log by which the kernel that executes a notebook reports to the driver (`hyperion reproduce`).

The driver sets the path of the log. The kernel appends a line for each experiment that it measures or takes from the run, and for
each unexpected result. So the driver can distinguish this execution from rows that the run already had.
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
# A row whose value was refused, and a claim of the notebook that is false.
UNEXPECTED_ROW, UNEXPECTED_CLAIM = "unexpected row", "unexpected claim"
# File of a run with the driver's state of each notebook.
LEDGER = "reproduce.json"


def note_experiment(notebook: str, experiment: str, what: str) -> None:
    """Report to the driver, if there is one, that an experiment was MEASURED or KEPT."""
    _note([notebook, experiment, what])


def note_unexpected(notebook: str, sentence: str, what: str) -> None:
    """Report an UNEXPECTED_ROW or an UNEXPECTED_CLAIM to the driver, if there is one."""
    _note([notebook, sentence, what])


def executed(log: Path, notebook: str) -> dict[str, str]:
    """Return {experiment: MEASURED or KEPT} of a notebook from a log. MEASURED prevails if both occur."""
    outcomes: dict[str, str] = {}
    for experiment, what in _noted(log, notebook):
        if what in (MEASURED, KEPT) and outcomes.get(experiment) != MEASURED:
            outcomes[experiment] = what
    return outcomes


def unexpected(log: Path, notebook: str, *kinds: str) -> list[str]:
    """Return the distinct sentences on unexpected results of a notebook from a log.

    Args:
        kinds: UNEXPECTED_ROW, UNEXPECTED_CLAIM or both; default: both.
    """
    wanted = kinds or (UNEXPECTED_ROW, UNEXPECTED_CLAIM)
    return list(dict.fromkeys(sentence for sentence, what in _noted(log, notebook) if what in wanted))


def unexpected_in(run: "Run") -> dict[str, list[str]]:
    """Return {notebook: sentences on unexpected results in its latest execution} for the notebooks of a run that have any."""
    if not (run.folder / LEDGER).is_file():
        return {}
    notebooks = json.loads(run.read(LEDGER))["notebooks"]
    return {stem: entry["unexpected"] for stem, entry in notebooks.items() if entry.get("unexpected")}


def must_remeasure() -> bool:
    """Return True if the driver asks for new measurements because the stored ones have unexpected results."""
    return os.environ.get(REMEASURE) == "1"


def _note(line: list[str]) -> None:
    log = os.environ.get(LOG)
    if log:
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _noted(log: Path, notebook: str) -> list[tuple[str, str]]:
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [(about, what) for stem, about, what in map(json.loads, lines) if stem == notebook]
