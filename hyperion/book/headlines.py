"""Headlines of a run: the best value of each kind with its share of the limit."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from hyperion.errors import not_none
from hyperion.figures.material import Material, made_from_rows, measured, quoted_value
from hyperion.figures.tables import is_floor
from hyperion.results import Row

_REFERENCE_STEPS = ("model_steps", "batch_scaling")
_BASELINES, _RATES = ("language_model", "image_classifier"), ("tokens_per_s", "images_per_s")
# What a baseline reaches, and on which split: by experiment and metric.
_REACHED = {
    ("language_model", "perplexity_token"): ("perplexity per token", "valid"),
    ("language_model", "perplexity_word"): ("perplexity per word", "valid"),
    ("image_classifier", "accuracy"): ("accuracy", "test"),
}
_LOOPS = ("image_training_speed", "language_training_speed")


@dataclass(frozen=True)
class Headline:
    """One number of the headline table.

    Args:
        label: name of the quantity.
        value: value with its unit.
        fraction: share of the limit, None without a limit.
        limit: the limit with its unit, or why there is none.
        row: the row of the value.
    """

    label: str
    value: str
    fraction: float | None
    limit: str
    row: Row = field(repr=False)


@made_from_rows("the headlines")
def headlines(material: Material) -> list[Headline]:
    """Return the best value of each kind in the run, in the order of the chapters."""
    rows = [row for row in measured(material.rows) if not row.hot]
    found = [*_hardware(rows), *_steps(rows), *_links(rows), *_baselines(rows)]
    found += [*_precise(rows), *_compiled(rows), *_parity(rows), *_scaled(rows)]
    return [_headline(label, row) for label, row in found]


def _hardware(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    products = [r for r in rows if r.metric == "gemm_tflops" and "plain_loop_calls" not in r.params]
    copies = [r for r in rows if (r.experiment, r.metric, r.variant) == ("bandwidth", "bandwidth_gb_s", "copy")]
    largest = max((r.params["elements"] for r in copies), default=0)
    yield from ((f"matrix product, {r.dtype}, cold caches", r) for r in _best(products, lambda r: r.dtype))
    # A cache may serve smaller arrays.
    yield from ((f"memory copy, {r.dtype}, largest arrays", r) for r in copies if r.params["elements"] == largest)


def _steps(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    """The fastest step of each reference model of chapter 1.2, over all formats and batches."""
    chosen = [r for r in rows if r.experiment in _REFERENCE_STEPS and r.metric == "samples_per_s"]
    for row in _best(chosen, lambda r: r.variant):
        compiled = ", compiled" if row.params.get("mode") == "compiled" else ""
        yield f"{row.variant}, training, {row.dtype}{compiled}, batch {row.params['batch']:,}", row


def _links(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    chosen = [r for r in rows if (r.metric, r.variant) == ("busbw_gb_s", "all_reduce")]
    yield from ((f"all-reduce over {r.params['ranks']} devices", r) for r in _best(chosen, lambda r: r.params["ranks"]))


def _baselines(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    """The quality of the baselines (the mean if several seeds were trained) and the rate of their steps."""
    averaged = {(row.variant, row.metric) for row in rows if "seeds" in row.params}
    for row in rows:
        what, split = _REACHED.get((row.experiment, row.metric), ("", ""))
        if what and row.params.get("split") == f"{split}, mean of seeds":
            yield f"{row.variant}, {what}, {split} split, mean of {row.params['seeds']} seeds", row
        elif what and row.params.get("split") == split and (row.variant, row.metric) not in averaged:
            yield f"{row.variant}, {what}, {split} split", row
        elif row.experiment in _BASELINES and row.metric in _RATES and row.params.get("step") == "steady":
            batch = f"{row.params['batch']:,}{' tokens' if row.metric == 'tokens_per_s' else ''}"
            yield f"{row.variant}, steady training step, {row.dtype}, batch {batch}", row
        elif row.experiment in _LOOPS and row.metric == "speedup":
            compiled = " compiled" if row.params.get("plain_compiled", row.params["compiled"]) else ""
            batch = f"{row.params['batch']:,}{' tokens' if row.experiment == 'language_training_speed' else ''}"
            yield f"{row.variant}, training, batch {batch}: over a plain{compiled} loop", row


def _precise(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    """The fastest format of each training of chapter 2.3."""
    ratios = [r for r in rows if (r.experiment, r.metric) == ("precision_variants", "speedup")]
    for row in _best(ratios, lambda r: r.variant):
        yield f"{row.variant}, training: {row.dtype} over {row.params['over']}", row


def _compiled(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    """The fastest compiled mode of each model of chapter 2.7.

    The mode with the shortest time, not with the largest ratio: every mode has its own eager baseline.
    """

    def subject(row: Row) -> str:
        return f"{row.params['model']}, inference, {row.dtype}, batch {row.params['batch']:,}"

    compiled = [r for r in rows if r.experiment == "compilation"]
    times = {row.key[:-1]: not_none(row.value) for row in compiled if row.metric == "inference_time_s"}
    ratios = [row for row in compiled if row.metric == "speedup" and row.key[:-1] in times]
    for row in _best(ratios, subject, lambda r: -times[r.key[:-1]]):
        yield f"{subject(row)}: {row.variant} over eager", row


def _parity(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    for row in rows:
        if (row.experiment, row.metric) == ("parallel_parity", "relative_difference"):
            yield f"{row.variant.upper()} on {row.params['ranks']} ranks: loss apart from one device's", row


def _scaled(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    cells = [r for r in rows if r.metric == "scaling_efficiency" and r.params["mode"] == "weak"]
    most = max((r.params["ranks"] for r in cells), default=0)
    for row in (r for r in cells if r.params["ranks"] == most):
        yield f"{row.params['model']}, {row.params['strategy'].upper()}: weak scaling to {most} devices", row


def _best(
    rows: list[Row], kind: Callable[[Row], Hashable], score: Callable[[Row], float] = lambda row: not_none(row.value)
) -> list[Row]:
    """Return the row with the highest score of each kind, in the order of the kinds. The score is the value by default."""
    kinds = dict.fromkeys(kind(row) for row in rows)
    return [max((row for row in rows if kind(row) == one), key=score) for one in kinds]


def _headline(label: str, row: Row) -> Headline:
    if row.limit is None:
        limit = row.limit_source.partition("; ")[0]
    else:
        limit = f"{'floor' if is_floor(row) else 'limit'} {quoted_value(row.limit, row.unit)}"
    fraction = None if is_floor(row) else row.fraction_of_limit
    return Headline(label, quoted_value(not_none(row.value), row.unit), fraction, limit, row)
