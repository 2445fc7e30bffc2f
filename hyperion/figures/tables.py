"""Convert rows to tables: numeric tables for computations, text tables for readers, and Markdown or HTML for pages.

A table for readers contains one metric, so that its header can contain the unit. The properties of a row are its variant, its
dtype and its params. A property in which the rows differ is a column. A property that all rows share is in the caption.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from html import escape
from typing import Any, cast

import pandas as pd

from hyperion.errors import HyperionError
from hyperion.figures.material import ACCURACIES, interval, made_from_rows, number, number_within, percent
from hyperion.results import Prediction, Row, metric_named
from hyperion.units import GIB, MIB
from hyperion.untrusted import printable

# Header of the interval column. Two launches of the program differ by more than this interval, because their memory addresses,
# clocks and background load differ.
INTERVAL = "95 % interval within one launch"
# Headers of intervals that also contain variation between launches, trials or seeds.
SEEDS_INTERVAL, TRIALS_INTERVAL = "95 % interval of the mean over seeds", "95 % interval over trials"
MEMORY_IN_MIB = GIB / MIB  # factor of a memory metric in a flat table
LAUNCHES_INTERVAL = "95 % interval over launches"
# Experiments that start new processes for each trial or launch. `hyperion doctor` runs `comparison`.
_OVER_PROCESSES = {"comparison": TRIALS_INTERVAL, "framework_speed": LAUNCHES_INTERVAL}
PREDICTED_INTERVAL = "80 % interval of the prediction"
_NUMBER = re.compile(r"[+-]?\d[\d,.]*(e[+-]?\d+)?(?!\w)")


def metrics_of(rows: Iterable[Row]) -> list[str]:
    """Return the names of the metrics in row order."""
    return list(dict.fromkeys(row.metric for row in rows))


def prediction_error(row: Row) -> float | None:
    """Return the relative error of the prediction, which is positive if the prediction exceeds the value.

    Return None without a value or a prediction, or if one of them is 0: an error relative to 0 says nothing.
    """
    if not row.value or not row.predicted:
        return None
    return row.predicted / row.value - 1


def metric_table(
    rows: Iterable[Row],
    metric: str,
    steadiness: Callable[[Row], str] = lambda row: "",
    prediction: Callable[[Row], Prediction | None] = lambda row: None,
) -> pd.DataFrame:
    """Return the rows of one metric as a table of strings.

    The first columns are the properties in which the rows differ. Columns follow for the value with its 95 % interval, whether
    its samples were steady, the limit and the share of the limit, the prediction with its 80 % interval and its error, and the
    check. Ceilings that runs of earlier versions stored as predictions have their own column. For a row without a value, the
    table shows the reason. Empty columns are omitted.

    Args:
        rows: rows to show. Rows of other metrics are ignored.
        metric: name of the metric.
        steadiness: function that returns the steadiness of a row, such as `Material.steadiness`.
        prediction: function that returns the stored prediction of a row, such as `Material.prediction`.

    Raises:
        HyperionError: no row has this metric.
    """
    chosen = [row for row in rows if row.metric == metric]
    if not chosen:
        raise HyperionError(f"no row of {metric}", next_step=f"run the experiment that measures {metric}")
    unit = chosen[0].unit
    identity = pd.DataFrame([_identity(row) for row in chosen], dtype=object)
    differing = [c for c in identity if len(set(identity[c].map(text_of))) > 1 or len(chosen) == 1 and c == "variant"]
    header = interval_header(chosen)
    values = pd.DataFrame([_value_columns(row, unit_mark(unit), steadiness(row), header, prediction(row)) for row in chosen])
    values = values[[column for column in values if values[column].ne("").to_numpy().any()]]
    return pd.concat([identity[differing].map(text_of), values], axis=1)


def interval_header(rows: Iterable[Row]) -> str:
    """Return the header for the intervals of these rows, which names the variation that they cover."""
    rows = list(rows)
    if all("seeds" in row.params for row in rows):
        return SEEDS_INTERVAL
    experiments = {row.experiment for row in rows}
    return _OVER_PROCESSES.get(experiments.pop(), INTERVAL) if len(experiments) == 1 else INTERVAL


def shared_identity(rows: Iterable[Row]) -> str:
    """Return the dtype and the params that all rows share, for a caption, such as "cache cold · dtype fp32"."""
    return _shared([_identity(row) for row in rows])


def _shared(identities: Sequence[dict]) -> str:
    identity = pd.DataFrame(identities, dtype=object).map(text_of)
    shared = [column for column in identity if len(set(identity[column])) == 1 and identity[column].iloc[0] != ""]
    # A caption shows no hashes, because readers cannot use them. They are in rows.csv.
    shown = [column for column in shared if column != "variant" and not column.endswith("sha256")]
    return " · ".join(f"{column} {identity[column].iloc[0]}" for column in shown)


def unit_mark(unit: str) -> str:
    """Return the unit for a column header, such as " [s]", or "" for a number without unit and for a perplexity."""
    return "" if unit in ("1", "perplexity") else f" [{unit}]"


def epoch_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Return the rows with a param `epoch` as a table.

    It has one line for each variant, epoch and rank, and one column for each metric with its unit.
    """
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows:
        if "epoch" not in row.params:
            continue
        named = {"model": row.variant, "epoch": row.params["epoch"]}
        named |= (
            {} if row.rank is None else {"rank": str(row.rank)}
        )  # as strings, because pandas converts integers to floats in a column with gaps
        line = lines.setdefault((row.variant, row.params["epoch"], row.rank), named)
        unit = row.unit
        header = row.metric + ("" if unit == "fraction" else unit_mark(unit))
        line[header] = number_within(row.value, row.ci_low, row.ci_high) if row.value is not None else row.value_reason
    return pd.DataFrame(lines.values()).fillna("")


