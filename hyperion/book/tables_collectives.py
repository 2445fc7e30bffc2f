"""Collectives as a table of sizes: a line a format and message size, a column a collective."""

from collections.abc import Iterable

import pandas as pd

from hyperion.book.formats import byte_size, number
from hyperion.results import Row


def rates_by_size(rows: Iterable[Row], metric: str = "busbw_gb_s") -> pd.DataFrame:
    """The values of a metric as text, in its unit, by format and then by size; a cell that was not measured is empty."""
    chosen = [row for row in rows if row.metric == metric]
    order = list(dict.fromkeys(row.dtype for row in chosen))
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for row in sorted(chosen, key=lambda row: (order.index(row.dtype), row.params["bytes"])):
        size = row.params["bytes"]
        line = lines.setdefault((row.dtype, size), {"dtype": row.dtype, "S": byte_size(size)})
        line[row.variant] = number(row.value, 3)
    return pd.DataFrame(lines.values()).fillna("")
