"""Name and find runs: folders results/<time>-<name>, and the link `latest` to the newest finished run."""

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
    """Make a new folder for a run; simultaneous callers get different folders.

    Args:
        name: name of the run, such as a profile, in letters, digits, '.', '_' and '-'.
        results: folder of all runs, default `results_folder()`.
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
    raise StoreError("1000 runs of this name within one second", where=results, next_step="try again")


def checked_name(name: str) -> str:
    """Return `name` if it is a valid name of a run.

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
    """Set the link results/latest to a finished run, atomically."""
    temporary = run.parent / f".{LATEST}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run.name)
    os.replace(temporary, run.parent / LATEST)


def find_run(name: str) -> Path:
    """Return the folder of a run by its path, its name, `latest`, or the name of a reference machine.

    Raises:
        HyperionError: there is no such run; the message lists all runs.
    """
    places = [Path(name), results_folder() / name, reference_folder() / name]
    for place in places:
        if (place / "run.json").is_file():
            return place.resolve()
    known = sorted(p.parent.name for root in (results_folder(), reference_folder()) for p in root.glob("*/run.json"))
    raise HyperionError(
        f"no run {name!r}", where=" or ".join(map(str, places)), next_step=f"name one of: {', '.join(known) or 'no run yet'}"
    )
