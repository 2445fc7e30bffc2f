"""Fit the curves of `hyperion.chapter.efficiency` to reference runs, and compare their predictions with held-out rows.

`python -m hyperion.commands.regenerate curves results/reference/{h200x2,cpu-2cores,h100}` writes the curves to efficiency.toml.
If several runs have rows for a curve, it is fitted to the first of them. `python -m hyperion.commands.regenerate predictions
results/reference/*` prints the errors of the predictions and the coverage of their intervals, as in docs/predictions.md.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyperion.chapter.efficiency import (
    COLLECTIVE,
    CURVES_FILE,
    EAGER_STEP,
    OWN_PRODUCT,
    OWN_STREAM,
    PEER_COPY,
    PRODUCT,
    REFERENCE_STEP,
    REPEATED,
    STEP_PRODUCTS,
    STREAM,
    TRAINING_STEP,
    Curve,
    Work,
    fit_times,
    moved,
    own_product_curve,
    own_stream_curve,
    product_point,
    read_curves,
    stream_name,
    stream_point,
)
from hyperion.chapter.rows import datasheet_ceilings, link_limit
from hyperion.errors import not_none
from hyperion.figures.material import signed_number
from hyperion.hardware import Device, detect
from hyperion.hardware.facts import facts_of
from hyperion.measure import ALL_COLLECTIVES, OPERATIONS, REDUCTIONS
from hyperion.results import Prediction, Row, Run
from hyperion.results.files import write_atomically
from hyperion.units import MIB

# Smallest message in bytes that curves are fitted to. Collectives use other algorithms for smaller messages, and chapter 1.3
# predicts only the bandwidth of larger ones.
_LEAST_MESSAGE = 64 * MIB
# The interval of a curve is wide enough to contain this share of the reference run's held-out rows. The share is above 80 %,
# because another host differs by more than the sizes and models of one run.
_COVERED = 0.9
# Spread of a curve fitted to a single row. One row does not show how much such rates differ, so the value is an assumption.
_SPREAD_OF_ONE_ROW = 0.25
# Experiments whose rates of steps curves are fitted to, and the kind of their curve.
_KINDS = {
    "image_classifier": TRAINING_STEP,
    "image_training_speed": TRAINING_STEP,
    "language_model": TRAINING_STEP,
    "language_training_speed": TRAINING_STEP,
    "precision_variants": EAGER_STEP,
    "training_ladder": EAGER_STEP,
    "model_steps": REFERENCE_STEP,
    "batch_scaling": REFERENCE_STEP,
}
_HEADER = """# Predictions of rates

`python -m hyperion.commands.regenerate predictions results/reference/*` makes this page from the rows of the reference runs.

A *ceiling* is a limit: no measurement may exceed it. A *prediction* is the expected rate. It is a ceiling times the efficiency
that a reference machine reached for work of this size, and it may be too high or too low. Its interval is made to contain the
measured rate in 80 % of all cases. See `hyperion/chapter/efficiency.py`.

The curves are fitted to a run on H200s (`h200x2`) and to a run on a CPU (`cpu-2cores`), and those of eager training steps and
of the largest arrays of `memory_levels` to a run on an H100 (`h100`). "Stored by" a run means that the run stored these
predictions before it measured. All stored predictions of rates are shown. Runs that are older than the curves stored only
ceilings for most rates. For them, the tables compare the predictions of the present curves with their rows. The throughput of
LoRA and of training on several devices has only a ceiling.

