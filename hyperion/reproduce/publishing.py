"""Make the files of a run that readers use, and publish a run as the reference of a machine.

The files are HTML pages of the executed notebooks, tables, pictures and a report. Pages contain no local paths and need no
network. A reference is a copy of a verified run in results/reference/<name>/.
"""

import base64
import contextlib
import functools
import hashlib
import html
import io
import json
import os
import posixpath
import re
import shutil
import sys
import traceback
import zlib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hyperion
from hyperion.chapter.subjects import subjects
from hyperion.dependencies import reached_source_hash
from hyperion.errors import HyperionError
from hyperion.locks import folder_lock
from hyperion.paths import reference_folder
from hyperion.reproduce.notebooks import Notebook
from hyperion.reproduce.runs import REPLAY, Ledger, in_use
from hyperion.results import Run, rows_to_csv
from hyperion.results.execution import LEDGER, unexpected_in
from hyperion.results.files import make_folder
from hyperion.results.places import checked_name

if TYPE_CHECKING:
    from nbconvert import HTMLExporter

# Limit on the total size of all references as git stores them, which is what each clone downloads.
LARGEST_BYTES = 26_000_000
_PAGES = "notebooks/"
# A link to a notebook, as in "Before: [2.7 Compilation](07_compilation_optimization.ipynb)", or to the page of a notebook.
_NOTEBOOK_LINK = re.compile(rb'<a href="(?:[^":]*/)?(\d\d_[^":/]+)\.(?:ipynb|html)"[^>]*>(.*?)</a>', re.DOTALL)
# The start of a link from a notebook to a page of a reference.
_REFERENCE_LINK = re.compile(rb'<a href="(?:\.\./)+(?:results/)?reference/')
# The report and the tables of each experiment are not copied, because they can be regenerated from the rows. README.md shows
# the pictures.
_REBUILT = ("report.html", "benchmarks/*.json", "benchmarks/*.csv")
_INLINE_PICTURE = re.compile(rb"data:image/png;base64,([A-Za-z0-9+/=\n]+)")
ABSOLUTE_PATH = re.compile(
    r"(?<![\w.:/~$%-])/(?:home|root|Users|tmp|work|workspace|scratch|mnt|media|srv|var|opt|data|gpfs|lustre|lus|ccs|project|"
    r"projects|global|nfs|usr|etc)/[\w.+@-][^\s\"'<>)]*"
)
# The pattern starts with a slash and has a bounded length. Without the bound, it takes minutes on a base64 picture of 0.5 MB.
_KERNEL_FILE = re.compile(r"/[^\s\"'<>]{0,200}?/ipykernel_\d+/\d+\.py")
# Matches temporary folders in the messages of a worker's compiler or launcher.
_TEMPORARY_FILE = re.compile(r"/[^\s\"'<>]{0,100}?/hyperion-[a-z]+-[^\s\"'<>\\]{0,300}")
_WIDGET = "application/vnd.jupyter.widget-view+json"
_MATH = re.compile(r"(?P<code>```.*?```|`[^`\n]*`)|\$\$(?P<block>.+?)\$\$|(?<![\\$])\$(?P<inline>[^$\n]+?)\$(?!\d)", re.DOTALL)
# JupyterLab's style sheet is not used, because it adds 0.25 MB to every page. Most of it is for an editor, which a page does not
# have.
STYLE = """
:root{--jp-cell-editor-background:#f6f7f9;--jp-cell-editor-active-background:#fff;--jp-mirror-editor-comment-color:#408080;
--jp-mirror-editor-error-color:#c00;--jp-mirror-editor-keyword-color:#008000;--jp-mirror-editor-number-color:#080;
--jp-mirror-editor-operator-color:#a2f;--jp-mirror-editor-punctuation-color:#05a;--jp-mirror-editor-string-color:#ba2121;
--jp-mirror-editor-variable-color:#1b1f24;--soft:#5d6670;--line:#e1e4e8;
--code:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
*{box-sizing:border-box}
body{margin:0;background:#fff;color:#1b1f24;font:15px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1100px;margin:0 auto;padding:1.6rem 1.2rem 4rem}
h1{font-size:1.9rem;line-height:1.25;margin:.6rem 0}
h2{font-size:1.4rem;margin:1.8rem 0 .5rem}
h3{font-size:1.1rem;margin:1.2rem 0 .4rem}
p{margin:.5rem 0}
a{color:#0072B2;text-decoration:none}
a:hover{text-decoration:underline}
.anchor-link,.jp-Collapser{display:none}
.jp-Cell{margin:.35rem 0}
.jp-InputArea,.jp-OutputArea-child{display:flex;align-items:flex-start}
.jp-InputPrompt,.jp-OutputPrompt{flex:0 0 4.4rem;color:var(--soft);font:12px/1.7 var(--code);text-align:right;padding-right:.7rem}
.jp-MarkdownOutput,.jp-InputArea-editor,.jp-OutputArea-output{flex:1 1 0;min-width:0}
.jp-InputArea-editor{background:var(--jp-cell-editor-background);border:1px solid var(--line);border-radius:4px;overflow-x:auto}
pre{margin:0;font:13px/1.45 var(--code)}
.highlight pre{padding:.45rem .6rem}
.jp-RenderedText{overflow-x:auto}
.jp-RenderedText pre{white-space:pre-wrap;overflow-wrap:anywhere}
[data-mime-type$=stderr]{background:#fff4ec}
code{font:.9em var(--code);background:var(--jp-cell-editor-background);padding:.1em .25em;border-radius:3px}
.highlight code,pre code{padding:0;background:none}
.jp-RenderedMarkdown pre{background:var(--jp-cell-editor-background);padding:.45rem .6rem;overflow-x:auto}
img{max-width:100%}
.jp-RenderedHTML{overflow-x:auto}
table{border-collapse:collapse;font-size:.84rem;margin:.5rem 0}
th,td{padding:.3rem .6rem;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
tbody tr:nth-child(even){background:#f8f9fa}
th{font-weight:600}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums}
blockquote{margin:.5rem 0;padding-left:.8rem;border-left:3px solid var(--line);color:var(--soft)}
.ansi-red-fg,.ansi-red-intense-fg{color:#c00}
.ansi-green-fg,.ansi-green-intense-fg{color:#080}
.ansi-blue-fg,.ansi-cyan-fg{color:#05a}
.ansi-bold{font-weight:700}
@media print{a{color:inherit}}
""".strip()
# nbconvert's template with this style. The parts that load RequireJS, MathJax and Mermaid from a network are removed.
_TEMPLATE = (
    """{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js_requirejs -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
{%- block notebook_css -%}<style>{% raw %}"""
    + STYLE
    + "{% endraw %}</style>{%- endblock -%}"
)


