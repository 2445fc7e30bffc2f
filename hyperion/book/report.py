"""The report: one HTML page without external files, which works offline."""

import base64
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from hyperion.book.outline import (
    BUSY,
    ONE_LAUNCH,
    UNFOLDED_LINES,
    DrawnFigure,
    Headline,
    Section,
    banner,
    environment,
    headlines,
    missing,
    sections,
)
from hyperion.figures.material import NO_DRIFT, Material, device_name, made_from_rows, number, percent
from hyperion.figures.published import published_bandwidth, published_baseline, published_gemm, published_source, published_tables
from hyperion.figures.tables import escaped, html
from hyperion.results import Run
from hyperion.results.execution import unexpected_in
from hyperion.results.files import write_atomically
from hyperion.results.places import stored_references

REPORT = "report.html"
# Bytes 16 to 19 of a PNG file are the width in pixels, big-endian (in the header chunk IHDR).
_PNG_WIDTH = slice(16, 20)


def write_report(run: Run, material: Material | None = None, page: Path | None = None) -> Path:
    """Write the report of a run, and return its path.

    Args:
        run: the run.
        material: rows, samples and figures of the run that have already been read or drawn, for reuse. None reads the run.
        page: the file. None means report.html in the folder of the run.

    A figure that cannot be drawn is left out, and its section says why. `material.not_drawn` has the errors.
    """
    content = report_page(material or Material(run)).encode()
    if page is None:
        run.write({REPORT: content})
        return run.folder / REPORT
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, content)
    return page