def concatenated(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Return one table with the lines of several tables that have the same columns."""
    given = list(tables)
    filled = [table for table in given if len(table)] or given[:1]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame()


def phase_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Return the rows with the params `phase` and `part` as a table.

    It has one line for each variant, dtype and phase, and one column for each part with its unit.
    """
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows:
        if not {"phase", "part"} <= row.params.keys():
            continue
        named = {"model": row.variant, "dtype": row.dtype, "phase": row.params["phase"]}
        line = lines.setdefault(tuple(named.values()), named)
        line[row.params["part"] + unit_mark(row.unit)] = number(row.value) if row.value is not None else row.value_reason
    return pd.DataFrame(lines.values()).fillna("")


def is_floor(row: Row) -> bool:
    """Return True if a row's `limit` is the lowest possible loss or perplexity, not the highest possible speed.

    A loss divided by the lowest possible loss has no useful meaning, so tables omit this ratio.
    """
    return row.unit in ("nats", "perplexity", "bits")


def markdown(table: pd.DataFrame) -> str:
    """Return a table as GitHub-flavoured Markdown. Numeric columns are right-aligned."""
    header = [_markdown_cell(column) for column in table.columns]
    body = [[_markdown_cell(cell) for cell in line] for line in table.itertuples(index=False)]
    aligned = ["---:" if _numeric(cast(pd.Series, table[column])) else "---" for column in table.columns]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, aligned, *body]) + "\n"


def _markdown_cell(cell) -> str:
    return markdown_text(cell).replace("|", "\\|")


def markdown_text(value: object) -> str:
    """Format a value as Markdown on one line. HTML, links and pictures in the value are escaped and shown as plain text."""
    text = escape(" ".join(printable(str(value)).split("\n")), quote=False)
    return text.replace("\\", "&#92;").replace("](", "]&#40;").replace("`", "&#96;")


def markdown_code(value: object) -> str:
    """Format a value as inline code in Markdown."""
    return "`" + " ".join(printable(str(value)).split()).replace("`", "'") + "`"