def notebook_files(notebook: Notebook, document: Any, folder: Path, root: Path) -> dict[str, bytes]:
    """Return the copy of an executed notebook and its HTML page, as a dict that maps a path in the run to the content.

    Local paths are replaced in both files.

    Args:
        notebook: the notebook.
        document: the executed nbformat notebook.
        folder: folder of the run.
        root: the checkout.
    """
    import nbformat

    package = Path(hyperion.__file__).resolve().parent.parent
    replacements = {str(folder): f"results/{folder.name}", str(root): ".", str(package): "."}
    replacements |= {sys.prefix: "<python>", sys.base_prefix: "<python>"}
    home = os.path.expanduser("~")
    if home != "/":
        replacements[home] = "~"
    copy = portable_copy(document, replacements)
    return {
        f"notebooks/{notebook.stem}.ipynb": nbformat.writes(copy).encode(),
        f"notebooks/{notebook.stem}.html": link_pages(page(copy, notebook.stem).encode()),
    }


def portable_copy(document: Any, replacements: dict[str, str]) -> Any:
    """Return a copy of an executed notebook that contains no local paths and no progress bars.

    Args:
        document: an nbformat notebook.
        replacements: new text for each absolute path. Longer paths are replaced first.
    """
    import nbformat
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor

    text = nbformat.writes(document)
    # Replace longer paths first, because they may contain shorter ones, such as the home folder.
    for path in sorted(replacements, key=len, reverse=True):
        # The text is JSON, so it contains the path in its escaped form. The slice removes the quotes.
        text = text.replace(json.dumps(path)[1:-1], replacements[path])
    text = _TEMPORARY_FILE.sub("a temporary file", _KERNEL_FILE.sub("cell", text))
    copy = nbformat.reads(text, as_version=4)
    for name in ("input_path", "output_path"):
        copy.metadata.get("papermill", {}).pop(name, None)
    copy.metadata.pop("widgets", None)
    for cell in copy.cells:
        if cell.cell_type == "code":
            # Progress bars of other libraries are widgets, which a page without a running kernel cannot show. A finished bar of
            # this library is an empty output.
            cell.outputs = [output for output in cell.outputs if _WIDGET not in output.get("data", {}) and not _is_empty(output)]
            # Without ipywidgets, a bar is text. As on a terminal, only what follows the last carriage return of a line is kept.
            CoalesceStreamsPreprocessor().preprocess_cell(cell, {}, 0)
            cell.outputs = [output for output in cell.outputs if output.output_type != "stream" or output.text.strip()]
    return copy


