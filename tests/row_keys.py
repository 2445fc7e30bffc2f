"""Compare which rows two runs have: `python tests/row_keys.py RUN OTHER_RUN`.

A change of the library that should not change what is measured must leave the notebook, experiment, variant, metric and params
of all rows as they were. Values are not compared; `hyperion compare` does that. A few params are themselves measured, such as
the batch that a search tries or the shape of the fastest product. The rows that differ are therefore printed, for a reader to
judge.
"""

import json
import sys
from pathlib import Path

from hyperion.results import Run

Key = tuple[str, str, str, str, str]


def keys_of(folder: Path) -> set[Key]:
    """Return (notebook, experiment, variant, metric, params) of all rows of a run. The params are JSON."""
    rows = Run.open(folder).rows()
    return {(r.notebook, r.experiment, r.variant, r.metric, json.dumps(r.params, sort_keys=True)) for r in rows}


def main(left: Path, right: Path) -> None:
    """Print the number of equal keys and all keys that only one of the runs has."""
    ours, theirs = keys_of(left), keys_of(right)
    what = "have the same notebook, experiment, variant, metric and params"
    print(f"{len(ours & theirs)} of {len(ours)} and of {len(theirs)} rows {what}")
    for folder, only, other in ((left, ours - theirs, theirs - ours), (right, theirs - ours, ours - theirs)):
        elsewhere = {key[:4] for key in other}
        replaced = [key for key in sorted(only) if key[:4] in elsewhere]
        print(f"\nonly {folder}: {len(only)}; the other run has the same metric with other params for {len(replaced)} of them")
        for key in sorted(only):
            print(" ", "=" if key in replaced else "!", *key)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
