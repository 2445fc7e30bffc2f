"""Naming and finding runs: results/<time>-<name>, the newest finished one behind the link `latest`."""

import os
import re
import time
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.paths import reference_folder, results_folder
from hyperion.results.files import StoreError, make_folder

LATEST = "latest"
PASSPORTS = "passports"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def new_run_folder(name: str, results: Path | None = None) -> Path:
    """Make a folder of its own for a run; two callers at the same moment get two folders.

    Args:
        name: what the run is, in letters, digits, '.', '_' and '-' (a profile, say).
        results: folder of all runs, `results_folder()` unless named.
    """
    results = results or results_folder()
    make_folder(results)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{checked_name(name)}"
    for attempt in range(1000):
        folder = results / (stem if attempt == 0 else f"{stem}.{attempt}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise StoreError("1000 runs of this name within one second", where=results, next_step="wait a second")


def checked_name(name: str) -> str:
    """`name` if it can be a folder's name and is none of ours.

    Raises:
        HyperionError: it has other characters, or is `latest`, `reference` or `passports`.
    """
    if not _NAME.fullmatch(name) or name in (LATEST, PASSPORTS, reference_folder().name):
        raise HyperionError(
            f"{name!r} cannot name a run",
            next_step="use letters, digits, '.', '_' and '-', and not latest, passports or reference",
        )
    return name


def set_latest(run: Path) -> None:
    """Point results/latest at a finished run, atomically."""
    temporary = run.parent / f".{LATEST}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run.name)
    os.replace(temporary, run.parent / LATEST)


def find_run(name: str) -> Path:
    """The folder of a run named on the command line: a path, a run's name, `latest`, or a reference machine's name.

    Raises:
        HyperionError: there is none; the message lists the runs there are.
    """
    places = [Path(name), results_folder() / name, reference_folder() / name]
    for place in places:
        if (place / "run.json").is_file():
            return place.resolve()
    known = sorted(p.parent.name for root in (results_folder(), reference_folder()) for p in root.glob("*/run.json"))
    raise HyperionError(
        f"no run {name!r}", where=" or ".join(map(str, places)), next_step=f"name one of: {', '.join(known) or 'none so far'}"
    )
