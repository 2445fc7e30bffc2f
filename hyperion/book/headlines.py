"""The numbers that a reader wants first: the best of each kind that a run holds, with its share of the limit."""

from dataclasses import dataclass, field

from hyperion.book.display_text import quoted_value
from hyperion.book.material import Material, measured
from hyperion.book.tables import is_floor
from hyperion.results import Row


@dataclass(frozen=True)
class Headline:
    """One number that a reader wants first.

    Args:
        label: what it is.
        value: with its unit.
        fraction: share of the limit, None when there is no limit.
        limit: the limit in words, or why there is none.
        row: the row it is quoted from.
    """

    label: str
    value: str
    fraction: float | None
    limit: str
    row: Row = field(repr=False)


def headlines(material: Material) -> list[Headline]:
    """The best value of each kind that the run holds."""
    rows = [row for row in measured(material.rows) if row.params.get("cache") != "hot"]
    products = [r for r in rows if r.metric == "gemm_tflops" and "plain_loop_calls" not in r.params]
    copies = [r for r in rows if r.metric == "bandwidth_gb_s" and r.variant == "copy"]
    largest = max((r.params["elements"] for r in copies), default=0)
    found = [(f"matrix product, {r.dtype}", r) for r in _best_by_dtype(products)]
    found += [(f"memory copy, {r.dtype}", r) for r in copies if r.params["elements"] == largest]
    found += [("perplexity per token, valid split", r) for r in rows if _trained_perplexity(r)]
    found += [("accuracy, test split", r) for r in rows if r.metric == "accuracy" and r.params.get("split") == "test"]
    found += [(f"{r.variant}, training", r) for r in rows
              if r.metric in ("tokens_per_s", "images_per_s") and r.params.get("step") == "steady"]  # fmt: skip
    return [_headline(label, row) for label, row in found]


def _best_by_dtype(rows: list[Row]) -> list[Row]:
    dtypes = dict.fromkeys(row.dtype for row in rows)
    return [max((row for row in rows if row.dtype == dtype), key=lambda row: row.value) for dtype in dtypes]


def _trained_perplexity(row: Row) -> bool:
    return (
        row.metric == "perplexity_token" and row.experiment == "language_model" and row.params.get("split") == "valid"
    )


def _headline(label: str, row: Row) -> Headline:
    if row.limit is None:
        limit = row.limit_source.partition("; ")[0]
    else:
        limit = f"{'floor' if is_floor(row) else 'limit'} {quoted_value(row.limit, row.unit)}"
    fraction = None if is_floor(row) else row.fraction_of_limit
    return Headline(label, quoted_value(row.value, row.unit), fraction, limit, row)
