"""Rows as tables: a numeric frame to compute with, a readable one to look at, Markdown for pages.

A table holds one metric, so that its header can carry the unit. What tells its rows apart (variant, dtype, parameters)
becomes columns; what they share is left to the caption.
"""

import json
from collections.abc import Iterable
from html import escape
from typing import cast

import pandas as pd

from hyperion.errors import HyperionError
from hyperion.figures.material import interval, made_from_rows, number, number_within, percent
from hyperion.results import Row, metric_named
from hyperion.untrusted import printable


def metrics_of(rows: Iterable[Row]) -> list[str]:
    """Metric names in the order of the rows."""
    return list(dict.fromkeys(row.metric for row in rows))


def prediction_error(row: Row) -> float | None:
    """Signed error of the prediction relative to the value, above 0 where too much was predicted; None without either."""
    if row.value in (None, 0) or row.predicted is None:
        return None
    return row.predicted / row.value - 1


def tidy(rows: Iterable[Row]) -> pd.DataFrame:
    """All rows as numbers, one line a row: its columns, each parameter as `params.<name>`, and the derived columns
    `fraction_of_limit` and `prediction_error` (signed, relative)."""
    return pd.DataFrame(
        [
            {
                **{name: getattr(row, name) for name in ("notebook", "experiment", "variant", "dtype")},
                **{f"params.{name}": value for name, value in row.params.items()},
                **{name: getattr(row, name) for name in ("rank", "metric", "value", "unit", "value_reason", "n")},
                **{name: getattr(row, name) for name in ("ci_low", "ci_high", "predicted", "limit", "limit_source")},
                "fraction_of_limit": row.fraction_of_limit,
                "prediction_error": prediction_error(row),
                **{name: getattr(row, name) for name in ("check", "check_error", "check_tolerance", "data_source")},
                **{name: getattr(row, name) for name in ("clock_mhz", "power_w", "throttle")},
            }
            for row in rows
        ]
    )


def metric_table(rows: Iterable[Row], metric: str) -> pd.DataFrame:
    """One metric's rows as text: what tells them apart, value with 95 % interval, share of the limit, prediction and its
    signed error, check. A missing value shows its reason; a column that nothing fills is left out.

    Raises:
        HyperionError: no row has this metric.
    """
    chosen = [row for row in rows if row.metric == metric]
    if not chosen:
        raise HyperionError(f"no row of {metric}", next_step="run the experiment that produces it")
    unit = chosen[0].unit
    identity = pd.DataFrame([_identity(row) for row in chosen], dtype=object)
    differing = [c for c in identity if len(set(identity[c].map(text_of))) > 1 or len(chosen) == 1 and c == "variant"]
    values = pd.DataFrame([_value_columns(row, metric, unit_mark(unit)) for row in chosen])
    values = values[[column for column in values if values[column].ne("").to_numpy().any()]]
    return pd.concat([identity[differing].map(text_of), values], axis=1)


def shared_identity(rows: Iterable[Row]) -> str:
    """What all rows have in common of variant, dtype and parameters, for captions: "cache cold · dtype fp32"."""
    identity = pd.DataFrame([_identity(row) for row in rows], dtype=object)
    shared = [c for c in identity if len(set(identity[c].map(text_of))) == 1 and text_of(identity[c].iloc[0])]
    # A hash is unreadable in a caption; rows.csv has it.
    shown = [column for column in shared if column != "variant" and not column.endswith("sha256")]
    return " · ".join(f"{column} {text_of(identity[column].iloc[0])}" for column in shown)


def unit_mark(unit: str) -> str:
    """A unit for the header of a column, "" where the metric's name says it all."""
    return "" if unit in ("1", "perplexity") else f" [{unit}]"


