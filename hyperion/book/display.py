"""Display results, tables, predictions, warnings and text in notebooks. All numbers in a text come from rows."""

import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Protocol

import pandas as pd

from hyperion.book.plots import draw, guessed_row, plots_of
from hyperion.errors import HyperionError, not_none
from hyperion.figures.material import ACCURACIES, Material, number, percent, quoted_value
from hyperion.figures.published import published_tables
from hyperion.figures.tables import escaped, html, markdown_text, prediction_basis, prediction_error, prediction_table, tables_of
from hyperion.results import Prediction, Row, Run
from hyperion.untrusted import printable

# In a notebook, tqdm warns if the package for widgets is missing. Libraries that the chapters import use tqdm, but no chapter
# shows widgets.
warnings.filterwarnings("ignore", message="IProgress not found")

_ROUNDING = 1e-12  # a measured value up to this size is a rounding error of 0
_ONE_OF_SEVERAL = re.compile(r"(?<![\d.,])(?:all )?1 (rank|device|step|unit)s\b")
_FACTOR = 10  # a prediction that is at least this many times the measured value is compared by a factor
_BANNER = (
    "border-left:6px solid #D55E00;background:#fff4ec;color:#1b1f24;padding:.6em 1em;margin:.4em 0;"
    "font-family:system-ui,sans-serif;font-weight:600"
)


class HasRows(Protocol):
    """The attributes of a result that `show` needs.

    Attributes:
        rows: the rows of the result.
        source: name of the data source, or "" if no data set was used.
        replayed_from: name of the reference machine that measured the rows, or "" if this machine measured them.
    """

    rows: list[Row]
    source: str
    replayed_from: str


def show(result: HasRows, run: Run, published: bool = False, figures: Iterable[str] | None = None) -> None:
    """Show a result in a notebook: warnings, figures, the comparison with the reader's guess, and a table for each metric.

    Args:
        result: the result.
        run: the run that stores the result. Some figures, such as a roofline, also use rows of other experiments in the run.
        published: if True, also draw the published MI250X numbers in the figures of matrix products and bandwidth.
        figures: names of the figures to show. None shows all figures of the experiment.

    Raises:
        HyperionError: the result has no rows, or the experiment has no figure of a given name.
    """
    if not result.rows:
        raise HyperionError("the result has no rows: nothing was measured", next_step="run the experiment again")
    announce(result)
    material, experiment = Material(run), result.rows[0].experiment
    if material.image_caveat and any(row.metric in ACCURACIES for row in result.rows):
        banner(material.image_caveat)
    plots = plots_of(experiment)
    names = [plot.name for plot in plots]
    chosen = names if figures is None else list(figures)
    if unknown := [name for name in chosen if name not in names]:
        raise HyperionError(
            f"the experiment {experiment!r} has no figure {unknown[0]!r}",
            where="the argument figures of show",
            next_step=f"use one of {', '.join(names)}" if names else "leave out this argument",
        )
    for plot in (plot for plot in plots if plot.name in chosen):
        options = {"published": published} if plot.published else {}
        picture = draw(plot.name, material, **options)
        if picture is not None:
            _display({"image/png": picture, "text/plain": f"[{plot.name}: {plot.caption}]"})
    show_answer(result, run)
    for caption, table in tables_of(result.rows, material.steadiness, material.image_caveat, material.prediction):
        show_table(table, caption)


def show_answer(result: HasRows, run: Run) -> None:
    """Show the comparison with the reader's guess, for a notebook that shows the result without `show`.

    Args:
        result: the result.
        run: the run that stores the result and the guess.
    """
    if sentence := answered_guess(Material(run).predictions, result.rows):
        _display({"text/markdown": f"**{markdown_text(sentence)}**", "text/plain": sentence})


def answered_guess(predictions: Sequence[Prediction], rows: Sequence[Row]) -> str:
    """Return a sentence that compares the reader's guess and the library's prediction with the measured value.

    Args:
        predictions, rows: see `guessed_row`.

    Returns:
        The sentence, or "" if nothing was predicted.
    """
    first, row, count = guessed_row(predictions, rows)
    if first is None or row is None:
        return ""
    what = " ".join(filter(None, (row.variant, row.dtype)))
    what += f", the largest of {count} values," if count > 1 else ""
    if row.value is None:
        return f"{row.metric} of {what} was not measured: {row.value_reason}."
    sentences = [f"Measured: {row.metric} of {what} is {quoted_value(row.value, row.unit)}."]
    estimate = None if first.is_ceiling else first.estimate
    for predicted, words in ((first.guess, "You guessed {}"), (estimate, "The library predicted {}")):
        if predicted is not None:
            sentences.append(f"{words.format(quoted_value(predicted, row.unit))}: {_error_of(predicted, row)}.")
    if estimate is None and first.known_ceiling:
        share, ceiling = 100 * row.value / first.known_ceiling, quoted_value(first.known_ceiling, row.unit)
        sentences.append(f"The library predicted only a ceiling of {ceiling}; the measured value is {share:.0f} % of it.")
    if first.guess is None:
        sentences.append("You made no guess.")
    return " ".join(sentences)


