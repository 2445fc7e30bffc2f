"""What notebooks call: a result as pictures and tables, a banner, and a lesson in numbers that come from rows."""

from collections.abc import Iterable
from typing import Protocol

import pandas as pd

from hyperion.book.plots import draw, plots_of
from hyperion.errors import HyperionError
from hyperion.figures.display_text import fill
from hyperion.figures.material import Material
from hyperion.figures.published import published_tables
from hyperion.figures.tables import escaped, html, markdown_text, tables_of
from hyperion.figures.tables_predictions import prediction_basis, prediction_table
from hyperion.results import Row, Run
from hyperion.untrusted import printable

_BANNER = (
    "border-left:6px solid #D55E00;background:#fff4ec;color:#1b1f24;padding:.6em 1em;margin:.4em 0;"
    "font-family:system-ui,sans-serif;font-weight:600"
)


class HasRows(Protocol):
    """What an experiment gives back, as far as it is shown: its rows, its data source, where it was replayed from."""

    rows: list[Row]
    source: str
    replayed_from: str


def show(result: HasRows, run: Run, published: bool = False, figures: Iterable[str] | None = None) -> None:
    """Show a result: banner where one is due, the figures of its experiment, and a table a metric.

    Args:
        run: the run that keeps the result; figures that span experiments (a roofline) read the others there.
        published: draw the published MI250X numbers into the matrix product and bandwidth figures.
        figures: names of those to show; None shows all of the experiment.

    Raises:
        HyperionError: the result holds no row.
    """
    if not result.rows:
        raise HyperionError("the result holds no row: nothing was measured", next_step="run the experiment again")
    announce(result)
    material, experiment = Material(run), result.rows[0].experiment
    chosen = None if figures is None else set(figures)
    for plot in (plot for plot in plots_of(experiment) if chosen is None or plot.name in chosen):
        options = {"published": published} if plot.published else {}
        picture = draw(plot.name, material, **options)
        if picture is not None:
            _display({"image/png": picture, "text/plain": f"[{plot.name}: {plot.caption}]"})
    for caption, table in tables_of(result.rows):
        show_table(table, caption)


def announce(result: HasRows) -> None:
    """The banners that a result calls for: replayed from another machine, synthetic data."""
    if result.replayed_from:
        banner(f"REPLAY: measured on {result.replayed_from} and shown again. Nothing below was measured on this machine.")
    if result.source == "synthetic":
        banner("SYNTHETIC DATA: made by code, not the real data set. Losses and accuracies say nothing about the real one.")


def banner(text: str) -> None:
    """A line that cannot be overlooked, as HTML and as plain text."""
    rule = "=" * min(100, len(text))
    _display({"text/html": f'<div style="{_BANNER}">{escaped(text)}</div>', "text/plain": f"{rule}\n{text}\n{rule}"})


def show_table(table: pd.DataFrame, caption: str = "") -> None:
    """A table of text, numbers to the right, under its caption."""
    title = f"<p><b>{escaped(caption)}</b></p>" if caption else ""
    # Jupyter would set every cell to the right, sentences too.
    style = (
        "<style>div.table td,div.table th{text-align:left!important;vertical-align:top}"
        "div.table td.number,div.table th.number{text-align:right!important;font-variant-numeric:tabular-nums}</style>"
    )
    text = f"{caption}\n{table.to_string(index=False)}"
    _display({"text/html": style + title + html(table), "text/plain": text})


def show_predictions(predictions: pd.DataFrame) -> None:
    """Show what `Chapter.predict` wrote down: guess and estimate a line, then what the estimates rest on.

    Args:
        predictions: columns variant, dtype, params, metric, guess, estimate, basis.
    """
    show_table(prediction_table(predictions), "Written down before the first sample")
    for sentence in prediction_basis(predictions):
        _display({"text/markdown": f"*{markdown_text(sentence)}*", "text/plain": sentence})


def show_published(*names: str) -> None:
    """Show the published MI250X tables, marked as another machine's, each with what is wrong with it.

    Args:
        names: which ones (see `published_tables`); all without any.
    """
    banner("PUBLISHED ELSEWHERE: none of these numbers was measured by this run.")
    for caption, table, defects in published_tables(*names):
        show_table(table, caption)
        _display({"text/markdown": f"*Known defects: {defects}.*", "text/plain": f"Known defects: {defects}."})


def teach(template: str, **named: Row | float) -> None:
    """A lesson in Markdown whose numbers come from rows: see `display_text.fill` for the fields, `pick` for the rows.

    Raises:
        HyperionError: a row, or what the text wants of it, is missing.
    """
    text = fill(template, **named)
    _display({"text/markdown": text, "text/plain": text})


def _display(bundle: dict) -> None:
    """Display a bundle of representations in a notebook; elsewhere print its plain text."""
    from IPython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        print(printable(bundle["text/plain"]))
    else:
        display(bundle, raw=True)
