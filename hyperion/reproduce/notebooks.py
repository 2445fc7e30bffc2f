"""Read the notebooks of the book, their order, the chapters that each one needs, and the experiments that each one runs.

The stem of a notebook is its file name without .ipynb.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from hyperion.chapter.subjects import subjects
from hyperion.errors import HyperionError, not_none

_REMEDY = (
    'give the notebook metadata {"hyperion": {"needs": [], "optional": [], "produces": [...], "time_budget_s": {...}, '
    '"devices": "one"}}'
)
# Expected time of a notebook if its metadata contain none for the profile.
DEFAULT_SECONDS = 60.0


class BookError(HyperionError):
    """Raised if a notebook cannot be read or ordered, or if a requested chapter does not exist."""


@dataclass(frozen=True)
class Notebook:
    """One chapter of the book.

    Args:
        path: the .ipynb file.
        needs: stems of the notebooks that must finish before this notebook starts.
        optional: stems of notebooks whose rows are used if they exist.
        produces: names of the experiments whose rows the notebook must write to the run.
        time_budget_s: expected duration in seconds, by profile.
        several_devices_s: the same on a machine with several devices, for profiles in which it is clearly longer.
        without_frameworks_s: the same if frameworks that the notebook can use are not installed, if it is clearly shorter.
        cells: (cell type, source) of all cells in order.
        devices: "one" if the notebook uses a single device, so that other notebooks can use the other devices at the same time,
            else "all".
    """

    path: Path
    needs: tuple[str, ...]
    optional: tuple[str, ...]
    produces: tuple[str, ...]
    time_budget_s: dict[str, float] = field(hash=False)
    cells: tuple[tuple[str, str], ...] = field(repr=False)
    devices: str = "all"
    several_devices_s: dict[str, float] = field(default_factory=dict, hash=False)
    without_frameworks_s: dict[str, float] = field(default_factory=dict, hash=False)

    @property
    def stem(self) -> str:
        return self.path.stem

    @property
    def number(self) -> str:
        """Number of the chapter, such as 2.4 for phase2_development/04_memory.ipynb; "" for a notebook in another folder."""
        found = re.match(r"phase(\d+)[^/]*/(\d+)_", f"{self.path.parent.name}/{self.path.name}")
        return f"{int(found[1])}.{int(found[2])}" if found else ""

    @property
    def code(self) -> list[str]:
        """Sources of the non-empty code cells."""
        return [source for kind, source in self.cells if kind == "code" and source.strip()]

    def budget_s(self, profile: str, devices: int = 1, frameworks: bool = True) -> float:
        """Return the expected seconds in a profile on a machine with this number of devices, with or without the frameworks."""
        seconds = self.time_budget_s.get(profile, DEFAULT_SECONDS)
        if devices > 1:
            seconds = self.several_devices_s.get(profile, seconds)
        return float(seconds if frameworks else self.without_frameworks_s.get(profile, seconds))


def read_book(root: Path) -> list[Notebook]:
    """Return all notebooks in the order of the book.

    The notebooks in the checkout are sorted by phase and file name, followed by the notebooks of added subjects.

    Raises:
        BookError: there is no notebook, a notebook is not JSON or has no metadata, two notebooks have the same name, or a
            notebook needs a chapter that does not exist or comes later in the book.
    """
    # Sort by number and not by text, because phase10 comes after phase2.
    paths = sorted(root.glob("phase*/[0-9][0-9]_*.ipynb"), key=lambda path: (_phase_number(path), path.name))
    paths += [path for subject in subjects() for path in subject.notebooks]
    if not paths:
        raise BookError(
            "there are no notebooks in this folder",
            where=root / "phase*",
            next_step="run the command inside a checkout of Hyperion, or set HYPERION_HOME=/path/to/checkout",
        )
    book = [read_notebook(path) for path in paths]
    seen: list[str] = []
    for notebook in book:
        if notebook.stem in seen:
            raise BookError(
                f"two notebooks are called {notebook.stem}", where=notebook.path, next_step="rename one of the notebooks"
            )
        for need in (*notebook.needs, *notebook.optional):
            if need not in seen:
                remedy = f"in metadata.hyperion, name earlier chapters only: {', '.join(seen) or 'there is none'}"
                raise BookError(
                    f"{notebook.stem} needs {need!r}, which is no earlier chapter", where=notebook.path, next_step=remedy
                )
        seen.append(notebook.stem)
    return book


def read_notebook(path: Path) -> Notebook:
    """Read one notebook with its metadata.

    Raises:
        BookError: the file is not a notebook, its metadata are incomplete, or no cell has the tag `parameters`.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        tags = [tag for cell in document["cells"] for tag in cell.get("metadata", {}).get("tags", ())]
        cells = tuple((cell["cell_type"], "".join(cell["source"])) for cell in document["cells"])
        metadata = document["metadata"].get("hyperion")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "save it from JupyterLab as a notebook, or restore the file if it is in git: git checkout -- <file>"
        raise BookError(f"not a notebook: {error!r}", where=path, next_step=remedy) from error
    if not isinstance(metadata, dict):
        raise BookError("notebook lacks metadata.hyperion", where=path, next_step=_REMEDY)
    if "parameters" not in tags:  # the notebook would measure with its own settings, and in a run of its own
        raise BookError(
            "no cell of the notebook has the tag 'parameters'",
            where=path,
            next_step="give this tag to the cell that sets profile, data_source, output and seed",
        )
    try:
        notebook = Notebook(
            path=path,
            needs=_names(metadata["needs"]),
            optional=_names(metadata.get("optional", [])),
            produces=_names(metadata["produces"]),
            time_budget_s=_seconds(metadata["time_budget_s"]),
            several_devices_s=_seconds(metadata.get("several_devices_s", {})),
            without_frameworks_s=_seconds(metadata.get("without_frameworks_s", {})),
            cells=cells,
            devices=metadata.get("devices", "all"),
        )
        if notebook.devices not in ("one", "all"):
            raise ValueError(f'devices is {notebook.devices!r}, not "one" or "all"')
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BookError(f"metadata.hyperion is incomplete: {error!r}", where=path, next_step=_REMEDY) from error
    return notebook