def epoch_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows with an `epoch` parameter, one line a variant, epoch and rank, one column a metric with its unit."""
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows:
        if "epoch" not in row.params:
            continue
        named = {"model": row.variant, "epoch": row.params["epoch"]}
        named |= {} if row.rank is None else {"rank": str(row.rank)}  # a column with gaps would make floats of numbers
        line = lines.setdefault((row.variant, row.params["epoch"], row.rank), named)
        unit = row.unit
        header = row.metric + ("" if unit == "fraction" else unit_mark(unit))
        line[header] = number_within(row.value, row.ci_low, row.ci_high) if row.value is not None else row.value_reason
    return pd.DataFrame(lines.values()).fillna("")


def phase_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows with parameters `phase` and `part`, one line a variant, dtype and phase, one column a part with its unit."""
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows:
        if not {"phase", "part"} <= row.params.keys():
            continue
        named = {"model": row.variant, "dtype": row.dtype, "phase": row.params["phase"]}
        line = lines.setdefault(tuple(named.values()), named)
        line[row.params["part"] + unit_mark(row.unit)] = number(row.value) if row.value is not None else row.value_reason
    return pd.DataFrame(lines.values()).fillna("")


def is_floor(row: Row) -> bool:
    """Whether the row's limit bounds a loss or a perplexity from below: no share of it says anything."""
    return row.unit in ("nats", "perplexity", "bits")


def markdown(table: pd.DataFrame) -> str:
    """A table as GitHub-flavoured Markdown, numbers to the right."""
    header = [_markdown_cell(column) for column in table.columns]
    body = [[_markdown_cell(cell) for cell in line] for line in table.itertuples(index=False)]
    aligned = ["---:" if _numeric(cast(pd.Series, table[column])) else "---" for column in table.columns]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, aligned, *body]) + "\n"


def _markdown_cell(cell) -> str:
    return markdown_text(cell).replace("|", "\\|")


def markdown_text(value) -> str:
    """Return a value as Markdown that shows it on one line: no HTML, link or picture of it takes effect."""
    text = escape(" ".join(printable(str(value)).split("\n")), quote=False)
    return text.replace("\\", "&#92;").replace("](", "]&#40;").replace("`", "&#96;")


def markdown_code(value) -> str:
    """Return a value as inline code of Markdown."""
    return "`" + " ".join(printable(str(value)).split()).replace("`", "'") + "`"


