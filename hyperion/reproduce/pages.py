"""The kept copy of an executed notebook and its page: no machine's paths, no network needed to read it."""

import base64
import html
import io
import json
import re
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.reproduce.page_css import STYLE

# Bounded, and starting at a slash: an open-ended pattern takes minutes on the half megabyte of a picture's base64.
_KERNEL_FILE = re.compile(r"/[^\s\"'<>]{0,200}?/ipykernel_\d+/\d+\.py")
# What a worker's compiler or launcher wrote of its own temporary folder.
_TEMPORARY_FILE = re.compile(r"/[^\s\"'<>]{0,100}?/hyperion-[a-z]+-[^\s\"'<>\\]{0,300}")
_WIDGET = "application/vnd.jupyter.widget-view+json"
_MATH = re.compile(r"(?P<code>```.*?```|`[^`\n]*`)|\$\$(?P<block>.+?)\$\$|(?<![\\$])\$(?P<inline>[^$\n]+?)\$(?!\d)", re.DOTALL)
# nbconvert's page in our own look, and without what it would fetch: RequireJS, MathJax and Mermaid.
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


def kept_copy(document, replacements: dict[str, str]):
    """The executed notebook as it is kept: progress bars and papermill's paths dropped, machine paths replaced.

    Args:
        document: an nbformat notebook.
        replacements: what to put for each absolute path; longer paths are replaced first.
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
    """Fail before the first measurement where nbconvert could not write a page after it.

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
            next_step="add the share/jupyter folder beside nbconvert to JUPYTER_PATH, or install nbconvert anew",
        ) from error


def page(document, title: str) -> str:
    """A self-contained HTML page of a notebook; formulas are drawn into it."""
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
    """Markdown with each $formula$ and $$formula$$ as an inline picture, code left alone.

    A formula beyond matplotlib's TeX subset stays as its source text.
    """
    return _MATH.sub(_drawn, markdown)


def _drawn(match: re.Match) -> str:
    formula = match["block"] or match["inline"]
    if formula is None:
        return match[0]
    from matplotlib.mathtext import math_to_image

    picture = io.BytesIO()
    try:
        # Set apart, a fraction has room for full-size letters, as TeX gives it.
        wanted = formula.replace(r"\frac", r"\dfrac") if match["block"] else formula
        depth = math_to_image(f"${' '.join(wanted.split())}$", picture, dpi=72, format="svg")
    except ValueError:
        # Markdown would take a backslash before a comma for its own.
        return f"<code>{html.escape(formula).replace(chr(92), '&#92;')}</code>"
    source = "data:image/svg+xml;base64," + base64.b64encode(picture.getvalue()).decode()
    # matplotlib draws at 10 points an em.
    height = float(re.search(rb'<svg[^>]* height="([\d.]+)pt"', picture.getvalue())[1]) / 10
    image = (
        f'<img alt="{html.escape(formula)}" src="{source}" '
        f'style="height:{height:.2f}em;vertical-align:{-depth / 10:.2f}em;display:inline">'
    )
    return f'\n\n<p style="text-align:center">{image}</p>\n\n' if match["block"] else image


ABSOLUTE_PATH = re.compile(
    r"(?<![\w.:/~$%-])/(?:home|root|Users|tmp|work|workspace|scratch|mnt|media|srv|var|opt|data|gpfs|lustre|lus|ccs|project|"
    r"projects|global|nfs|usr|etc)/[\w.+@-][^\s\"'<>)]*"
)


def demand_no_machine_paths(name: str, content: bytes) -> None:
    """Refuse a file that tells where something lay on the machine it was made on.

    Raises:
        HyperionError: names the file and the first such path.
    """
    if Path(name).suffix not in (".json", ".csv", ".html", ".ipynb", ".md", ".txt", ".log"):
        return
    found = ABSOLUTE_PATH.search(content.decode("utf-8", errors="replace"))
    if found:
        raise HyperionError(
            f"holds a path of this machine: {found[0][:120]}",
            where=name,
            next_step="keep paths out of rows and printed output, run again, then publish",
        )