def _names(names: object) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{names!r:.60} is not a list of names")
    return tuple(names)


def _seconds(by_profile: dict[str, float]) -> dict[str, float]:
    return {profile: float(seconds) for profile, seconds in by_profile.items()}


def select(book: list[Notebook], only: str | None) -> list[Notebook]:
    """Return all notebooks, or some chapters and all chapters that they need, in the order of the book.

    Args:
        book: all notebooks.
        only: numbers (such as 2.4), stems, file names or paths of chapters, separated by commas or spaces. None or "" selects all
            notebooks.

    Raises:
        BookError: a chapter does not exist. The message lists all chapters.
    """
    if not only:
        return book
    by_stem = {notebook.stem: notebook for notebook in book}
    by_number = {notebook.number: notebook.stem for notebook in book if notebook.number}

    def stem_of(name: str) -> str | None:
        stem = by_number.get(name) or Path(name).name.removesuffix(".ipynb")
        return stem if stem in by_stem else None

    names = [only] if stem_of(only) else re.split(r"[\s,]+", only.strip(" ,"))  # a path may contain a space
    if missing := [name for name in names if stem_of(name) is None]:
        raise BookError(f"there is no chapter {missing[0]!r}", next_step=f"use ONLY= with some of: {', '.join(by_stem)}")
    waiting, chosen = [not_none(stem_of(name)) for name in names], set()
    while waiting:
        stem = waiting.pop()
        chosen.add(stem)
        # Optional chapters are not added, because their rows are used only if they exist.
        waiting.extend(need for need in by_stem[stem].needs if need not in chosen)
    return [notebook for notebook in book if notebook.stem in chosen]


def _phase_number(path: Path) -> tuple[int, str]:
    number = re.match(r"phase(\d+)", path.parent.name)
    return (int(number.group(1)) if number else 0, path.parent.name)