def html(table: pd.DataFrame) -> str:
    """Return a table as HTML. Numeric columns are right-aligned."""
    numeric = [_numeric(cast(pd.Series, table[column])) for column in table.columns]
    styled = table.map(escaped)
    head = "".join(f"<th{_right(n)}>{escaped(column)}</th>" for column, n in zip(table.columns, numeric, strict=True))
    lines = (
        "".join(f"<td{_right(n)}>{cell}</td>" for cell, n in zip(line, numeric, strict=True))
        for line in styled.itertuples(index=False)
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def escaped(value: object) -> str:
    """Escape a value for HTML elements and attributes. Control characters are shown as visible text."""
    return escape(printable(str(value)))


@made_from_rows("the tables")
def tables_of(
    rows: list[Row],
    steadiness: Callable[[Row], str] = lambda row: "",
    image_caveat: str = "",
    prediction: Callable[[Row], Prediction | None] = lambda row: None,
) -> list[tuple[str, pd.DataFrame]]:
    """Return the tables of an experiment as pairs (caption, table).

    Epoch rows are in the first table, and phase rows in the second. Each metric of the other rows has its own table, or several
    tables if its rows do not all have the same params. The rows of tables without any value or check are combined in the last
    table.

    Args:
        steadiness, prediction: see `metric_table`.
        image_caveat: sentence for the captions of tables with accuracies, as in `Material.image_caveat`.
    """
    tables = [
        (caption + _caveat((row for row in rows if "epoch" in row.params and caption == "By epoch"), image_caveat), table)
        for caption, table in (("By epoch", epoch_table(rows)), ("By phase and part", phase_table(rows)))
        if len(table)
    ]
    rows = [_as_difference(row) for row in rows]
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if "epoch" not in row.params and not {"phase", "part"} <= row.params.keys():
            groups.setdefault((row.metric, *sorted(row.params)), []).append(row)
    order, missing = metrics_of(rows), []
    for (metric, *_), chosen in sorted(groups.items(), key=lambda group: order.index(group[0][0])):
        if all(row.value is None and not row.check for row in chosen):
            missing += chosen
            continue
        shared = shared_identity(chosen)
        caption = f"{metric}: {chosen[0].definition.meaning}" + (f" ({shared})" if shared else "")
        tables.append((caption + _caveat(chosen, image_caveat), metric_table(chosen, metric, steadiness, prediction)))
    return [*tables, ("Not measured", _missing_table(missing))] if missing else tables


def _as_difference(row: Row) -> Row:
    """Return the row, as a difference instead of a share if it may be negative. Runs of earlier versions contain such shares."""
    lowest = row.value if row.ci_low is None else row.ci_low
    is_difference = row.metric == "communication_share" and lowest is not None and lowest < 0
    return replace(row, metric="alone_difference") if is_difference else row


def _missing_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Return rows without a value as a table. It has one line for each variant, dtype and reason, with the metrics."""
    metrics: dict[tuple, list[str]] = {}
    for row in rows:
        metrics.setdefault((row.variant, row.dtype, row.value_reason), []).append(row.metric)
    lines = [
        {
            "variant": variant,
            "dtype": dtype,
            "metrics": ", ".join(dict.fromkeys(names)),
            "rows": str(len(names)),
            "reason": reason,
        }
        for (variant, dtype, reason), names in metrics.items()
    ]
    table = pd.DataFrame(lines)
    return table if any(dtype for _, dtype, _ in metrics) else table.drop(columns="dtype")


def _caveat(rows: Iterable[Row], image_caveat: str) -> str:
    return f". {image_caveat}" if image_caveat and any(row.metric in ACCURACIES for row in rows) else ""


def _identity(row: Row) -> dict:
    return identity_of(row.variant, row.dtype, row.rank, row.params)


def identity_of(variant: str, dtype: str, rank: int | None, params: dict) -> dict:
    """Return the properties that distinguish a row or prediction from others, as {column: value}. M, N and K share a column."""
    named = {"variant": variant, "dtype": dtype, "rank": rank}
    params = dict(params)
    if {"m", "n", "k"} <= params.keys():
        m, n, k = (params.pop(name) for name in "mnk")
        named["M, N, K"] = f"{m}" if m == n == k else f"{m} × {n} × {k}"
    return named | params


def _value_columns(row: Row, unit: str, steady: str, interval_header: str, stored: Prediction | None) -> dict[str, str]:
    shown = number_within(row.value, row.ci_low, row.ci_high) if row.value is not None else "none"
    floor = is_floor(row)
    # A prediction without an estimate has only a ceiling. If the ceiling is the limit of the row, the table already shows it.
    ceiling = stored is not None and (stored.is_ceiling or stored.estimate is None and stored.ceiling != row.limit)
    return {
        f"{row.metric}{unit}": shown,
        interval_header: interval(row.value, row.ci_low, row.ci_high) if row.ci_low != row.ci_high else "",
        "n": "" if row.n is None else f"{row.n:,}",
        "steady": steady if row.value is not None else "",
        f"limit{unit}": "" if floor else number(row.limit),
        "% of limit": "" if floor else percent(row.fraction_of_limit),
        f"floor{unit}": number(row.limit) if floor else "",
        f"ceiling{unit}": number(stored.known_ceiling) if stored is not None and ceiling else "",
        f"predicted{unit}": "" if ceiling else number(row.predicted),
        PREDICTED_INTERVAL: predicted_interval(stored.low, stored.high) if stored else "",
        "prediction error [%]": "" if ceiling else percent(prediction_error(row), signed=True),
        "check error / tolerance": _check(row),
        "why there is none": row.value_reason,
    }


def predicted_interval(low: float | None, high: float | None) -> str:
    """Format the ends of a prediction's interval, or return "" without an interval."""
    return "" if low is None or high is None else f"{number(low)} to {number(high)}"


def _check(row: Row) -> str:
    if not row.check or row.check_error is None:
        return ""
    return f"{number(row.check_error, 2)} / {number(row.check_tolerance, 2)}"


def text_of(value: Any) -> str:
    """Format a param for a table cell."""
    if value is None or value != value:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or isinstance(value, float) and value.is_integer():
        return f"{value:,.0f}"
    if isinstance(value, float) and abs(value) < 1e6:
        return f"{value:.7g}"  # a float32 has seven significant digits, and no reader compares more
    return value if isinstance(value, str) else json.dumps(value)


def _numeric(column: pd.Series) -> bool:
    """Return True if all cells of a column begin with numbers. Empty cells and "none" are ignored.

    Names such as "1F1B" and "--fp16" are text. A cell with a semicolon is a sentence, such as "54 samples; an interval of this
    percentile needs 72".
    """
    cells = [str(cell) for cell in column if str(cell) not in ("", "none")]
    return bool(cells) and all(_NUMBER.match(cell) and ";" not in cell for cell in cells)


def _right(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


def prediction_table(predictions: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """Return a caption and a table with one line per prediction: variant and params, the guess, and the library's prediction.

    The caption states the dtype and the params that all lines share. Ceilings, if any, have their own column. A line without
    guess, prediction and ceiling is omitted, except the first, because the reader guesses its value.

    Args:
        predictions: columns variant, dtype, params (dict), metric, guess, ceiling, estimate, low, high, basis.
    """
    lines, identities = [], []
    for position, line in enumerate(predictions.to_dict("records")):
        guess, ceiling, estimate, low, high = (_known(line[name]) for name in ("guess", "ceiling", "estimate", "low", "high"))
        if position and guess is None and ceiling is None and estimate is None:
            continue
        identities.append(identity_of(line["variant"], line["dtype"], None, line["params"]))
        unit = unit_mark(metric_named(line["metric"]).unit)
        lines.append(
            {
                # Not "what": many experiments have a param of this name, which has a column of its own.
                "quantity": f"{line['metric']}{unit}",
                "your guess": number(guess) or "none",
                "ceiling": number(ceiling),
                "prediction": number(estimate) or "none",
                "80 % interval": predicted_interval(low, high),
            }
        )
    identity = pd.DataFrame(identities, dtype=object).map(text_of)
    named = [column for column in identity if identity[column].ne("").to_numpy().any()]
    differ = [column for column in named if column == "variant" or len(set(identity[column])) > 1]
    values = pd.DataFrame(lines)
    values = values[[column for column in values if values[column].ne("").to_numpy().any()]]
    shared = _shared(identities)
    caption = "Predictions, stored before the first measurement" + (f" ({shared})" if shared else "")
    return caption, pd.concat([identity[differ], values], axis=1)


def prediction_basis(predictions: pd.DataFrame) -> list[str]:
    """Return sentences on how the predictions were computed, or why there is none.

    Predictions with the same explanation share one sentence. If there are several explanations, each sentence names the number
    formats or the variants that it applies to.
    """
    groups: dict[tuple[str, str], dict[str, None]] = {}
    for line in predictions.to_dict("records"):
        found = "Only a ceiling" if _known(line["ceiling"]) is not None else "No prediction"
        found = "Prediction" if _known(line["estimate"]) is not None else found
        basis = line["basis"].removeprefix("no estimate: ").removeprefix("no limit: ")
        groups.setdefault((basis, found), {})[line["dtype"] or line["variant"]] = None
    everyone = len(groups) == 1
    return [found + ("" if everyone else f" for {', '.join(names)}") + f": {basis}." for (basis, found), names in groups.items()]


def _known(value) -> float | None:
    """Return the number, or None if it is NaN, which pandas uses for a missing number."""
    return None if value is None or value != value else value
