"""Write a run's tables, pictures and report, and make a run the reference of a machine in results/reference/<name>/."""

import base64
import hashlib
import posixpath
import re
import shutil
import traceback
from fnmatch import fnmatch
from pathlib import Path

from hyperion.chapter.subjects import subjects
from hyperion.dependencies import reached_source_hash
from hyperion.errors import HyperionError
from hyperion.paths import reference_folder
from hyperion.reproduce.ledger import Ledger
from hyperion.reproduce.pages import require_no_machine_paths
from hyperion.results import Run, rows_to_csv
from hyperion.results.execution import unexpected_in
from hyperion.results.store import checked_name

# Limit of all machines together: results/reference/ is in git.
LARGEST_BYTES = 12_000_000
_PAGES = "notebooks/"
# Not copied, since they can be rebuilt from the rows: the report (README.md has its pictures) and the tables as JSON.
_REBUILT = ("report.html", "benchmarks/*.json")
_INLINE_PICTURE = re.compile(rb"data:image/png;base64,([A-Za-z0-9+/=\n]+)")


def export_subjects(ledger: Ledger) -> str:
    """Write the run's tables, pictures and report, unless they are up to date with its rows and the book's code.

    Returns:
        The text of a failure, or "": a picture that cannot be drawn must not cost the measurements still to come.
    """
    rows = hashlib.sha256(rows_to_csv(ledger.run.rows()).encode()).hexdigest()[:16]
    unexpected = hashlib.sha256(repr(unexpected_in(ledger.run)).encode()).hexdigest()[:16]
    figures = [f"{subject.package}.figures" for subject in subjects()]
    digest = f"{rows} {unexpected} {reached_source_hash('hyperion.book', *figures)}"
    if ledger.exported == digest:
        return ""
    try:
        from hyperion.book import Material, export_run, write_report

        material = Material(ledger.run)
        export_run(ledger.run, material)
        write_report(ledger.run, material)
    except HyperionError as error:
        # The cause is the Python error inside a picture's code; whoever repairs it needs its traceback.
        cause = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""
        return "\n".join(filter(None, [f"FAILED to export tables and pictures: {error}", cause]))
    except Exception:
        return f"FAILED to export tables and pictures:\n{traceback.format_exc()}"
    ledger.keep_exported(digest)
    return ""


def publish(run: Run, name: str, folder: Path | None = None) -> tuple[Path, list[str]]:
    """Copy a verified run to the reference results and write its README.md.

    Pages are copied last, as far as the size limit allows. A picture of a page that is also a file of the run becomes a link.
    A reference of the same name is replaced completely or not at all.

    Args:
        run: the run; every file is verified against its manifest first.
        name: the machine's name, such as `h200`.
        folder: the folder of all references; the default is `reference_folder()`.

    Returns:
        The new reference folder, and the names of the pages omitted for their size.

    Raises:
        HyperionError: the run was edited, a file holds a path of this machine, or it is too large without any page.
    """
    folder = folder or reference_folder()
    target = folder / checked_name(name)
    contents, left_out = _choose_files(run, LARGEST_BYTES - _size_of_others(folder, target))
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


def _choose_files(run: Run, room: int) -> tuple[dict[str, bytes], list[str]]:
    names = [name for name in run.verify() if not any(fnmatch(name, pattern) for pattern in ("*.ipynb", *_REBUILT))]
    contents = {name: run.read(name) for name in names}
    for name, content in contents.items():
        require_no_machine_paths(name, content)
    files = {base64.b64encode(content): name for name, content in contents.items() if name.endswith(".png")}
    for name in (name for name in names if name.startswith(_PAGES)):
        contents[name] = _link_pictures(name, contents[name], files)
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


def _link_pictures(page: str, content: bytes, pictures: dict[bytes, str]) -> bytes:
    """Replace the inline pictures of a page that are also files by relative links.

    Args:
        page: name of the page in the run.
        pictures: file name by base64 content.
    """

    def link(match: re.Match[bytes]) -> bytes:
        # Compared as base64: a script in the page may hold the start of such an address, which cannot be decoded.
        name = pictures.get(match[1].replace(b"\n", b""))
        return match[0] if name is None else posixpath.relpath(name, posixpath.dirname(page)).encode()

    return _INLINE_PICTURE.sub(link, content)


def _write_readme(reference: Run) -> None:
    from hyperion.book import reference_readme

    files = reference_readme(reference)
    for name, content in files.items():
        require_no_machine_paths(name, content)
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