def html(table: pd.DataFrame) -> str:
    """A table as HTML, numbers to the right."""
    numeric = [_numeric(cast(pd.Series, table[column])) for column in table.columns]
    styled = table.map(escaped)
    head = "".join(f"<th{_right(n)}>{escaped(column)}</th>" for column, n in zip(table.columns, numeric, strict=True))
    lines = (
        "".join(f"<td{_right(n)}>{cell}</td>" for cell, n in zip(line, numeric, strict=True))
        for line in styled.itertuples(index=False)
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def escaped(value) -> str:
    """Return a value as text of HTML, for elements and attributes; control characters are shown, not obeyed."""
    return escape(printable(str(value)))


@made_from_rows("the tables")
def tables_of(rows: list[Row]) -> list[tuple[str, pd.DataFrame]]:
    """(caption, table) of an experiment: its epochs in one table, its phases in another, then each metric of the other rows
    in one of its own, or in several where its rows do not have the same parameters."""
    tables = [
        (caption, table)
        for caption, table in (("By epoch", epoch_table(rows)), ("By phase and part", phase_table(rows)))
        if len(table)
    ]
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if "epoch" not in row.params and not {"phase", "part"} <= row.params.keys():
            groups.setdefault((row.metric, *sorted(row.params)), []).append(row)
    order = metrics_of(rows)
    for (metric, *_), chosen in sorted(groups.items(), key=lambda group: order.index(group[0][0])):
        shared = shared_identity(chosen)
        caption = f"{metric}: {chosen[0].definition.meaning}" + (f" ({shared})" if shared else "")
        tables.append((caption, metric_table(chosen, metric)))
    return tables


def _identity(row: Row) -> dict:
    return identity_of(row.variant, row.dtype, row.rank, row.params)


def identity_of(variant: str, dtype: str, rank: int | None, params: dict) -> dict:
    """What tells a row or a prediction from others, by column; M, N and K in one."""
    named = {"variant": variant, "dtype": dtype, "rank": rank}
    params = dict(params)
    if {"m", "n", "k"} <= params.keys():
        m, n, k = (params.pop(name) for name in "mnk")
        named["M, N, K"] = f"{m}" if m == n == k else f"{m} × {n} × {k}"
    return named | params


def _value_columns(row: Row, metric: str, unit: str) -> dict[str, str]:
    shown = number_within(row.value, row.ci_low, row.ci_high) if row.value is not None else "none"
    floor = is_floor(row)
    return {
        f"{metric}{unit}": shown,
        "95 % interval": interval(row.value, row.ci_low, row.ci_high) if row.ci_low != row.ci_high else "",
        "n": "" if row.n is None else f"{row.n:,}",
        f"limit{unit}": "" if floor else number(row.limit),
        "% of limit": "" if floor else percent(row.fraction_of_limit),
        f"floor{unit}": number(row.limit) if floor else "",
        f"predicted{unit}": number(row.predicted),
        "prediction error [%]": percent(prediction_error(row), signed=True),
        "check error / tolerance": _check(row),
        "why there is none": row.value_reason,
    }


def _check(row: Row) -> str:
    if not row.check or row.check_error is None:
        return ""
    return f"{number(row.check_error, 2)} / {number(row.check_tolerance, 2)}"


def text_of(value) -> str:
    """A parameter as a cell has it."""
    if value is None or value != value:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or isinstance(value, float) and value.is_integer():
        return f"{value:,.0f}"
    return value if isinstance(value, str) else json.dumps(value)


def _numeric(column: pd.Series) -> bool:
    """Whether a column is to be read downwards as numbers."""
    cells = [str(cell) for cell in column if str(cell) not in ("", "none")]
    return bool(cells) and all(cell[0] in "+-0123456789" for cell in cells)


def _right(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


def prediction_table(predictions: pd.DataFrame) -> pd.DataFrame:
    """Return one line for each prediction: variant and parameters, the reader's guess, the library's estimate, both with unit.

    Predictions with neither are omitted, except for the first, which the reader is asked to guess.

    Args:
        predictions: columns variant, dtype, params (dict), metric, guess, estimate, basis.
    """
    lines, identities = [], []
    for position, line in enumerate(predictions.to_dict("records")):
        guess, estimate = _known(line["guess"]), _known(line["estimate"])
        if position and guess is None and estimate is None:
            continue
        identities.append(identity_of(line["variant"], line["dtype"], None, line["params"]))
        unit = unit_mark(metric_named(line["metric"]).unit)
        lines.append(
            {"what": f"{line['metric']}{unit}", "your guess": number(guess) or "none", "estimate": number(estimate) or "none"}
        )
    identity = pd.DataFrame(identities, dtype=object).map(text_of)
    shown = [column for column in identity if identity[column].ne("").to_numpy().any() and column != "rank"]
    return pd.concat([identity[shown], pd.DataFrame(lines)], axis=1)


def prediction_basis(predictions: pd.DataFrame) -> list[str]:
    """Return one sentence for each basis of estimates, or reason for none, with the formats if there are several."""
    groups: dict[tuple[str, bool], dict[str, None]] = {}
    for line in predictions.to_dict("records"):
        known = _known(line["estimate"]) is not None
        basis = line["basis"].removeprefix("no estimate: ").removeprefix("no limit: ")
        groups.setdefault((basis, known), {})[line["dtype"] or line["variant"]] = None
    everyone = len(groups) == 1
    return [
        ("Estimate" if known else "No estimate") + ("" if everyone else f" for {', '.join(names)}") + f": {basis}."
        for (basis, known), names in groups.items()
    ]


def _known(value) -> float | None:
    """Return a number, or None for pandas' NaN."""
    return None if value is None or value != value else value