The runs `h100` and `h100-second-host` predicted the eager steps of `precision_variants` and `training_ladder` from the curve of
captured steps, which are faster, so most of these predictions are too high. Since then, eager steps have had their own curves.
Until November 2026, the prediction of the copies of `memory_levels` was about 35 % too low. Its curve was fitted to copies in a
graph, and these reach two thirds of the rate of copies outside a graph.
The largest error is that of a matrix product in chapter 2.9 whose dimensions are no multiples of 8. The curves are fitted to
products whose dimensions are.
"""
_HELD_OUT = """In the run to which the curves are fitted, each size or model is predicted from the others. The intervals are made
from these errors, so only the tables above test the intervals."""
_SHARES = (TRAINING_STEP, EAGER_STEP, STEP_PRODUCTS, REFERENCE_STEP)


@dataclass(frozen=True)
class Point:
    """A measured rate, with everything that its prediction depends on.

    Args:
        kind, name: kind of measurement and name of the curve, as in `Curve`.
        work: work of one call.
        row: row of the measured rate.
        group: any value that identifies the row's group. Rows of one group are predicted from a curve fitted to the other groups.
    """

    kind: str
    name: str
    work: Work
    row: Row
    group: object

    @property
    def seconds(self) -> float:
        """Measured time of a call in seconds."""
        return self.work.amount / not_none(self.row.value)


@dataclass(frozen=True)
class Scored:
    """A prediction and the measured rate.

    Args:
        point: measured rate.
        predicted: predicted rate.
        spread: the interval is predicted / (1 + spread) to predicted * (1 + spread).
        how: which curve the prediction comes from.
    """

    point: Point
    predicted: float
    spread: float
    how: str

    @property
    def error(self) -> float:
        """Signed relative error of the prediction."""
        return self.predicted / not_none(self.point.row.value) - 1

    @property
    def covered(self) -> bool:
        """True if the measured rate lies in the interval."""
        return 1 / (1 + self.spread) <= not_none(self.point.row.value) / self.predicted <= 1 + self.spread


@dataclass(frozen=True)
class Reference:
    """A reference run.

    Attributes:
        name: name of the run folder.
        commit: commit of the code that measured the run.
        device: device of the run.
        rows: rows of the run.
        predictions: a dict that maps the key of each row to its stored prediction. Predictions without an interval are omitted.
    """

    name: str
    commit: str
    device: Device
    rows: list[Row]
    predictions: dict[tuple, Prediction]

    @classmethod
    def open(cls, folder: Path) -> "Reference":
        """Read a run folder."""
        run = Run.open(folder)
        environment = run.information()["environment"]
        commit = (environment.get("source") or {}).get("commit") or "of unknown commit"
        rows, stored = run.rows(), [p for p in run.predictions() if p.made_at]
        predictions = {row.key: p for row in rows for p in stored if p.predicts(row)}
        return cls(folder.name, commit[:12], detect(facts_of(environment)), rows, predictions)


def points_of(reference: Reference) -> list[Point]:
    """Return the measured rates of a run that a curve can predict. Rates without a ceiling are omitted."""
    measured = [row for row in reference.rows if row.value is not None and row.value > 0 and not row.busy]
    found = [_point(reference, row) for row in measured]
    return [point for point in found if point is not None]


def fit_curves(reference: Reference, points: Sequence[Point]) -> list[Curve]:
    """Fit one curve for each kind of measurement and name, and one spread for each kind."""
    source = f"{reference.name} ({reference.device.name}, {reference.commit})"
    curves, later = [], points
    # The matrix products of `operand_data` are excluded: they have warm caches, and data that chapter 1.1 does not use.
    points = [point for point in points if point.row.experiment != "operand_data"]
    for kind, of_kind in _grouped(points, lambda point: point.kind).items():
        # The errors of all curves of a kind are pooled, because a single curve has too few sizes for a quantile.
        spread = _spread([e for _, same in _grouped(of_kind, lambda p: p.name).items() for e in _held_out_errors(kind, same)])
        for name, same in _grouped(of_kind, lambda point: point.name).items():
            curves.append(Curve(reference.device.arch, kind, name, *_fit(kind, same), spread, len(same), source))
    for kind, errors in _errors_of_own_curves(reference, later).items():
        # Only the spread of this entry is used, because each run fits its own curve.
        curves.append(Curve(reference.device.arch, kind, "", 0.0, 0.0, 0.0, _spread(errors), len(errors), source))
    return curves


def first_fits(references: Iterable[Reference]) -> list[Curve]:
    """Fit curves to several runs. A curve that several runs could give is that of the first of them."""
    curves: dict[tuple[str, str, str], Curve] = {}
    for reference in references:
        for curve in fit_curves(reference, points_of(reference)):
            curves.setdefault((curve.arch, curve.kind, curve.name), curve)
    return list(curves.values())


def score_stored(reference: Reference) -> list[Scored]:
    """Compare a run's stored predictions of rates, made before its measurements, with its rows.

    All stored predictions with an interval are compared, also those of rates to which no curve is fitted.
    """
    scored = []
    for row in reference.rows:
        stored = reference.predictions.get(row.key)
        if stored is None or stored.estimate is None or stored.high is None or not row.value or row.busy:
            continue
        if row.unit.endswith("/s") or row.unit.endswith("FLOPS"):
            point = Point("", "", Work(row.value, 1.0, 0.0), row, None)
            scored.append(Scored(point, stored.estimate, stored.high / stored.estimate - 1, f"prediction of {reference.name}"))
    return scored


def score_unseen(fitted: Sequence[Reference], others: Sequence[Reference], curves: Sequence[Curve] | None = None) -> list[Scored]:
    """Predict rows that the curves were not fitted to, and compare the predictions with the measured rates.

    Args:
        fitted: runs that the stored curves were fitted to. Each of their rows is predicted from a curve fitted without the row's
            group. Rows of later chapters are also predicted from the same run's rows of chapter 1.1.
        others: other runs. Their rows are predicted from the curves.
        curves: curves to use. None uses the stored curves.
    """
    scored: list[Scored] = []
    all_curves = list(curves) if curves is not None else first_fits(fitted)
    known = {(curve.arch, curve.kind, curve.name): curve for curve in all_curves}
    for reference in others:
        for point in points_of(reference):
            if not _predicted_in_book(point):
                continue
            curve = known.get((reference.device.arch, point.kind, point.name))
            if curve is not None and _run_of(curve) != reference.name:
                scored.append(Scored(point, curve.rate(point.work), curve.spread, f"curve of {_run_of(curve)}"))
    for reference in fitted:
        scored += _score_held_out(reference, known)
    return scored


def curves_to_toml(curves: Iterable[Curve]) -> str:
    """Return the content of efficiency.toml for these curves."""
    lines = [
        "# Curves of hyperion/chapter/efficiency.py. Do not edit: `python -m hyperion.commands.regenerate curves RUN...` writes",
        "# this file from the rows of reference runs.",
    ]
    for curve in curves:
        lines += ["", "[[curve]]"]
        for name, value in vars(curve).items():
            shown = f'"{value}"' if isinstance(value, str) else value if isinstance(value, int) else f"{value:.6g}"
            shown = f"{float(shown)!r}" if isinstance(value, float) else shown
            lines.append(f"{name} = {shown}")
    return "\n".join(lines) + "\n"


def page(scored: Sequence[Scored]) -> str:
    """Return a Markdown page with the errors and the coverage by metric."""
    lines = [
        "| rate | predicted from | rows | median error | median signed error | largest error | in the 80 % interval |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (kind, how), same in _grouped(scored, lambda s: (_title(s.point), s.how)).items():
        lines.append(f"| {kind} | {how} | {_statistics(same)} |")
    lines.append(f"| **all** | | {_statistics(scored)} |")
    return "\n".join(lines) + "\n"


def median_error(scored: Sequence[Scored]) -> float:
    """Return the median absolute relative error."""
    return statistics.median(abs(s.error) for s in scored)


def coverage(scored: Sequence[Scored]) -> float:
    """Return the share of measured rates that lie in their intervals."""
    return sum(s.covered for s in scored) / len(scored)


def _point(reference: Reference, row: Row) -> Point | None:
    device = reference.device
    if row.metric == "gemm_tflops":
        return _product(device, row)
    if row.metric == "bandwidth_gb_s" and row.limit is not None:
        return _transfer(row)
    if row.metric == "busbw_gb_s" and row.params["bytes"] >= _LEAST_MESSAGE and row.dtype == "fp32":
        collective = ALL_COLLECTIVES[row.variant]
        link, _ = link_limit(device, collective, row.params["ranks"])
        if link is None:
            return None
        work = moved(row.params["bytes"] * collective.bus_factor(row.params["ranks"]), link)
        return Point(COLLECTIVE, row.variant, work, row, row.params["bytes"])
    return _share(row, reference.predictions.get(row.key))


def _product(device: Device, row: Row) -> Point | None:
    square = row.experiment == "gemm" and row.params.get("cache") == "cold"
    searched = row.experiment == "best_products" and row.variant != "fastest over a plain loop"
    ceilings, _ = datasheet_ceilings(device, row.dtype)
    if ceilings is None or not (square or searched or row.experiment == "operand_data"):
        return None
    work, _ = product_point(device, ceilings, row)
    # The finalists of a search have almost the same dimensions.
    return Point(PRODUCT, row.dtype, work, row, (row.experiment, row.variant if searched else row.params["m"]))


def _transfer(row: Row) -> Point | None:
    limit = not_none(row.limit)
    if row.experiment in ("bandwidth", "stream_formats") and row.variant in OPERATIONS | REDUCTIONS and not row.hot:
        work, _ = stream_point(row)
        return Point(STREAM, stream_name(row.variant, row.dtype), work, row, row.params["elements"])
    if row.experiment == "memory_levels":
        # Runs of earlier versions timed also the largest arrays in a graph of the device. Copies then reached two thirds of the
        # rate of calls outside a graph.
        if row.params.get("timed", "").startswith("in a graph"):
            return None
        return Point(REPEATED, row.variant, moved(row.params["working_set_bytes"], limit), row, row.params["working_set_bytes"])
    if row.variant == "peer to peer":
        return Point(PEER_COPY, "", moved(row.params["bytes"], limit), row, row.params["bytes"])
    return None


def _share(row: Row, stored: Prediction | None) -> Point | None:
    """Return the `Point` of a row whose ceiling follows from other rates of the run, such as the rate of a training step.

    Return None if the row has no ceiling.

    Runs of earlier versions stored this ceiling as the estimate of the prediction.
    """
    kind = STEP_PRODUCTS if row.metric == "taf_tflops" else ""
    if row.metric in ("images_per_s", "tokens_per_s", "samples_per_s"):
        kind = _KINDS.get(row.experiment, "")
        if kind == EAGER_STEP and row.params.get("mode") == "graph":
            kind = TRAINING_STEP
    of_model = row.predicted if stored is None or stored.ceiling is None else stored.ceiling
    if not kind or of_model is None:
        return None
    name = row.dtype if kind == EAGER_STEP else ""
    return Point(kind, name, Work(of_model, 1.0, 0.0), row, (row.experiment, row.variant))


def _predicted_in_book(point: Point) -> bool:
    """Return True if an experiment predicts this row.

    The finalists of the search for the fastest matrix product have no prediction.
    """
    return point.row.variant != "finalist" and (point.row.predicted is not None)


def _fit(kind: str, points: Sequence[Point]) -> tuple[float, float, float]:
    if kind == REFERENCE_STEP:  # this step model already includes the overheads, so only its spread is fitted
        return 0.0, 1.0, 0.0
    if kind in _SHARES:
        # The median share is robust against a single model that is far from its ceiling.
        return 0.0, statistics.median(point.seconds for point in points), 0.0
    return fit_times([(point.work, point.seconds) for point in points])


def _held_out_errors(kind: str, points: Sequence[Point]) -> list[float]:
    return [s.error for s in _held_out(kind, points, 0.0)]


def _held_out(kind: str, points: Sequence[Point], spread: float) -> list[Scored]:
    """Predict the points of each group from a curve fitted to the other groups. A single group gives no predictions."""
    scored = []
    for group, same in _grouped(points, lambda point: point.group).items():
        others = [point for point in points if point.group != group]
        if others:
            curve = Curve("", kind, "", *_fit(kind, others), spread, len(others), "")
            scored += [Scored(point, curve.rate(point.work), spread, "the other sizes or models of the run") for point in same]
    return scored


def _score_held_out(reference: Reference, known: dict[tuple[str, str, str], Curve]) -> list[Scored]:
    scored: list[Scored] = []
    arch = reference.device.arch
    for (kind, name), same in _grouped(points_of(reference), lambda point: (point.kind, point.name)).items():
        if _run_of(known[arch, kind, name]) != reference.name:
            continue
        spread = known[arch, kind, name].spread
        own = [(point, _own_curve(reference, point)) for point in same if _predicted_in_book(point)]
        later = [(point, curve) for point, curve in own if curve is not None]
        scored += [
            Scored(point, curve.rate(point.work), known[arch, curve.kind, ""].spread, "the run's own rows of chapter 1.1")
            for point, curve in later
        ]
        done = {point.row.key for point, _ in later}
        scored += [s for s in _held_out(kind, same, spread) if s.point.row.key not in done and _predicted_in_book(s.point)]
    return scored


def _own_curve(reference: Reference, point: Point) -> Curve | None:
    """Return the curve that predicts a rate of a chapter after 1.1, or None if no such curve predicts it.

    It is fitted to the rates measured in chapter 1.1 of the same run.
    """
    if point.row.experiment in ("best_products", "operand_data"):
        return own_product_curve(reference.rows, reference.device, point.row.dtype)
    if point.row.experiment == "stream_formats":
        return own_stream_curve(reference.rows, point.row.variant)
    return None


def _errors_of_own_curves(reference: Reference, points: Sequence[Point]) -> dict[str, list[float]]:
    errors: dict[str, list[float]] = defaultdict(list)
    for point in points:
        curve = _own_curve(reference, point) if _predicted_in_book(point) else None
        if curve is not None:
            kind = {PRODUCT: OWN_PRODUCT, STREAM: OWN_STREAM}[point.kind]
            errors[kind].append(curve.rate(point.work) / not_none(point.row.value) - 1)
    return errors


def _spread(errors: Sequence[float]) -> float:
    """Return the spread that covers the share `_COVERED` of the predictions' relative errors."""
    if not errors:
        return _SPREAD_OF_ONE_ROW
    # A rate that is too low by a factor counts like one that is too high by the same factor.
    factors = [max(1 + error, 1 / (1 + error)) for error in errors]
    quantile = float(np.quantile(factors, _COVERED, method="higher"))
    return math.ceil(1e4 * (quantile - 1)) / 1e4  # rounded up, so that the stored value still covers the row at the quantile


