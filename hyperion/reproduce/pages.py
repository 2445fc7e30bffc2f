"""The stored copy of an executed notebook and its HTML page: no paths of this machine, no network needed to read them."""

import base64
import html
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import hyperion
from hyperion.errors import HyperionError
from hyperion.reproduce.notebooks import Notebook

# Bounded, and starting at a slash: an open-ended pattern takes minutes on the half megabyte of a picture's base64.
_KERNEL_FILE = re.compile(r"/[^\s\"'<>]{0,200}?/ipykernel_\d+/\d+\.py")
# Temporary folders in the messages of a worker's compiler or launcher.
_TEMPORARY_FILE = re.compile(r"/[^\s\"'<>]{0,100}?/hyperion-[a-z]+-[^\s\"'<>\\]{0,300}")
_WIDGET = "application/vnd.jupyter.widget-view+json"
_MATH = re.compile(r"(?P<code>```.*?```|`[^`\n]*`)|\$\$(?P<block>.+?)\$\$|(?<![\\$])\$(?P<inline>[^$\n]+?)\$(?!\d)", re.DOTALL)
# Our own style sheet: JupyterLab's is a quarter of a megabyte a page, most of it for an editor that a page does not have.
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
# nbconvert's page with this style, and without what it would fetch: RequireJS, MathJax and Mermaid.
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
    """Return the contents of the executed copy and its page, by path in the run; paths of this machine are replaced.

    Args:
        document: the executed nbformat notebook.
        folder: the run.
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
        f"notebooks/{notebook.stem}.html": page(copy, notebook.stem).encode(),
    }


def portable_copy(document: Any, replacements: dict[str, str]) -> Any:
    """Return an executed notebook without progress bars and papermill's paths, and with machine paths replaced.

    Args:
        document: an nbformat notebook.
        replacements: replacement of each absolute path; longer paths are replaced first.
    """
    import nbformat

    text = nbformat.writes(document)
    for path in sorted(replacements, key=len, reverse=True):
        text = text.replace(json.dumps(path)[1:-1], replacements[path])
    text = _TEMPORARY_FILE.sub("a temporary file", _KERNEL_FILE.sub("cell", text))
    copy = nbformat.reads(text, as_version=4)
    for name in ("input_path", "output_path"):
        copy.metadata.get("papermill", {}).pop(name, None)
    copy.metadata.pop("widgets", None)
    for cell in copy.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _WIDGET not in output.get("data", {})]
    return copy


def require_page_templates() -> None:
    """Check, before anything is measured, that nbconvert can write pages.

    Raises:
        HyperionError: nbconvert is installed without its templates.
    """
    from nbconvert import HTMLExporter

    try:
        HTMLExporter(raw_template=_TEMPLATE)
    except ValueError as error:
        raise HyperionError(
            f"nbconvert cannot make pages here: {error}",
            where="nbconvert's templates in share/jupyter",
            next_step="add the share/jupyter folder of nbconvert's environment to JUPYTER_PATH, or reinstall nbconvert",
        ) from error


def page(document: Any, title: str) -> str:
    """Return a self-contained HTML page of a notebook, with its formulas as inline pictures."""
    import nbformat
    from nbconvert import HTMLExporter

    drawn = nbformat.reads(nbformat.writes(document), as_version=4)
    for cell in drawn.cells:
        if cell.cell_type == "markdown":
            cell.source = with_drawn_formulas(cell.source)
    exporter = HTMLExporter(raw_template=_TEMPLATE)
    text, _ = exporter.from_notebook_node(drawn, resources={"metadata": {"name": title}})
    return text


def with_drawn_formulas(markdown: str) -> str:
    """Replace each $formula$ and $$formula$$ of a Markdown text by an inline picture; code stays unchanged.

    A formula outside matplotlib's TeX subset stays as its source text.
    """
    return _MATH.sub(_draw_formula, markdown)


def _draw_formula(match: re.Match[str]) -> str:
    formula = match["block"] or match["inline"]
    if formula is None:
        return match[0]
    from matplotlib.mathtext import math_to_image

    picture = io.BytesIO()
    try:
        # As in TeX, fractions in a displayed formula have full-size letters.
        source = formula.replace(r"\frac", r"\dfrac") if match["block"] else formula
        depth = math_to_image(f"${' '.join(source.split())}$", picture, dpi=72, format="svg")
    except ValueError:
        # Escaped, because Markdown removes a backslash before punctuation.
        return f"<code>{html.escape(formula).replace(chr(92), '&#92;')}</code>"
    address = "data:image/svg+xml;base64," + base64.b64encode(picture.getvalue()).decode()
    height_pt = re.search(rb'<svg[^>]* height="([\d.]+)pt"', picture.getvalue())
    assert height_pt is not None, "matplotlib writes the height of every SVG"
    height = float(height_pt[1]) / 10  # in em; matplotlib draws at 10 points an em
    image = (
        f'<img alt="{html.escape(formula)}" src="{address}" '
        f'style="height:{height:.2f}em;vertical-align:{-depth / 10:.2f}em;display:inline">'
    )
    return f'\n\n<p style="text-align:center">{image}</p>\n\n' if match["block"] else image


ABSOLUTE_PATH = re.compile(
    r"(?<![\w.:/~$%-])/(?:home|root|Users|tmp|work|workspace|scratch|mnt|media|srv|var|opt|data|gpfs|lustre|lus|ccs|project|"
    r"projects|global|nfs|usr|etc)/[\w.+@-][^\s\"'<>)]*"
)


def require_no_machine_paths(name: str, content: bytes) -> None:
    """Refuse a text file that contains an absolute path of the machine it was made on.

    Raises:
        HyperionError: names the file and the first such path.
    """
    if Path(name).suffix not in (".json", ".csv", ".html", ".ipynb", ".md", ".txt", ".log"):
        return
    match = ABSOLUTE_PATH.search(content.decode("utf-8", errors="replace"))
    if match:
        raise HyperionError(
            f"holds a path of this machine: {match[0][:120]}",
            where=name,
            next_step="keep paths out of rows and printed output, run again, then publish",
        )
