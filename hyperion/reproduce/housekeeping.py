"""Find the files that `hyperion clean` removes.

These are the caches of a checkout and, on request, the runs and data that Hyperion wrote. Cache folders are removed only in a
checkout of Hyperion. A run or a data folder is removed only if its manifest lists all of its files. Symbolic links are never
followed.
"""

import os
import re
import shutil
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

from hyperion.data.prepare.verify import REASON_FILE
from hyperion.data.store.folders import QUARANTINE, WORKING, sha256_of, strangers
from hyperion.engines.environments import is_environment
from hyperion.errors import HyperionError
from hyperion.paths import is_checkout
from hyperion.reproduce.runs import in_use
from hyperion.results import Run
from hyperion.results.places import LATEST

_CACHES = (".pytest_cache", ".ruff_cache", ".hypothesis", "build", "dist", "hyperion.egg-info")
# Files of Hyperion that no manifest lists: the manifest itself, locks, and temporary files that a killed process left.
_UNLISTED = re.compile(r"MANIFEST(\.pending)?|\.(lock|driver\.lock|writer\.lock)(\.exclusive)?|(.+/)?\.[^/]+\.[0-9a-f]+\.tmp")
_WORKSPACES = ("checkpoints", "adapters", "logs")  # folders to which training runs write many files that no manifest lists
_CHECKPOINT = re.compile(r"step-\d{8,}")
_IN_WORKSPACES = (".json", ".safetensors", ".npy", ".npz", ".parquet", ".log", ".lock")  # suffixes of the files in these folders
_TRACES = ("step_trace.json.gz", "memory_snapshot.pickle", "kernels.csv")  # names of the files that tracing a training step adds
# Files with which frameworks that are launched in turn wait for each other; see `hyperion.engines.launch.launch_in_turn`.
_TURNS = re.compile(r"turns/turn-\d+/(go|stop|ready-\d+-of-\d+)")
_SETTLED_S = 3600.0  # a run that changed within this many seconds may still be in use
_STORES = ("raw", "processed")
_FRAMEWORKS = "frameworks"  # environments of frameworks, which pip filled
_IN_STORES = ("hub", QUARANTINE)
_QUARANTINED = re.compile(r".+\.[0-9a-f]{8}")
_SHOWN = 20


def removable(root: Path, results: Path, data: Path, *, runs: bool = False, staged_data: bool = False) -> list[Path]:
    """Return the paths to remove. The list contains no file that is in git.

    Args:
        root: the checkout. If the folder is not a checkout of Hyperion, no caches are listed.
        results: folder of all runs.
        data: folder of all data.
        runs: if True, list the runs, except the folder reference/, runs in use, and runs that changed within the last hour. The
            link `latest` is listed if its run is listed or missing.
        staged_data: if True, list everything in the data folder except README.md.

    Raises:
        HyperionError: a run or the data folder contains a file that Hyperion did not write.
    """
    found, foreign = list(_caches(root)), []
    if runs and results.is_dir():
        for folder in _runs(results):
            found.append(folder)
            foreign += [] if folder.is_symlink() else _foreign_in_run(folder)
    if staged_data and data.is_dir():
        for entry in sorted(path for path in data.iterdir() if path.name != "README.md"):
            found.append(entry)
            if entry.name in _STORES:
                foreign += _foreign_in_store(entry)
            elif entry.name == _FRAMEWORKS and _is_folder(entry):
                foreign += [path for path in sorted(entry.iterdir()) if not is_environment(path)]
            else:
                foreign.append(entry)
    if foreign:
        shown = [str(path) for path in foreign[:_SHOWN]]
        if len(foreign) > _SHOWN:
            shown.append(f"and {len(foreign) - _SHOWN} more")
        raise HyperionError(
            "some files were not written by Hyperion, or were changed after Hyperion wrote them; nothing was removed",
            where="\n         ".join(shown),
            next_step="move your files to another folder and call again, or remove by hand what you do not need",
        )
    return found


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _caches(root: Path) -> Iterator[Path]:
    if not _is_hyperion(root):
        return
    yield from (path for name in _CACHES if _is_folder(path := root / name))
    for part in sorted(path for path in root.glob("*") if _is_folder(path)):
        if part.name not in ("hyperion", "tests") and not part.name.startswith("phase"):
            continue
        for place, folders, _ in os.walk(part):
            for name in sorted(folders):
                if name == "__pycache__" or (name == ".ipynb_checkpoints" and part.name.startswith("phase")):
                    # Removing a name from `folders` keeps `os.walk` from entering the folder.
                    folders.remove(name)
                    if _is_folder(path := Path(place, name)):
                        yield path