def _error_of(predicted: float, row: Row) -> str:
    """Return the error of a prediction in percent, as a factor if it is large, or in words if one of the two values is 0."""
    measured = not_none(row.value)
    direction = "high" if predicted > measured else "low"
    if abs(measured) <= _ROUNDING:
        return "correct" if abs(predicted) <= _ROUNDING else f"too {direction}"
    if abs(predicted) <= _ROUNDING:  # the relative error of 0 is always 100 %
        inside = row.ci_low is not None and row.ci_high is not None and row.ci_low <= predicted <= row.ci_high
        return "inside the 95 % interval" if inside else f"too {direction}"
    if predicted / measured >= _FACTOR:
        return f"{predicted / measured:.3g} times the measured value"
    if predicted == measured:  # a count, for example
        return "correct"
    error = 100 * abs(predicted - measured) / abs(measured)
    return f"{error:.0f} % too {direction}" if error >= 0.5 else "within 0.5 %"


def announce(result: HasRows) -> None:
    """Show a warning if the result was replayed from another machine, and a warning if its data are synthetic."""
    if result.replayed_from:
        banner(f"REPLAY: measured on {result.replayed_from}, not on this machine.")
    if result.source == "synthetic":
        banner("SYNTHETIC DATA: generated, not the real data set. Losses and accuracies say nothing about the real data set.")


def banner(text: str) -> None:
    """Show a warning with a coloured background in a notebook, or between two lines of `=` in plain text."""
    rule = "=" * min(100, len(text))
    _display({"text/html": f'<div style="{_BANNER}">{escaped(text)}</div>', "text/plain": f"{rule}\n{text}\n{rule}"})


def show_table(table: pd.DataFrame, caption: str = "") -> None:
    """Show a table with its caption above it. Columns of numbers are right-aligned, and missing values are shown as "none"."""
    table = table.astype(object).where(table.notna(), "none")
    title = f"<p><b>{escaped(caption)}</b></p>" if caption else ""
    # Jupyter right-aligns every cell, including text.
    style = (
        "<style>div.table td,div.table th{text-align:left!important;vertical-align:top}"
        "div.table td.number,div.table th.number{text-align:right!important;font-variant-numeric:tabular-nums}</style>"
    )
    text = f"{caption}\n{table.to_string(index=False)}"
    _display({"text/html": style + title + html(table), "text/plain": text})


def show_predictions(predictions: pd.DataFrame) -> None:
    """Show a table with the guess, the ceiling and the library's prediction of each value, and how they were computed.

    Args:
        predictions: the table that `Chapter.predict` returns. It has the columns variant, dtype, params, metric, guess, ceiling,
            estimate, low, high and basis.
    """
    if predictions.empty:
        print("The library makes no prediction for this experiment on this device.")
        return
    caption, table = prediction_table(predictions)
    show_table(table, caption)
    for sentence in prediction_basis(predictions):
        _display({"text/markdown": f"<em>{markdown_text(sentence)}</em>", "text/plain": sentence})


def show_published(*names: str) -> None:
    """Show the published MI250X tables with their known defects, and a warning that this run did not measure the numbers.

    Args:
        names: names of tables (see `published_tables`). Without names, show all tables.
    """
    banner("PUBLISHED ELSEWHERE: this run measured none of these numbers.")
    for caption, table, defects in published_tables(*names):
        show_table(table, caption)
        _display({"text/markdown": f"*Known defects: {defects}.*", "text/plain": f"Known defects: {defects}."})


def teach(template: str, **named: Row | float) -> None:
    """Show Markdown text whose numbers come from rows.

    Args:
        template: the text. It may contain fields in braces; see `fill`.
        named: a row or a number for each name in the template. Use `pick` to select a row.

    Raises:
        HyperionError: the text quotes a row that was not passed, or a value that the row does not have.
    """
    text = fill(template, **named)
    _display({"text/markdown": text, "text/plain": text})


def show_sentence(text: str) -> None:
    """Show Markdown text that a function made from rows. Show nothing if the text is empty."""
    if text:
        _display({"text/markdown": text, "text/plain": text})


def _display(bundle: dict) -> None:
    """Display an object in a notebook. Outside a notebook, print its plain text.

    `bundle` maps MIME types, such as "text/html", to representations of the object.
    """
    from IPython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        print(printable(bundle["text/plain"]))
    else:
        display(bundle, raw=True)


