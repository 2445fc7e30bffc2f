"""What is kept of an executed notebook besides its rows, and how its fault is told."""

import hashlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import hyperion
from hyperion.chapter.subjects import subjects
from hyperion.dependencies import reached_source_hash
from hyperion.errors import HyperionError
from hyperion.reproduce.execution import Fault
from hyperion.reproduce.ledger import Ledger
from hyperion.reproduce.notebooks import Notebook
from hyperion.reproduce.pages import kept_copy, page
from hyperion.results import rows_to_csv
from hyperion.results.execution import unexpected_in

_LINES_OF_TRACEBACK = 40


def kept_files(notebook: Notebook, document, folder: Path, root: Path) -> dict[str, bytes]:
    """The executed copy and its page, by path in the run; the machine's own paths are replaced in both."""
    import nbformat

    package = Path(hyperion.__file__).resolve().parent.parent
    replacements = {str(folder): f"results/{folder.name}", str(root): ".", str(package): "."}
    replacements |= {sys.prefix: "<python>", sys.base_prefix: "<python>"}
    home = os.path.expanduser("~")
    if home != "/":
        replacements[home] = "~"
    copy = kept_copy(document, replacements)
    return {
        f"notebooks/{notebook.stem}.ipynb": nbformat.writes(copy).encode(),
        f"notebooks/{notebook.stem}.html": page(copy, notebook.stem).encode(),
    }


def show_fault(say: Callable[[str], object], notebook: Notebook, fault: Fault, folder: Path) -> None:
    """Tell what failed, in which cell, and where the executed copy lies."""
    cell = "" if fault.cell is None else f", cell In [{fault.cell}]"
    summary, *rest = fault.summary.splitlines()
    say(f"FAILED {notebook.path.parent.name}/{notebook.path.name}{cell}: {summary}")
    for line in rest:
        say(f"    {line}")
    for line in fault.traceback.splitlines()[-_LINES_OF_TRACEBACK:]:
        say(f"    {line}")
    say(f"    the executed copy: {folder / 'notebooks' / notebook.path.name}")


def export_subjects(ledger: Ledger) -> str:
    """Have the book write the run's tables, pictures and report, unless they were made from these very rows and sentences.

    Returns:
        "" or the fault: a picture that cannot be drawn must not cost the measurements still to come.
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
        # A picture of rows that it cannot use carries what Python said, which a report of the fault needs.
        said = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""
        return "\n".join(filter(None, [f"FAILED to export tables and pictures: {error}", said]))
    except Exception:
        return f"FAILED to export tables and pictures:\n{traceback.format_exc()}"
    ledger.keep_exported(digest)
    return ""
