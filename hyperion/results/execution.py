"""What passes between the driver and the kernel that executes a notebook for it, besides the notebook's own text.

The driver names a file; each experiment that the kernel measures or finds kept adds a line to it. So the driver knows what
this very execution did, whatever rows lay in the run before.
"""

import json
import os
from pathlib import Path

LOG = "HYPERION_EXECUTION_LOG"
REMEASURE = "HYPERION_REMEASURE"
MEASURED, KEPT = "measured", "kept"


def note_experiment(notebook: str, experiment: str, what: str) -> None:
    """Tell the driver, where there is one, that an experiment was MEASURED or KEPT."""
    log = os.environ.get(LOG)
    if log:
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps([notebook, experiment, what]) + "\n")


def executed(log: Path, notebook: str) -> dict[str, str]:
    """{experiment: MEASURED or KEPT} of a notebook, by its execution's log; measured once is measured."""
    found: dict[str, str] = {}
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        stem, experiment, what = json.loads(line)
        if stem == notebook and found.get(experiment) != MEASURED:
            found[experiment] = what
    return found


def must_remeasure() -> bool:
    """Whether the driver asks for new measurements: the notebook's own check failed on those it has."""
    return os.environ.get(REMEASURE) == "1"
