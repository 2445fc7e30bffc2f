"""The report: one HTML page with everything in it, to be opened offline or sent to somebody."""

import base64
from pathlib import Path

from hyperion.book.comparison import comparison_table, reference_machines
from hyperion.book.headlines import Headline, headlines
from hyperion.book.outline import Picture, Section, banner, environment, missing, sections
from hyperion.book.report_css import STYLE
from hyperion.figures.formats import percent
from hyperion.figures.machines import device_name
from hyperion.figures.material import Material
from hyperion.figures.published import published_source, published_tables
from hyperion.figures.tables import escaped, html
from hyperion.results import Run
from hyperion.results.execution import unexpected_in

REPORT = "report.html"
_UNFOLDED_LINES = 12
_PNG_WIDTH = slice(16, 20)


def write_report(run: Run, material: Material | None = None) -> Path:
    """Write report.html into the run; it fetches nothing. Returns its path.

    Args:
        material: of the run as it is now, so that figures drawn from it are not drawn again; read anew when left out.
    """
    run.write({REPORT: report_page(material or Material(run)).encode()})
    return run.folder / REPORT


def report_page(material: Material) -> str:
    """The whole page as HTML, the same for the same rows."""
    told = sections(material)
    title = f"Hyperion on {escaped(_machine(material))}"
    body = [
        _header(material, title),
        _unexpected(material),
        _cards(headlines(material)),
        _contents(told),
        *(_section(section) for section in told),
        _missing(material),
        _comparison(material),
        _published(),
        f'<section id="environment"><h2>Environment</h2>{html(environment(material))}</section>',
        _footer(material),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
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
    """What the run's own checks found wrong, before anything else of the page is believed; "" where nothing was."""
    found = unexpected_in(material.run)
    lines = [f"<li>{escaped(stem)}: {escaped(sentence)}</li>" for stem, told in found.items() for sentence in told]
    if not lines:
        return ""
    return f'<section id="unexpected"><h2>Unexpected</h2><ul>{"".join(lines)}</ul></section>'


def _cards(found: list[Headline]) -> str:
    return f'<section class="cards">{"".join(map(_card, found))}</section>'


def _card(headline: Headline) -> str:
    value, _, unit = headline.value.partition(" ")
    gauge = ""
    if headline.fraction is not None:
        width = f"{100 * headline.fraction:.1f}"
        gauge = f'<div class="gauge"><i style="width:{width}%"></i></div><p>{percent(headline.fraction)} % of its limit</p>'
    return (
        f'<div class="card"><h3>{escaped(headline.label)}</h3><p class="value">{escaped(value)} <span>{escaped(unit)}</span></p>'
        f'{gauge}<p class="limit" title="{escaped(headline.limit)}">{escaped(headline.limit)}</p></div>'
    )


def _contents(told: list[Section]) -> str:
    links = [(section.experiment, section.title) for section in told]
    links += [("missing", "Not measured"), ("comparison", "Beside other machines")]
    links += [("published", "Published MI250X tables"), ("environment", "Environment")]
    return "<nav>" + "".join(f'<a href="#{escaped(anchor)}">{escaped(title)}</a>' for anchor, title in links) + "</nav>"


def _section(section: Section) -> str:
    parts = [_figure(picture) for picture in section.pictures]
    for caption, table in section.tables:
        # Where there are pictures, they are read first; numbers are one click away.
        opened = "" if section.pictures or len(table) > _UNFOLDED_LINES else " open"
        parts.append(f"<details{opened}><summary>{escaped(caption)}</summary>{html(table)}</details>")
    return f'<section id="{escaped(section.experiment)}"><h2>{escaped(section.title)}</h2>{"".join(parts)}</section>'


def _figure(picture: Picture) -> str:
    content = base64.b64encode(picture.content).decode()
    # Drawn smaller than their pixels: sharp on fine screens, and lettering of one size all down the page.
    width = round(int.from_bytes(picture.content[_PNG_WIDTH], "big") / 1.2)
    return (
        f'<figure><img alt="{escaped(picture.caption)}" width="{width}" src="data:image/png;base64,{content}">'
        f"<figcaption>{escaped(picture.caption)}</figcaption></figure>"
    )


def _missing(material: Material) -> str:
    absent = missing(material)
    told = html(absent) if len(absent) else "<p>Nothing: every value was measured and every limit is known.</p>"
    return f'<section id="missing"><h2>Not measured, or without a limit</h2>{told}</section>'


def _comparison(material: Material) -> str:
    references = reference_machines(material)
    told = ", ".join(f"{m.run.folder.name} ({device_name(m.information)})" for m in references) or "none"
    return (
        '<section id="comparison"><h2>Beside other machines</h2>'
        f"<p>Reference runs in this repository: {escaped(told)}. A cell is empty where another model, format or data source "
        "was measured, so that there is nothing to compare. What was published was measured in another way, with the defects "
        f"listed below.</p>{html(comparison_table(material, references))}</section>"
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
