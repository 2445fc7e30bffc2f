"""Collectives as a table of sizes, the links between the devices as a matrix, the kernels that the library chose."""

from collections.abc import Iterable

import pandas as pd

from hyperion.figures.formats import byte_size, number
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


def links_between(rows: Iterable[Row]) -> pd.DataFrame:
    """What a message takes from each device to each other: a line a sender, a column a receiver; no line without any pair."""
    pairs = [row.params for row in rows if (row.variant, row.params.get("what")) == ("topology", "links")]
    devices = sorted({pair["from"] for pair in pairs})
    words = {(pair["from"], pair["to"]): pair["link"] for pair in pairs}
    nodes = {pair["from"]: pair["NUMA node"] for pair in pairs}
    return pd.DataFrame(
        [
            {
                "from": f"GPU{one}",
                **{f"to GPU{other}": words.get((one, other), "X") for other in devices},
                "NUMA node": nodes[one],
            }
            for one in devices
        ]
    )


def link_meanings(rows: Iterable[Row]) -> str:
    """What the words of `links_between` stand for, and who told; "" without any."""
    pairs = [row.params for row in rows if (row.variant, row.params.get("what")) == ("topology", "links")]
    told = dict.fromkeys(f"{pair['link']}: {pair['meaning']}" for pair in pairs)
    return "; ".join([*told, f"told by {pairs[0]['source']}"]) if pairs else ""


def kernels_chosen(rows: Iterable[Row]) -> pd.DataFrame:
    """Backend, algorithm and kernel by collective and size; what is not known has its reason."""
    lines = [
        {
            "collective": row.variant,
            "S": byte_size(row.params["bytes"]),
            "backend": row.params["backend"],
            "algorithm": row.params["algorithm"] if row.value else row.value_reason,
            "kernel": row.params["kernel"],
        }
        for row in rows
        if row.params.get("what") == "kernels"
    ]
    return pd.DataFrame(lines)
