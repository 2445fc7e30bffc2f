"""The folders that Hyperion reads and writes."""

import contextlib
import os
import tempfile
from pathlib import Path

import hyperion
from hyperion.errors import HyperionError

HOME = "HYPERION_HOME"
NO_HOME = "/nonexistent"  # Debian enters this path for users who have no home folder
SILENT_HOSTS, FRAMES = "HYPERION_SILENT_HOSTS", "HYPERION_FRAMES"


def project_root() -> Path:
    """Return the folder that contains data/ and results/.

    If HYPERION_HOME is set, it names this folder. Otherwise, the folder is the checkout that contains the working folder, else
    the checkout from which `hyperion` is imported, else the working folder. It is never site-packages.

    Raises:
        HyperionError: HYPERION_HOME does not name a folder, or the working folder was removed.
    """
    if named := os.environ.get(HOME):
        home = expanded(named)
        if not home.is_dir():
            raise HyperionError(f"{HOME} names no folder", where=home, next_step=f"create the folder, or unset {HOME}")
        return home.absolute()
    try:
        here = Path.cwd()
    except FileNotFoundError as error:
        raise HyperionError("the working folder was removed", next_step=f"cd to a folder that exists, or set {HOME}") from error
    own = Path(hyperion.__file__).resolve().parent.parent
    return next((folder for folder in (here, *here.parents, own) if is_checkout(folder)), here)


def is_checkout(folder: Path) -> bool:
    """Return True if the folder is a checkout with notebooks."""
    return (folder / "phase1_hardware").is_dir() and (folder / "pyproject.toml").is_file()


def results_folder() -> Path:
    """Return the folder of all runs: the value of HYPERION_RESULTS, or results/ in `project_root()`."""
    named = os.environ.get("HYPERION_RESULTS")
    return expanded(named) if named else project_root() / "results"


def data_folder() -> Path:
    """Return the folder of downloaded and prepared data: the value of HYPERION_DATA, or data/ in `project_root()`."""
    named = os.environ.get("HYPERION_DATA")
    return expanded(named) if named else project_root() / "data"


def silent_hosts_folder() -> Path | None:
    """Return the folder in which one call of `make reproduce` records unreachable hosts, or None outside of such a call."""
    named = os.environ.get(SILENT_HOSTS)
    return Path(named) if named else None


def frames_folder() -> Path | None:
    """Return the folder in which a notebook and its jobs record printed frames, or None outside of `make reproduce`."""
    named = os.environ.get(FRAMES)
    return Path(named) if named else None


def reference_folder() -> Path:
    """Return the folder of the reference runs in git."""
    return project_root() / "results" / "reference"


def shipped_reference_folder() -> Path:
    """Return the folder of the reference runs in the checkout from which `hyperion` is imported. It may not exist."""
    return Path(hyperion.__file__).resolve().parent.parent / "results" / "reference"


def expanded(name: str) -> Path:
    """Return the path `name` with a leading ~ expanded to the user's home folder.

    Raises:
        HyperionError: the home folder is unknown, because HOME is not set and the user has no entry in the password file.
    """
    with contextlib.suppress(RuntimeError):
        path = Path(name).expanduser()
        if path == Path(name) or not path.is_relative_to(NO_HOME):
            return path
    raise HyperionError(
        f"the home folder of user {os.getuid()} is not known", where=name, next_step="set HOME, or use an absolute path"
    )


def flush(path: Path) -> None:
    """Flush the content of a file, or the entries of a folder, to the disk with fsync."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def home_folder() -> Path:
    """Return the user's home folder, or the folder for temporary files if the home folder is unknown."""
    with contextlib.suppress(RuntimeError):
        if Path.home() != Path(NO_HOME):
            return Path.home()
    return Path(tempfile.gettempdir())
