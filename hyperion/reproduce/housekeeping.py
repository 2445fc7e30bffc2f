"""What `hyperion clean` removes: first what costs nothing to make again, runs and data only when asked."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from hyperion.reproduce.runs import in_use

_CACHES = (".pytest_cache", ".ruff_cache", ".hypothesis", "build", "dist")


def removable(root: Path, results: Path, data: Path, *, runs: bool = False, staged_data: bool = False) -> list[Path]:
    """What would be removed, nothing of which is in git.

    Args:
        root: the checkout.
        results: folder of all runs; with `runs` every run but those a live call works in, never reference/.
        data: folder of data; with `staged_data` all it holds but its README.md.
    """
    found = [root / name for name in _CACHES if (root / name).is_dir()]
    found += sorted(root.glob("*.egg-info"))
    found += sorted(path for part in ("hyperion", "tests", "phase*") for path in root.glob(f"{part}/**/__pycache__"))
    found += sorted(root.glob("phase*/.ipynb_checkpoints"))
    if runs:
        found += _runs(results)
    if staged_data and data.is_dir():
        found += sorted(path for path in data.iterdir() if path.name != "README.md")
    return found


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _runs(results: Path) -> Iterator[Path]:
    if not results.is_dir():
        return
    for path in sorted(results.iterdir()):
        # Relaunches lie in a folder of their side, both sides in one folder.
        is_run = ((path / "run.json").is_file() or any(path.glob("[AB]/*/run.json"))) and path.name != "reference"
        if path.is_symlink() or (is_run and not in_use(path)):
            yield path