def pick(rows: Iterable[Row], metric: str, best: bool = False, **wanted) -> Row:
    """Return the one measured row of a metric whose columns and params have the given values.

    Args:
        rows: the rows to select from.
        metric: name of the metric.
        best: if several rows match, return the row with the best value instead of raising an error.
        wanted: values of columns, such as `variant="copy"` or `dtype="bf16"`, and of params, such as `m=8192`.

    Raises:
        HyperionError: no measured row matches, or several rows match and `best` is False.
    """
    matching = [row for row in rows if row.metric == metric and _matches(row, wanted)]
    chosen = [row for row in matching if row.value is not None]
    request = ", ".join([metric, *(f"{name}={value!r}" for name, value in wanted.items())])
    if not chosen:
        reasons = "; ".join(dict.fromkeys(row.value_reason for row in matching))
        raise HyperionError(
            f"no measured row of {request}" + (f" ({reasons})" if reasons else ""),
            next_step="run the experiment that measures this row, or pick another row",
        )
    if len(chosen) > 1 and not best:
        raise HyperionError(
            f"{len(chosen)} rows of {request}", next_step="give more columns or parameters to select one row, or pass best=True"
        )
    lowest = chosen[0].definition.direction == "lower"
    return (min if lowest else max)(chosen, key=lambda row: not_none(row.value))


def fill(template: str, **named: Row | float) -> str:
    """Return the template with its fields replaced by values from rows, so that authors type no measured numbers.

    If a row is passed as the argument `best`, the template can contain these fields: `{best.value}`, `{best.limit}` and
    `{best.predicted}` with their unit, `{best.number}` (the value without unit), `{best.share}` (value in percent of the limit),
    `{best.error}` (signed error of the prediction in percent), `{best.interval}`, `{best.variant}`, `{best.dtype}`, and
    `{best.<name>}` for each param. Numbers have four significant digits. Write counted nouns in the plural: "all 1 ranks" becomes
    "1 rank".

    Args:
        template: text with fields in braces, as for `str.format`.
        named: a row or a number for each name in the template.

    Raises:
        HyperionError: there is no argument for a field of the template, or the row does not have the value of the field.
    """
    values = {name: _Quoted(name, row) if isinstance(row, Row) else number(row) for name, row in named.items()}
    try:
        return _ONE_OF_SEVERAL.sub(r"1 \1", template.format(**values))
    except KeyError as error:
        remedy = f"pass the argument: teach(template, {error.args[0]}=pick(result.rows, …))"
        raise HyperionError(f"the text has a field {error.args[0]!r} without an argument", next_step=remedy) from error


def verdict(speedup: Row) -> str:
    """Return "faster than" or "slower than" for a speed-up whose interval excludes 1, else "as fast, within noise, as"."""
    if not_none(speedup.ci_low) > 1:
        return "faster than"
    return "slower than" if not_none(speedup.ci_high) < 1 else "as fast, within noise, as"


def compared_steps(row: Row) -> str:
    """Return the steps that a comparison of losses covers, such as "steps 1 to 25", or "200 steps" if it covers all steps."""
    if "first" not in row.params:
        return f"{row.params['steps']} steps"
    return f"steps {row.params['first']} to {row.params['last']}"


class _Quoted:
    """Formats the fields of a row for sentences in a notebook, such as "The copy reaches {copy.value}".

    Numbers are rounded and have their unit. If a sentence uses a field that the row does not have, a HyperionError is raised.
    """

    def __init__(self, name: str, row: Row):
        self._name, self._row = name, row

    def __getattr__(self, field: str) -> str:
        row = self._row
        quotable = {
            "value": row.value,
            "limit": row.limit,
            "predicted": row.predicted,
            "share": row.fraction_of_limit,
            "error": prediction_error(row),
            "low": row.ci_low,
            "high": row.ci_high,
        }
        if field in ("variant", "dtype", "experiment", "data_source"):
            return getattr(row, field)
        if field == "number":
            return self.value.removesuffix(f" {row.unit}")
        if field == "interval":
            return f"{self.low.removesuffix(f' {row.unit}')} to {self.high}"
        value = quotable[field] if field in quotable else row.params.get(field)
        if value is None:
            reason = {"value": row.value_reason, "limit": row.limit_source, "share": row.limit_source}.get(field, "")
            raise HyperionError(
                f"the text quotes {self._name}.{field}, which the row of {row.metric} does not have"
                + (f" ({reason})" if reason else ""),
                next_step="quote this field only if the row has it",
            )
        if field in ("share", "error"):
            return f"{percent(value, signed=field == 'error')} %"
        if field in quotable:
            return quoted_value(value, row.unit)
        # Sizes such as 8192 are shown without separators, as readers know them. Larger numbers need separators.
        return f"{value:,}" if isinstance(value, int) and value >= 100_000 else f"{value}"


def _matches(row: Row, wanted: dict) -> bool:
    columns = ("notebook", "experiment", "variant", "dtype", "rank", "data_source")
    return all((getattr(row, name) if name in columns else row.params.get(name)) == value for name, value in wanted.items())
