"""Make a run the committed reference of a machine: results/reference/<name>/."""

import base64
import posixpath
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.paths import reference_folder
from hyperion.reproduce.pages import demand_no_machine_paths
from hyperion.results import Run
from hyperion.results.folders import checked_name

# results/reference/ is in git: all machines together stay under this.
LARGEST_BYTES = 12_000_000
_PAGES = "notebooks/"
# Rebuilt from the rows: the report, whose pictures are those of README.md, and the JSON twins of the tables.
_REBUILT = ("report.html", "benchmarks/*.json")
_INLINE_PICTURE = re.compile(rb"data:image/png;base64,([A-Za-z0-9+/=\n]+)")


def publish(run: Run, name: str, folder: Path | None = None) -> tuple[Path, list[str]]:
    """Copy a verified run to the reference results, pages last and as far as the size allows, and write its README.md.

    A page's picture that also lies beside it as a file is linked there, not kept twice.
    A reference of the same name is replaced, whole or not at all.

    Args:
        run: the run; every file is verified against its manifest first.
        name: the machine's name, `h200` say.
        folder: where the references lie, `reference_folder()` when left out.

    Returns:
        The new reference folder, and the names of the pages left out for their size.

    Raises:
        HyperionError: the run was edited, a file holds a path of this machine, or it is too large without any page.
    """
    folder = folder or reference_folder()
    target = folder / checked_name(name)
    contents, left_out = _chosen(run, LARGEST_BYTES - _size_of_others(folder, target))
    staged = folder / f".{name}.new"
    shutil.rmtree(staged, ignore_errors=True)
    try:
        reference = Run(staged)
        reference.write(contents)
        _write_readme(reference)
        for lock in staged.glob(".*lock"):
            lock.unlink()
        _replace(staged, target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return target, left_out


def _chosen(run: Run, room: int) -> tuple[dict[str, bytes], list[str]]:
    names = [name for name in run.verify() if not any(fnmatch(name, pattern) for pattern in ("*.ipynb", *_REBUILT))]
    contents = {name: run.read(name) for name in names}
    for name, content in contents.items():
        demand_no_machine_paths(name, content)
    files = {base64.b64encode(content): name for name, content in contents.items() if name.endswith(".png")}
    for name in (name for name in names if name.startswith(_PAGES)):
        contents[name] = _linked(name, contents[name], files)
    pages = sorted((name for name in names if name.startswith(_PAGES)), key=lambda name: len(contents[name]))
    room -= sum(len(content) for name, content in contents.items() if name not in pages)
    if room < 0:
        raise HyperionError(
            f"results/reference/ would grow {-room / 1e6:.1f} MB beyond its {LARGEST_BYTES / 1e6:.0f} MB",
            where=run.folder,
            next_step="publish a run with fewer samples, or remove a reference that is out of date",
        )
    left_out = []
    for name in pages:
        room -= len(contents[name])
        if room < 0:
            left_out.append(name)
            del contents[name]
    return contents, left_out


def _linked(page: str, content: bytes, pictures: dict[bytes, str]) -> bytes:
    """The page with relative links for those of its inline pictures that `pictures`, names by base64 content, has as files."""

    def link(found: re.Match) -> bytes:
        # Not decoded: a script of the page may hold the beginning of such an address, which is no picture.
        name = pictures.get(found[1].replace(b"\n", b""))
        return found[0] if name is None else posixpath.relpath(name, posixpath.dirname(page)).encode()

    return _INLINE_PICTURE.sub(link, content)


def _write_readme(reference: Run) -> None:
    from hyperion.book import reference_readme

    files = reference_readme(reference)
    for name, content in files.items():
        demand_no_machine_paths(name, content)
    reference.write(files)


def _replace(staged: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    staged.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _size_of_others(folder: Path, target: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_relative_to(target))
    return sum(path.stat().st_size for path in files)
