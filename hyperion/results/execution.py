"""Reports on executed notebooks: the log through which a kernel reports to the driver, and the ledger that the driver stores.

The driver is the process of `hyperion reproduce`. The ledger is a file of the run with the state of each notebook.

The driver passes the path of the log in an environment variable. The kernel appends one line for each experiment and one line for
each unexpected result. The line for an experiment says whether its rows were measured now or were already stored in the run.
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
# An unexpected row is a row whose value was refused. An unexpected claim is a claim in the notebook that is false for this run.
UNEXPECTED_ROW, UNEXPECTED_CLAIM = "unexpected row", "unexpected claim"
LEDGER = "reproduce.json"


def note_experiment(notebook: str, experiment: str, what: str) -> None:
    """Report to the driver, if there is one, that an experiment was MEASURED or KEPT."""
    _note([notebook, experiment, what])


def note_unexpected(notebook: str, sentence: str, what: str) -> None:
    """Report an UNEXPECTED_ROW or an UNEXPECTED_CLAIM to the driver, if there is one."""
    _note([notebook, sentence, what])


def executed(log: Path, notebook: str) -> dict[str, str]:
    """Read a log and return a dict that maps the name of an experiment of a notebook to MEASURED or KEPT.

    If the log contains both for an experiment, the value is MEASURED.
    """
    outcomes: dict[str, str] = {}
    for experiment, what in _noted(log, notebook):
        # A notebook may run an experiment twice. The second call finds the rows that the first call stored, and reports KEPT.
        if what in (MEASURED, KEPT) and outcomes.get(experiment) != MEASURED:
            outcomes[experiment] = what
    return outcomes


def unexpected(log: Path, notebook: str, *kinds: str) -> list[str]:
    """Return the distinct sentences in a log about unexpected results of a notebook.

    Args:
        log: path of the log.
        notebook: stem of the notebook (file name without .ipynb).
        kinds: UNEXPECTED_ROW, UNEXPECTED_CLAIM or both; default: both.
    """
    wanted = kinds or (UNEXPECTED_ROW, UNEXPECTED_CLAIM)
    return list(dict.fromkeys(sentence for sentence, what in _noted(log, notebook) if what in wanted))


def unexpected_in(run: "Run") -> dict[str, list[str]]:
    """Return a dict that maps a notebook to the sentences about unexpected results in its latest execution.

    Notebooks without unexpected results are omitted.
    """
    return {stem: entry["unexpected"] for stem, entry in _ledger(run).items() if entry.get("unexpected")}


def executed_notebooks(run: "Run") -> set[str]:
    """Return the stems of the notebooks that the driver executed to the end. Launches of single experiments execute none."""
    return {stem for stem, entry in _ledger(run).items() if entry["status"] in ("done", "unexpected")}


def must_remeasure() -> bool:
    """Return True if the driver requests new measurements because the stored ones have unexpected results."""
    return os.environ.get(REMEASURE) == "1"


def _ledger(run: "Run") -> dict[str, dict]:
    return json.loads(run.read(LEDGER))["notebooks"] if (run.folder / LEDGER).is_file() else {}


def _note(line: list[str]) -> None:
    log = os.environ.get(LOG)
    # The file is opened for each line, so that no reported line is lost if the kernel is killed.
    if log:
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _noted(log: Path, notebook: str) -> list[tuple[str, str]]:
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [(about, what) for stem, about, what in map(json.loads, lines) if stem == notebook]