def _statistics(scored: Sequence[Scored]) -> str:
    errors = [100 * s.error for s in scored]
    return (
        f"{len(scored)} | {100 * median_error(scored):.1f} % | {signed_number(statistics.median(errors), 1)} % | "
        f"{signed_number(max(errors, key=abs), 0)} % | {100 * coverage(scored):.0f} %"
    )


def _run_of(curve: Curve) -> str:
    return curve.source.split(" ")[0]


def _model_of(curve: Curve) -> str:
    return curve.source.partition("(")[2].partition(",")[0]


def _title(point: Point) -> str:
    return f"`{point.row.metric}` of `{point.row.experiment}`"


def write_curves(runs: Iterable[Path]) -> tuple[Path, int]:
    """Fit the curves to the runs in these folders, and write efficiency.toml. Return its path and the number of curves."""
    curves = first_fits([Reference.open(folder) for folder in runs])
    write_atomically(CURVES_FILE, curves_to_toml(curves).encode())
    return CURVES_FILE, len(curves)


def score_page(references: Sequence[Reference]) -> str:
    """Return the content of docs/predictions.md, which shows the errors of the predictions.

    Devices of another model than those of the curves, other devices of the same model, and the runs that the curves were fitted
    to are shown separately.
    """
    curves = read_curves()
    # The curves of repeated streams were fitted again later, so the stored predictions are of the model of the other curves.
    models = {_model_of(curve) for curve in curves if curve.kind not in (EAGER_STEP, REPEATED)}
    eager_models = {_model_of(curve) for curve in curves if curve.kind == EAGER_STEP}
    runs = {_run_of(curve) for curve in curves}
    another: list[Scored] = []
    same: list[Scored] = []
    for reference in references:
        scored = score_stored(reference)
        by_curves = score_unseen([], [reference], curves) if reference.name not in runs else []
        scored += [s for s in by_curves if s.point.kind != EAGER_STEP and not reference.predictions]
        (same if reference.device.name in models else another).extend(scored)
        # The stored predictions of eager steps are older than the curves of eager steps, so both are shown.
        eager = [s for s in by_curves if s.point.kind == EAGER_STEP]
        (same if reference.device.name in eager_models else another).extend(eager)
    held_out = score_unseen([reference for reference in references if reference.name in runs], [], curves)
    parts = [_HEADER]
    for title, scored in (
        ("Devices of another model than those of the curves", another),
        ("Other devices of the same model", same),
    ):
        parts += [f"## {title}\n\n{page(scored)}"] if scored else []
    if held_out:
        parts.append(f"## Rows that were held out from the fit\n\n{_HELD_OUT}\n\n{page(held_out)}")
    # The intervals are made from the rows that were held out, so these do not test them.
    tested = [*another, *same]
    if tested:
        errors = f"median error {100 * median_error(tested):.1f} %, {100 * coverage(tested):.0f} % in the interval"
        parts.append(f"All {len(tested)} rates of other devices: {errors}.\n")
    return "\n".join(parts)


def _grouped(items: Iterable, key: Callable) -> dict:
    found: dict = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found
