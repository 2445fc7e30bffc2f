"""Where runs are: their names, new folders for them, and the search for a run by name or path."""

import os
import re
import time
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.paths import reference_folder, results_folder, shipped_reference_folder
from hyperion.results.files import StoreError, make_folder
from hyperion.results.store import RUN, Run

# Names in results/ that are not runs. `latest` is a link to the newest finished run. `passports` is the folder of passports.
LATEST, PASSPORTS = "latest", "passports"
# A name never starts with a dot or a minus sign, so it cannot be a hidden file, a parent folder or a command-line option.
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def new_run_folder(name: str, results: Path | None = None) -> Path:
    """Create a new folder for a run. Processes that call this function at the same time get different folders.

    Args:
        name: name of the run, such as a profile. It consists of letters, digits, '.', '_' and '-'.
        results: folder of all runs; default: `results_folder()`.
    """
    results = results or results_folder()
    make_folder(results)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{checked_name(name)}"
    for attempt in range(1000):
        folder = results / (stem if attempt == 0 else f"{stem}.{attempt}")
        try:
            # `mkdir` is atomic: exactly one of several processes creates the folder, and the others get FileExistsError.
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise StoreError("1000 runs of this name within one second", where=results, next_step="try again")


def checked_name(name: str) -> str:
    """Return `name` if it is a valid name of a run.

    Raises:
        HyperionError: the name has other characters than letters, digits, '.', '_' and '-', or it is `latest`, `reference` or
            `passports`.
    """
    if not _RUN_NAME.fullmatch(name) or name in (LATEST, PASSPORTS, reference_folder().name):
        raise HyperionError(
            f"{name!r} cannot be the name of a run",
            next_step="use letters, digits, '.', '_' and '-', and not latest, passports or reference",
        )
    return name


def set_latest(run: Path) -> None:
    """Make the link results/latest point to a finished run. The change is atomic."""
    # A symbolic link cannot be overwritten in place. Create a new link under a temporary name, and rename it to the final name.
    temporary = run.parent / f".{LATEST}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    # A relative link stays valid if the folder of all runs is moved.
    temporary.symlink_to(run.name)
    os.replace(temporary, run.parent / LATEST)


def is_run(folder: Path) -> bool:
    """Return True if the folder contains a run."""
    return (folder / RUN).is_file()


def find_run(name: str) -> Path:
    """Return the folder of a run.

    Args:
        name: path of the run, its name, `latest`, or the name of a reference machine.

    Raises:
        HyperionError: there is no such run. The message lists all runs.
    """
    places = _places(name)
    for place in places:
        if is_run(place):
            # The link `latest` may change while a command runs, so it is resolved once.
            return place.resolve()
    for place in places:
        if inside := sorted(path.parent.name for path in place.glob(f"*/{RUN}")):
            raise HyperionError(
                f"{name!r} is a folder of {len(inside)} runs, and this command needs one run",
                where=place,
                next_step=f"name one of them, such as {place / inside[0]}",
            )
    known = sorted({p.parent.name for root in _roots() for p in root.glob(f"*/{RUN}")})
    raise HyperionError(
        f"the folder {name!r} is no run, because it contains no run.json" if Path(name).is_dir() else f"no run {name!r}",
        where=" or ".join(dict.fromkeys(map(str, places))),
        next_step=f"use one of these runs: {', '.join(known) or 'there is none yet'}",
    )


def _places(name: str) -> list[Path]:
    """Return the paths at which a run with this name or path may be."""
    return [Path(name), *(root / name for root in _roots())]


def _roots() -> list[Path]:
    """Return the folders of runs. Also with HYPERION_HOME, the references of the checkout are found."""
    roots, shipped = [results_folder(), reference_folder()], shipped_reference_folder()
    return roots + [shipped] * (shipped.is_dir() and shipped not in roots)


def find_runs(name: str) -> list[Path]:
    """Return the run folders that a name refers to: one run, or all runs in a folder of launches.

    Args:
        name: as in `find_run`, or the path or the name of a folder that contains runs.

    Raises:
        HyperionError: there is no such run and no such folder.
    """
    for place in _places(name):
        # A set, because `latest` is a link to one of the other runs.
        runs = set() if (place / RUN).is_file() else {path.parent.resolve() for path in place.glob(f"*/{RUN}")}
        if runs:
            return sorted(runs)
    return [find_run(name)]


def stored_references() -> list[Run]:
    """Return the reference runs in git, sorted by the names of their folders."""
    return [Run.open(path.parent) for path in sorted(reference_folder().glob(f"*/{RUN}"))]