def _is_empty(output: Any) -> bool:
    return output.output_type == "display_data" and not any(output.data.values())


@functools.cache
def _exporter() -> "HTMLExporter":
    """Return the exporter of all pages. It is cached, because its templates are compiled for the first page, which is slow."""
    from nbconvert import HTMLExporter

    return HTMLExporter(raw_template=_TEMPLATE)


def require_page_templates() -> None:
    """Check that nbconvert can write pages. Called before anything is measured.

    Raises:
        HyperionError: nbconvert is installed without its templates.
    """
    try:
        _exporter()
    except ValueError as error:
        raise HyperionError(
            f"nbconvert cannot write HTML pages: {error}",
            where="nbconvert's templates in share/jupyter",
            next_step="add the share/jupyter folder of nbconvert's environment to JUPYTER_PATH, or reinstall nbconvert",
        ) from error


def page(document: Any, title: str) -> str:
    """Return a self-contained HTML page of a notebook, with its formulas as inline pictures."""
    import nbformat

    # Copy the document by writing and reading it, because the formulas of the original must stay as text.
    drawn = nbformat.reads(nbformat.writes(document), as_version=4)
    for cell in drawn.cells:
        if cell.cell_type == "markdown":
            cell.source = with_drawn_formulas(cell.source)
    text, _ = _exporter().from_notebook_node(drawn, resources={"metadata": {"name": title}})
    return text


def with_drawn_formulas(markdown: str) -> str:
    """Replace each $formula$ and $$formula$$ in Markdown text with an inline picture. Code is not changed.

    The formulas are drawn by matplotlib, which supports only a part of TeX. A formula that it cannot draw is shown as TeX source.
    """
    return _MATH.sub(_draw_formula, markdown)


def _draw_formula(match: re.Match[str]) -> str:
    formula = match["block"] or match["inline"]
    if formula is None:
        return match[0]
    from matplotlib.mathtext import math_to_image

    picture = io.BytesIO()
    try:
        # As in TeX, fractions in displayed formulas have full-size letters.
        source = formula.replace(r"\frac", r"\dfrac") if match["block"] else formula
        depth = math_to_image(f"${' '.join(source.split())}$", picture, dpi=72, format="svg")
    except ValueError:
        # Escape backslashes, because Markdown removes a backslash before punctuation.
        return f"<code>{html.escape(formula).replace(chr(92), '&#92;')}</code>"
    address = "data:image/svg+xml;base64," + base64.b64encode(picture.getvalue()).decode()
    height_pt = re.search(rb'<svg[^>]* height="([\d.]+)pt"', picture.getvalue())
    assert height_pt is not None, "matplotlib writes the height of every SVG"
    height = float(height_pt[1]) / 10  # in em; matplotlib's font size, 1 em, is 10 points
    image = (
        f'<img alt="{html.escape(formula)}" src="{address}" '
        f'style="height:{height:.2f}em;vertical-align:{-depth / 10:.2f}em;display:inline">'
    )
    return f'\n\n<p style="text-align:center">{image}</p>\n\n' if match["block"] else image


def require_no_machine_paths(name: str, content: bytes) -> None:
    """Check that a text file contains no absolute path of the machine on which it was written.

    Args:
        name: name of the file.
        content: content of the file.

    Raises:
        HyperionError: the file contains such a path. The message contains the first one.
    """
    if Path(name).suffix not in (".json", ".csv", ".html", ".ipynb", ".md", ".txt", ".log"):
        return
    match = ABSOLUTE_PATH.search(content.decode("utf-8", errors="replace"))
    if match:
        raise HyperionError(
            f"the file contains a path of this machine: {match[0][:120]}",
            where=name,
            next_step="keep paths out of rows and printed output, run again, then publish",
        )