def _is_hyperion(root: Path) -> bool:
    """Return True if the folder is a checkout of Hyperion and not of another project."""
    if not is_checkout(root):
        return False
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8")).get("project")
    except ValueError:
        return False
    return isinstance(project, dict) and project.get("name") == "hyperion"


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _runs(results: Path) -> Iterator[Path]:
    """Yield the folders of runs that are not in use, and the link to the latest run if this run is removed or missing.

    Folders that `hyperion relaunch` or `hyperion launches` wrote are included if they are not in use.
    """
    folders = [path for path in sorted(results.iterdir()) if path.name != "reference" and _is_folder(path)]
    removed = [path for path in folders if (_launches(path) or _is_run(path)) and not _is_live(path)]
    latest = results / LATEST
    if latest.is_symlink() and (not latest.exists() or latest.resolve() in map(Path.resolve, removed)):
        yield latest
    yield from removed


def _is_live(folder: Path) -> bool:
    """Return True if a call of `make reproduce` or `hyperion launches` uses the run or one of the launches in the folder, or if
    a file in the folder changed within the last hour.

    The lock alone does not show every use, because notebooks in JupyterLab and the training commands take no lock.
    """
    newest = max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    return any(map(in_use, (folder, *_launches(folder)))) or time.time() - newest < _SETTLED_S


def _is_run(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("run.json", "MANIFEST"))


def _sides(folder: Path) -> list[Path]:
    """Return the folders that contain launches.

    For a folder that `hyperion relaunch` wrote, these are its subfolders A and B. Otherwise, it is the folder itself.
    """
    return [folder / side for side in "AB" if _is_folder(folder / side)] or [folder]


def _launches(folder: Path) -> list[Path]:
    """Return the runs in a folder that `hyperion relaunch` or `hyperion launches` wrote. Their names are numbers."""
    paths = [path for side in _sides(folder) for path in side.iterdir()]
    return sorted(path for path in paths if path.name.isdecimal() and _is_folder(path) and _is_run(path))


def _foreign_in_run(folder: Path) -> list[Path]:
    """Return the files of a run that are not in its manifest or whose hash does not match the manifest.

    `folder` can also be a folder that `hyperion relaunch` or `hyperion launches` wrote.
    """
    if launches := _launches(folder):
        sides = _sides(folder)
        others = [] if sides == [folder] else [path for path in folder.iterdir() if path not in sides]
        others += [path for side in sides for path in side.iterdir() if path not in launches]
        return sorted(others) + [path for launch in launches for path in _foreign_in_run(launch)]
    listed, foreign = Run(folder).hashes(), []
    for place, folders, files in os.walk(folder):
        for path in [Path(place, name) for name in sorted(files + folders)]:
            name = path.relative_to(folder).as_posix()
            if name in _WORKSPACES and _is_folder(path):
                folders.remove(name)
                foreign += _foreign_in_workspace(path)
            elif not _is_folder(path) and not (
                _is_file(path) and (_UNLISTED.fullmatch(name) or listed.get(name) == sha256_of(path))
            ):
                foreign.append(path)
    return foreign


def _foreign_in_workspace(folder: Path) -> list[Path]:
    """Return the files and folders in `folder` that a training run never writes.

    These are links, files with a suffix that training runs do not use, and checkpoints that a user has copied, for example to
    step-best.
    """
    entries = [Path(place, name) for place, folders, files in os.walk(folder) for name in sorted(folders + files)]

    def is_foreign(path: Path) -> bool:
        copy = path.name.startswith("step-") and not _CHECKPOINT.fullmatch(path.name)
        known = path.suffix in _IN_WORKSPACES or path.name in _TRACES or bool(_TURNS.fullmatch("/".join(path.parts[-3:])))
        return copy or path.is_symlink() or not (_is_folder(path) or known)

    return [path for path in entries if is_foreign(path)]


def _foreign_in_store(folder: Path) -> list[Path]:
    """Return the entries of a data folder, such as raw/ or processed/, that Hyperion did not write."""
    if not _is_folder(folder):
        return [folder]
    foreign = []
    for entry in sorted(folder.iterdir()):
        if entry.name in _IN_STORES:
            foreign += _foreign_in_store(entry)
        elif folder.name == QUARANTINE and _QUARANTINED.fullmatch(entry.name) and _is_file(entry):
            continue  # a refused download, which Hyperion stored under this name
        elif not (WORKING.fullmatch(entry.name) and _is_folder(entry)):  # a killed process leaves such a working folder
            quarantined = folder.name == QUARANTINE  # quarantined files may be truncated or changed, so only names are compared
            reason = entry / REASON_FILE if quarantined else None
            foreign += [path for path in strangers(entry, names_alone=quarantined) if path != reason]
    return foreign


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
