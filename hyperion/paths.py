"""Where a checkout keeps its things: the one place that knows the folder names."""

import os
from pathlib import Path

import hyperion

SILENT_HOSTS = "HYPERION_SILENT_HOSTS"


def project_root() -> Path:
    """The checkout that holds the notebooks: the nearest parent of the working folder that has them, else the package's own."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "phase1_hardware").is_dir() and (folder / "pyproject.toml").is_file():
            return folder
    return Path(hyperion.__file__).resolve().parent.parent


def results_folder() -> Path:
    """Folder of all runs: HYPERION_RESULTS, else results/ of the checkout."""
    return Path(os.environ.get("HYPERION_RESULTS") or project_root() / "results")


def data_folder() -> Path:
    """Folder of staged and processed data: HYPERION_DATA, else data/ of the checkout."""
    return Path(os.environ.get("HYPERION_DATA") or project_root() / "data")


def silent_hosts_folder() -> Path | None:
    """Folder in which the processes of one `make reproduce` tell each other which hosts are silent; None outside of one."""
    named = os.environ.get(SILENT_HOSTS)
    return Path(named) if named else None


def reference_folder() -> Path:
    """Folder of the committed reference results, one folder a machine."""
    return project_root() / "results" / "reference"