def export_subjects(ledger: Ledger) -> str:
    """Write the run's tables, pictures and report, unless they are up to date with the run's rows and the library's code.

    Returns:
        The error message if the export failed or a picture could not be drawn, else "". No exception is raised, because a
        picture that cannot be drawn must not prevent later measurements.
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
        return _failure("FAILED to export tables and pictures", error)
    except Exception:
        return f"FAILED to export tables and pictures:\n{traceback.format_exc()}"
    if material.not_drawn:
        return "\n".join(_failure(f"FAILED to draw {name}", error) for name, error in material.not_drawn.items())
    ledger.keep_exported(digest)
    return ""


def _failure(what: str, error: HyperionError) -> str:
    """Return the text of a failed export.

    A cause is a Python error in the code of a picture, whose traceback is needed to fix the code, or a failed write.
    """
    in_code = error.__cause__ is not None and not isinstance(error.__cause__, OSError)
    return "\n".join([f"{what}: {error}", *(traceback.format_exception(error.__cause__) if in_code else ())])


def publish(run: Run, name: str, folder: Path | None = None, pages: bool = True) -> tuple[Path, list[str]]:
    """Copy a verified run to the reference results and write its README.md.

    Notebooks that failed are left out. Of a notebook that was interrupted, the experiments that finished are copied. The
    README.md names both. Pages are copied last, from the smallest to the largest, until the size limit is reached. If a
    picture in a page is also a file of the run, it is replaced with a link to this file. An existing reference of the same
    name is replaced completely or not at all.

    Args:
        run: the run. Every file is first verified against the manifest of the run.
        name: name of the machine, such as `h200`.
        folder: folder of all references; default: `reference_folder()`.
        pages: whether to copy the pages of the executed notebooks, which take more room than the rows and the pictures.

    Returns:
        The new reference folder, and the names of the pages that were omitted because of the size limit.

    Raises:
        HyperionError: the run was edited, is still in use, is a replay or has no rows, a file contains a local path, or the run
            is too large even without pages.
    """
    folder = folder or reference_folder()
    target = folder / checked_name(name)
    _require_own_results(run)
    unfinished = _unfinished(run)
    failed = [stem for stem, status in unfinished.items() if status == "failed"]
    contents, left_out = _choose_files(run, folder, target, failed, pages)
    with staged_reference(target) as staged:
        reference = Run(staged)
        reference.write(contents)
        _write_readme(reference, unfinished)
    return target, left_out


@contextlib.contextmanager
def staged_reference(target: Path) -> Iterator[Path]:
    """Context manager that yields the path of a folder for the files of a reference.

    If the block succeeds, the folder replaces `target`. Otherwise, it is removed, and `target` is unchanged.

    Raises:
        HyperionError: another call publishes in the same folder.
        StoreError: the folder that contains `target` cannot be written.
    """
    make_folder(target.parent)
    with folder_lock(target.parent) as acquired:
        if not acquired:
            raise HyperionError(
                "another call publishes in this folder",
                where=target.parent,
                next_step="publish again when the other call has ended",
            )
        staged = target.with_name(f".{target.name}.new")
        shutil.rmtree(staged, ignore_errors=True)
        try:
            yield staged
            # Lock files are not results, and a reference in git must not contain them.
            for lock in staged.rglob(".*lock"):
                lock.unlink()
            _replace_folder(staged, target)
        finally:
            shutil.rmtree(staged, ignore_errors=True)


def require_unused(folder: Path) -> None:
    """Check that no running call uses a run, because its files may still change.

    Raises:
        HyperionError: a call uses the run.
    """
    if in_use(folder):
        raise HyperionError("a running call uses this run", where=folder, next_step="publish it when the call has ended")


def _require_own_results(run: Run) -> None:
    require_unused(run.folder)
    if run.information().get("profile") == REPLAY:
        raise HyperionError(
            "this run is a replay: its rows are those of another machine",
            where=run.folder,
            next_step="publish a run that measured: hyperion reproduce --profile smoke, full or study",
        )
    if not run.rows():
        raise HyperionError("this run has no rows", where=run.folder, next_step="measure first: hyperion reproduce")


def stored_size(content: bytes) -> int:
    """Return the size in bytes of a file as git stores it, compressed by zlib."""
    return len(zlib.compress(content))


def room_for(size: int, folder: Path, target: Path) -> int:
    """Return the number of bytes that can still be added to the references after files of `size` bytes are added.

    The total size of all references is limited. All sizes are those of `stored_size`.

    Args:
        size: total size in bytes of the files that cannot be omitted.
        folder: folder of all references.
        target: the reference that these files replace. Its current size is not counted.

    Raises:
        HyperionError: the files exceed the limit.
    """
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_relative_to(target))
    room = LARGEST_BYTES - sum(stored_size(path.read_bytes()) for path in files) - size
    if room < 0:
        raise HyperionError(
            f"results/reference/ would be {-room / 1e6:.1f} MB larger than its limit of {LARGEST_BYTES / 1e6:.0f} MB",
            where=target,
            next_step="publish a run with fewer samples, or remove an old reference",
        )
    return room


def _unfinished(run: Run) -> dict[str, str]:
    """Return a dict that maps each notebook of the run that failed or did not finish to its status."""
    if not (run.folder / LEDGER).is_file():
        return {}
    entries = Ledger.of(run).entries
    return {stem: entry.status for stem, entry in sorted(entries.items()) if entry.status not in ("done", "unexpected")}


def _choose_files(
    run: Run, folder: Path, target: Path, failed: Iterable[str], with_pages: bool
) -> tuple[dict[str, bytes], list[str]]:
    contents = run.contents_without(set(failed))
    omitted = ["*.ipynb", *_REBUILT] + [f"{_PAGES}*"] * (not with_pages)
    names = [name for name in contents if not any(fnmatch(name, pattern) for pattern in omitted)]
    contents = {name: contents[name] for name in names}
    for name, content in contents.items():
        require_no_machine_paths(name, content)
    # If an inline picture of a page is also a file of the run, the page can link to the file.
    files = {base64.b64encode(content): name for name, content in contents.items() if name.endswith(".png")}
    for name in (name for name in names if name.startswith(_PAGES)):
        contents[name] = _link_pictures(name, contents[name], files)
    # Sort by size, so that as many pages as possible fit.
    pages = sorted((name for name in names if name.startswith(_PAGES)), key=lambda name: stored_size(contents[name]))
    size = sum(stored_size(content) for name, content in contents.items() if name not in pages)
    room = room_for(size, folder, target)
    left_out = []
    for name in pages:
        room -= stored_size(contents[name])
        if room < 0:
            left_out.append(name)
            del contents[name]
    # Links are adapted last, when the omitted pages are known.
    stems = {Path(name).stem for name in pages if name not in left_out}
    for name in (name for name in pages if name not in left_out):
        contents[name] = link_pages(contents[name], stems)
    return contents, left_out


def link_pages(content: bytes, pages: Iterable[str] | None = None) -> bytes:
    """Return the page of a notebook with links to other notebooks replaced by links to their pages in the same folder.

    Links to pages of references are made relative to the folder of the page.

    Args:
        content: the page as HTML.
        pages: stems of the notebooks that have a page in the reference that the page belongs to. Links to other notebooks become
            text. None means that the page belongs to a run, in which all notebooks have a page.
    """
    there = None if pages is None else set(pages)

    def linked(found: re.Match[bytes]) -> bytes:
        stem, text = found[1], found[2]
        return b'<a href="%s.html">%s</a>' % (stem, text) if there is None or stem.decode() in there else text

    # The page of a run is in results/RUN/notebooks/, and that of a reference in results/reference/NAME/notebooks/.
    content = _REFERENCE_LINK.sub(b'<a href="../../reference/' if there is None else b'<a href="../../', content)
    return _NOTEBOOK_LINK.sub(linked, content)


def _link_pictures(page: str, content: bytes, pictures: dict[bytes, str]) -> bytes:
    """Return an HTML page in which inline pictures that are also files of the run are replaced by relative links.

    Args:
        page: name of the page in the run.
        content: the page.
        pictures: a dict that maps the base64 content of a picture file to the name of the file.
    """

    def link(match: re.Match[bytes]) -> bytes:
        # Pictures are compared in base64 without decoding, because a script in the page may contain only the start of one.
        name = pictures.get(match[1].replace(b"\n", b""))
        return match[0] if name is None else posixpath.relpath(name, posixpath.dirname(page)).encode()

    return _INLINE_PICTURE.sub(link, content)


def _write_readme(reference: Run, unfinished: dict[str, str]) -> None:
    from hyperion.book import reference_readme

    present = {row.notebook for row in reference.rows()}
    remarks = []
    for here, consequence in (
        (False, "none of their rows are here"),
        (True, "only the rows of their finished experiments are here"),
    ):
        if names := [f"`{stem}` ({status})" for stem, status in unfinished.items() if (stem in present) == here]:
            remarks.append(f"These notebooks did not finish in this run, and {consequence}: {', '.join(names)}.")
    files = reference_readme(reference, remark=" ".join(remarks))
    for name, content in files.items():
        require_no_machine_paths(name, content)
    reference.write(files)


def _replace_folder(staged: Path, target: Path) -> None:
    """Move the folder `staged` to `target`, replacing `target` if it exists."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        # A folder with files cannot be replaced in a single rename. Between these two renames, the target does not exist.
        target.rename(old)
    staged.rename(target)
    shutil.rmtree(old, ignore_errors=True)