def report_page(material: Material) -> str:
    """Return the report as HTML. The same rows give the same page."""
    found = sections(material)
    title = f"Hyperion on {escaped(_machine(material))}"
    body = [
        _header(material, title),
        _unexpected(material),
        _cards(headlines(material)),
        _contents(found),
        *(_section(section) for section in found),
        _missing(material),
        _comparison(material),
        _published(),
        f'<section id="environment"><h2>Environment</h2>{html(environment(material))}</section>',
        _footer(material),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def _machine(material: Material) -> str:
    return f"{', '.join(material.replayed)} (replay)" if material.replayed else device_name(material.information)


def _header(material: Material, title: str) -> str:
    information = material.information
    sources = ", ".join(material.data_sources) or "none"
    facts = f"run {escaped(material.run.folder.name)} · profile {escaped(information.get('profile'))} · data {escaped(sources)}"
    warning = f'<p class="banner">{escaped(banner(material))}</p>' if banner(material) else ""
    return f'<header><h1>{title}</h1><p class="facts">{facts}</p>{warning}</header>'


def _unexpected(material: Material) -> str:
    """Return the HTML of the section about failed checks, or "" if no check failed.

    This section comes first on the page, because a failed check casts doubt on the other results.
    """
    found = unexpected_in(material.run)
    lines = [f"<li>{escaped(stem)}: {escaped(sentence)}</li>" for stem, sentences in found.items() for sentence in sentences]
    if not lines:
        return ""
    return f'<section id="unexpected"><h2>Unexpected</h2><ul>{"".join(lines)}</ul></section>'


def _cards(found: list[Headline]) -> str:
    note = escaped(ONE_LAUNCH.format("docs/headlines.md of the repository"))
    note = f'<p class="limit">{note}</p>' if found else ""
    return f'<section class="cards">{"".join(map(_card, found))}</section>{note}'


def _card(headline: Headline) -> str:
    value, _, unit = headline.value.partition(" ")
    gauge = ""
    if headline.fraction is not None:
        width = f"{100 * headline.fraction:.1f}"
        gauge = f'<div class="gauge"><i style="width:{width}%"></i></div><p>{percent(headline.fraction)} % of its limit</p>'
    return (
        f'<div class="card"><h3>{escaped(headline.label)}</h3><p class="value">{escaped(value)} <span>{escaped(unit)}</span></p>'
        f'{_uncertainty(headline)}{gauge}<p class="limit" title="{escaped(headline.limit)}">{escaped(headline.limit)}</p></div>'
    )


def _uncertainty(headline: Headline) -> str:
    """Return the HTML of a card's interval and of the state of the device during its samples, or "" if neither is known."""
    state = {"yes": "steady", NO_DRIFT: "no drift", BUSY: "measured on a busy machine"}.get(headline.steady, "")
    parts = [f"95 %: {headline.interval}" if headline.interval else "", state]
    text = ", ".join(filter(None, parts))
    return f'<p class="limit">{escaped(text)}</p>' if text else ""


def _contents(found: list[Section]) -> str:
    links = [(section.experiment, section.title) for section in found]
    links += [("missing", "Not measured"), ("comparison", "Comparison with other machines")]
    links += [("published", "Published MI250X tables"), ("environment", "Environment")]
    return "<nav>" + "".join(f'<a href="#{escaped(anchor)}">{escaped(title)}</a>' for anchor, title in links) + "</nav>"


def _section(section: Section) -> str:
    # The only Markdown in the sentences is bold text.
    parts = [f"<p>{escaped(sentence.replace('**', ''))}</p>" for sentence in section.sentences]
    parts += map(_figure, section.pictures)
    for caption, table in section.tables:
        # In a section with pictures, the tables are collapsed, so that the pictures are close to each other on the page.
        opened = "" if section.pictures or len(table) > UNFOLDED_LINES else " open"
        parts.append(f"<details{opened}><summary>{escaped(caption)}</summary>{html(table)}</details>")
    return f'<section id="{escaped(section.experiment)}"><h2>{escaped(section.title)}</h2>{"".join(parts)}</section>'


def _figure(picture: DrawnFigure) -> str:
    content = base64.b64encode(picture.content).decode()
    # The picture is shown at less than its width in pixels, so that it is sharp on high-resolution screens. The factor is the
    # same for all figures, so that their letters have the same size.
    width = round(int.from_bytes(picture.content[_PNG_WIDTH], "big") / 1.2)
    return (
        f'<figure><img alt="{escaped(picture.caption)}" width="{width}" src="data:image/png;base64,{content}">'
        f"<figcaption>{escaped(picture.caption)}</figcaption></figure>"
    )


def _missing(material: Material) -> str:
    absent = missing(material)
    whole = "<p>Nothing is missing: every value was measured, and every limit that a metric requires is known.</p>"
    content = html(absent) if len(absent) else whole
    return f'<section id="missing"><h2>Not measured, or without a limit</h2>{content}</section>'


def _comparison(material: Material) -> str:
    references = reference_machines(material)
    names = ", ".join(f"{m.run.folder.name} ({device_name(m.information)})" for m in references) or "none"
    return (
        '<section id="comparison"><h2>Comparison with other machines</h2>'
        f"<p>Reference runs in this repository: {escaped(names)}. A cell is empty if the machine has no value for the same "
        "model, format and data source. The published values come from another method, which has the defects listed below."
        f"</p>{html(comparison_table(material, references))}</section>"
    )


def _published() -> str:
    source = published_source()
    gemm, bandwidth, *others = [
        f'<h3>{escaped(caption)}</h3>{html(table)}<p class="defects">Known defects: {escaped(defects)}.</p>'
        for caption, table, defects in published_tables()
    ]
    side_by_side = "".join(f'<div class="half">{half}</div>' for half in (gemm, bandwidth))
    return (
        '<section id="published" class="published"><h2>Published MI250X tables</h2>'
        f"<p><b>Not measured by this run.</b> As published: {escaped(source['title'])}; {escaped(source['machine'])}. "
        f"Found in {escaped(source['found_in'])}.</p>"
        f'<div class="halves">{side_by_side}</div>{"".join(others)}</section>'
    )


def _footer(material: Material) -> str:
    names = [name for name in material.run.verify() if name != REPORT]
    return (
        f"<footer>Built from {len(material.rows)} rows. {len(names)} files of the run were checked against its manifest "
        "before this page was written.</footer>"
    )


_PUBLISHED_MODELS = {"resnet50": "ResNet-50", "encoder": "Transformer encoder"}


def reference_machines(material: Material) -> list[Material]:
    """Return the reference runs on real data, for the comparison with this run.

    This run itself and the reference runs that it replays are omitted.
    """
    found = [Material(run) for run in stored_references()]
    own = {material.run.folder.resolve().name, *material.replayed}
    return [m for m in found if "synthetic" not in m.data_sources and m.run.folder.name not in own]


@made_from_rows("the comparison")
def comparison_table(material: Material, references: Iterable[Material]) -> pd.DataFrame:
    """Return a table that compares the headlines of a run with the values of reference machines.

    The table has one line per headline. The columns are the value and its share of the limit in this run; the same two numbers
    and the ratio of the values for every reference machine; and the published MI250X value of the same quantity. A cell is empty
    if the reference machine has no value for the same model, format and data source. Empty columns are omitted.

    Args:
        material: rows of the run.
        references: rows of the reference runs.
    """
    others = [(m.run.folder.name, {_identity(h): h for h in headlines(m)}) for m in references]
    lines = [_line(headline, others) for headline in headlines(material)]
    columns = dict.fromkeys(name for line in lines for name in line)
    return pd.DataFrame([{name: line[name] for name in columns if any(one[name] for one in lines)} for line in lines])


def _line(headline: Headline, others: list[tuple[str, dict]]) -> dict[str, str]:
    line = {"": headline.label, "this run": headline.value, "% of limit": percent(headline.fraction)}
    for name, quantities in others:
        same = quantities.get(_identity(headline))
        ratio = headline.row.value / same.row.value if same and same.row.value else None
        line |= {
            name: same.value if same else "",
            f"% of limit, {name}": percent(same.fraction) if same else "",
            f"this run / {name}": number(ratio, 3),
        }
    return line | {"MI250X, as published": _published_value(headline)}


def _identity(headline: Headline) -> tuple:
    return headline.label, headline.row.variant, headline.row.dtype, headline.row.data_source


def _published_value(headline: Headline) -> str:
    """Return the published value of the headline's quantity, or "" if none is published."""
    row = headline.row
    value = None
    if row.metric == "gemm_tflops":
        same = published_gemm().query("dtype == @row.dtype and n == @row.params['m']")
        value = max(same["tflops"].tolist(), default=None)
    elif row.metric == "bandwidth_gb_s" and row.variant == "add":
        value = max(published_bandwidth()["gb_s"].tolist())
    elif row.metric == "samples_per_s" and row.dtype == "fp32" and row.variant in _PUBLISHED_MODELS:
        table = published_baseline().set_index("model")
        value = float(table["samples_per_s"].to_dict()[_PUBLISHED_MODELS[row.variant]])
    # NaN is not equal to itself.
    return "" if value is None or value != value else f"{value:,g} {row.unit}"


# The page uses system fonts and loads no files. It is light or dark, depending on the reader's browser settings.
_STYLE = """
:root{--ink:#1b1f24;--soft:#5d6670;--line:#e1e4e8;--page:#f6f7f9;--card:#fff;--accent:#0072B2;--warn:#fff4ec;--edge:#D55E00}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ea;--soft:#9aa4ae;--line:#30363d;--page:#0f1317;--card:#171c22;
--accent:#56B4E9;--warn:#2b1d12}}
*{box-sizing:border-box}
html{scroll-behavior:smooth}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1120px;margin:0 auto;padding:2.2rem 1.2rem 4rem}
h1{font-size:1.9rem;line-height:1.2;margin:0}
h2{font-size:1.25rem;margin:0 0 .8rem}
h3{font-size:.82rem;font-weight:600;color:var(--soft);margin:0}
.facts,footer{color:var(--soft);margin:.3rem 0 0}
.banner{background:var(--warn);border-left:6px solid var(--edge);padding:.7rem 1rem;font-weight:600;border-radius:4px}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(225px,1fr));gap:.8rem;margin:1.4rem 0}
.card,section:not(.cards){background:var(--card);border:1px solid var(--line);border-radius:10px}
.card{padding:.9rem 1rem;min-width:0}
.card p{margin:.15rem 0 0;font-size:.8rem;color:var(--soft)}
.card .value{font-size:1.55rem;line-height:1.25;font-weight:650;color:var(--ink)}
.card .value span{font-size:.85rem;font-weight:500;color:var(--soft)}
.card .limit{display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:3;overflow:hidden}
.gauge{height:6px;background:var(--line);border-radius:3px;margin:.45rem 0 0;overflow:hidden}
.gauge i{display:block;height:100%;background:var(--accent)}
nav{display:flex;flex-wrap:wrap;gap:.35rem .9rem;margin:0 0 1.4rem}
a{color:var(--accent);text-decoration:none}
a:hover{text-decoration:underline}
section:not(.cards){padding:1.2rem 1.3rem;margin:0 0 1.1rem}
figure{margin:0 0 1.1rem}
img{display:block;max-width:100%;background:#fff;border-radius:6px;padding:.4rem}
figcaption{color:var(--soft);font-size:.88rem;margin-top:.3rem}
details{margin:.4rem 0}
summary{cursor:pointer;font-weight:600;font-size:.9rem;padding:.2rem 0}
.table{overflow-x:auto}
table{border-collapse:collapse;font-size:.84rem;margin:.4rem 0 .8rem;width:100%}
th,td{padding:.32rem .65rem;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--soft)}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums}
td.number{white-space:nowrap}
.published{border-style:dashed!important}
.halves{display:grid;grid-template-columns:repeat(auto-fit,minmax(320px,1fr));gap:1.4rem}
.half{min-width:0}
.defects{font-size:.84rem;color:var(--soft)}
""".strip()
