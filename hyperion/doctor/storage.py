"""Data, results, disk space and caches."""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from hyperion.data.errors import DataError, DataUnavailable
from hyperion.data.store.sources import FETCH_HINT, mirror_root
from hyperion.data.store.staging import cache_root
from hyperion.doctor.result import CheckResult
from hyperion.paths import home_folder, results_folder

NEEDED_GB = 5.0  # a full run's data, checkpoints, executed notebooks and compile caches
# Compilers and libraries write here while running; unset, they use the second column below the home folder.
CACHES = {
    "HF_HOME": ".cache/huggingface",
    "TORCHINDUCTOR_CACHE_DIR": None,
    "TRITON_CACHE_DIR": ".triton/cache",
    "MIOPEN_USER_DB_PATH": ".config/miopen",
    "JUPYTER_RUNTIME_DIR": ".local/share/jupyter/runtime",
    "MPLCONFIGDIR": ".config/matplotlib",
}


def check_data_source(mirror: Callable[[], Path] = mirror_root, cache: Path | None = None) -> CheckResult:
    """Real data are at hand: a mirror that is named and filled, or what `make fetch` staged."""
    try:
        root = mirror()
        if any(root.iterdir()):
            return CheckResult("data_source", "ok", f"mirror {root}")
        return CheckResult("data_source", "fail", f"mirror {root} is empty", "fill it, or unset HYPERION_DATA_MIRROR")
    except DataError as error:
        if not isinstance(error, DataUnavailable):
            return CheckResult("data_source", "fail", error.what, error.next_step or "")
    cache = cache_root() if cache is None else cache
    staged = sorted(path.name for path in cache.glob("[!.]*")) if cache.is_dir() else []
    if staged:
        return CheckResult("data_source", "ok", f"cache {cache} holds {', '.join(staged)}")
    return CheckResult("data_source", "warn", "no mirror, nothing staged: a download, else synthetic data", FETCH_HINT)


def check_results_folder(folder: Path | None = None) -> CheckResult:
    """Results can be written."""
    folder = folder or results_folder()
    cause = _not_writable(folder)
    if cause is None:
        return CheckResult("results_folder", "ok", str(folder))
    remedy = "make it writable, or name another: HYPERION_RESULTS=/folder"
    return CheckResult("results_folder", "fail", f"{folder}: {cause}", remedy)


def check_disk_space(folder: Path | None = None, free_gb: float | None = None) -> CheckResult:
    """The disk of the results has room for a run."""
    folder = folder or results_folder()
    if free_gb is None:
        free_gb = shutil.disk_usage(_existing(folder)).free / 1e9
    evidence = f"{free_gb:.1f} GB free for {folder}, {NEEDED_GB:.0f} GB are enough for a full run"
    if free_gb >= NEEDED_GB:
        return CheckResult("disk_space", "ok", evidence)
    remedy = "free some space, or point HYPERION_RESULTS and HYPERION_DATA at another disk"
    return CheckResult("disk_space", "warn" if free_gb >= 1 else "fail", evidence, remedy)


def check_caches(variables: Mapping[str, str] = os.environ, home: Path | None = None) -> CheckResult:
    """The folders that compilers, kernels' libraries and Jupyter write to while running can be written."""
    home = home or home_folder()
    folders = {
        name: Path(variables[name]) if variables.get(name) else home / default
        for name, default in CACHES.items()
        if variables.get(name) or default
    }
    broken = {name: cause for name, path in folders.items() if (cause := _not_writable(path))}
    if not broken:
        return CheckResult("caches", "ok", f"{len(folders)} cache folders are writable")
    evidence = "; ".join(f"{name} = {folders[name]}: {cause}" for name, cause in broken.items())
    # mktemp: a name below /tmp that can be guessed may already belong to another user.
    settings = " ".join(f"{name}=$(mktemp -d)" for name in broken)
    return CheckResult("caches", "fail", evidence, f"point them at node-local folders: export {settings}")


def _not_writable(folder: Path) -> str | None:
    """Why nothing can be written below the folder, which need not exist yet; tried by writing, not by reading modes."""
    place = _existing(folder)
    if not place.is_dir():
        return f"{place} is no folder"
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(b"hyperion")
    except OSError as error:
        return error.strerror or str(error)
    return None


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
