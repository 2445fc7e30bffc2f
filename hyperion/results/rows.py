"""Result rows. A row holds one value with its statistics, its limit and its check. Rows are stored as CSV."""

import csv
import functools
import io
import json
import math
import numbers
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from hyperion.errors import HyperionError, is_finite_number, nearest_first
from hyperion.forms import read_form
from hyperion.results.metrics import BUILT_IN, Metric, metric_named, require_one_definition
from hyperion.untrusted import parse_json

SCHEMA_VERSION = 1
# Prefix of `value_reason` if the value was measured and refused.
UNEXPECTED = "unexpected: "
# Prefix of `value_reason` if the data did not fit into memory.
OUT_OF_MEMORY = "out of memory: "


class RowError(HyperionError):
    """Raised if a row breaks the rules of its metric."""


Value = TypeVar("Value")


def idle_rows(rows: "list[Row]") -> "list[Row]":
    """Return the rows that were measured while no other process used the CPU cores. Return all rows if no such row exists."""
    # On a busy machine, there may be no such row. Its rows are still better than none.
    return [row for row in rows if not row.busy] or rows


def require_file_names(notebook: str, experiment: str) -> None:
    """Raise an error if the name of a notebook or an experiment cannot be part of the file name "notebook.experiment.parquet".

    Raises:
        RowError: a name contains a character such as "/", begins with a dot, or is longer than 80 characters; or the name of
            the experiment contains a dot, so that two different pairs of names could give the same file name.
    """
    for name, text in (("notebook", notebook), ("experiment", experiment)):
        if not _FILE_NAMES[name].fullmatch(text):
            raise RowError(
                f"{name} is {text!r:.100}, which cannot be a part of a file's name",
                where=f"{notebook!r:.100} / {experiment!r:.100}",
                next_step="use letters, digits, '_', '-' and spaces, 80 at most",
            )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured, counted or computed value with its limit, its statistics, its check and the state of the device.

    Args:
        notebook: file name of the notebook that produced the value, without ".ipynb".
        experiment, variant: the experiment that produced the value, and its variant.
        metric: name of a built-in or registered metric.
        value: the value in the unit of the metric. None if there is no value; `value_reason` must then state why.
        dtype: number format of the arithmetic; "" if the value does not depend on one.
        params: shapes, batch size, world size, epoch and other JSON values that distinguish this row from other rows.
        rank: the rank that measured the value. None for a value of the whole run.
        value_reason: why there is no value, for example because the device does not support the operation. "" if there is one.
        n: number of samples of the value.
        ci_low, ci_high: ends of the 95 % confidence interval of the value.
        predicted: the library's estimate of the value, stored before the first sample.
        limit: physical or information-theoretic bound on the value.
        limit_source: source of the limit, or the reason why there is no limit.
        check: name of the check, which says what was verified.
        check_error, check_tolerance: error that the check found, and the largest error that it allows.
        data_source: source of the data: mirror, cache, download or synthetic; "" if no data set is used.
        clock_mhz, power_w, throttle: state of the device while the samples were taken. None if it cannot be read.
        host_load, host_steal: shares (0 to 1) of the CPUs of the host that other processes and other virtual machines used
            while the samples were taken. None if they are unknown (see `OtherLoad.shares`), in ranks, and in runs of earlier
            versions.
        own_metric: definition of the metric in the run from which the row was read. None for a metric that is built in or
            registered in this process. It is neither a column nor part of the identity of a row.
    """

    notebook: str
    experiment: str
    variant: str
    metric: str
    value: float | None
    dtype: str = ""
    params: dict = field(default_factory=dict)
    rank: int | None = None
    value_reason: str = ""
    n: int | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    predicted: float | None = None
    limit: float | None = None
    limit_source: str = ""
    check: str = ""
    check_error: float | None = None
    check_tolerance: float | None = None
    data_source: str = ""
    clock_mhz: float | None = None
    power_w: float | None = None
    throttle: str | None = None
    host_load: float | None = None
    host_steal: float | None = None
    # Two rows with the same columns are equal, whichever process read them, so the definition is not compared by `==`.
    own_metric: Metric | None = field(default=None, compare=False, repr=False)

    @property
    def definition(self) -> Metric:
        """The definition of the metric.

        A built-in definition has priority, then the definition in the run of the row, then the one registered in this process.

        Raises:
            HyperionError: the metric is unknown.
        """
        own = self.own_metric
        # A foreign run cannot redefine a built-in metric.
        if self.metric not in BUILT_IN and own is not None and own.name == self.metric:
            return own
        return metric_named(self.metric)

    @property
    def unit(self) -> str:
        """The unit of the value, the limit, the prediction and the interval."""
        return self.definition.unit

    @property
    def key(self) -> tuple:
        """The columns that identify the row within its run."""
        return (self.notebook, self.experiment, self.variant, self.dtype, _json(self.params), self.rank, self.metric)

    @property
    def busy(self) -> bool:
        """True if other processes used the cores while the row was measured on a CPU. The measured times are then too long."""
        # Several reasons for throttling are stored as one string, joined by "+".
        return "busy" in (self.throttle or "").split("+")

    @property
    def hot(self) -> bool:
        """True if the caches were hot. Such a value is shown, but not used as a measured ceiling of the device."""
        return self.params.get("cache") == "hot"

    @property
    def fraction_of_limit(self) -> float | None:
        """The value as a fraction of its limit, at most 1.

        It is value / limit if higher is better, and limit / value if lower is better. None if there is no value or no limit.
        """
        direction = self.definition.direction
        if self.value is None or self.limit is None or direction == "none":
            return None
        best, other = (self.limit, self.value) if direction == "higher" else (self.value, self.limit)
        return other / best if best else None

    @property
    def is_unexpected(self) -> bool:
        """True if the value was refused because it failed its check, was beyond its limit or was not finite."""
        return self.value is None and self.value_reason.startswith(UNEXPECTED)

    def without_failed_value(self) -> "Row":
        """Return this row, with the value removed if it failed its check, is beyond its limit or is not finite.

        A wrong number is never stored as a value. Instead, `value_reason` contains the number with the error and the tolerance.

        Raises:
            RowError: the row breaks another rule of its metric, which is an error in the code and not in the measurement.
        """
        self._require_numbers()
        failure = self._failure()
        if not failure or self.value is None:
            return self
        # A check may return an error of NaN or infinity, which a valid row cannot contain. It is replaced by None.
        known_error = self.check_error is None or math.isfinite(self.check_error)
        # A value that is not finite also breaks the rules of the form, so the form is checked only for finite values.
        if math.isfinite(self.value) and known_error:
            self._validate_form()
        return replace(
            self,
            value=None,
            value_reason=f"{UNEXPECTED}{self.value:.6g} {self.unit} {failure}",
            n=None,
            ci_low=None,
            ci_high=None,
            check_error=self.check_error if known_error else None,
        )

    def validate(self) -> None:
        """Check that the row follows the rules of its metric.

        Raises:
            RowError: a rule is broken. The message names the row, the rule and the next step.
        """
        self._validate_form()
        failure = self._failure()
        text = f"{failure}; its value is {self.value:.6g} {self.unit}" if failure else ""
        self._demand(not failure, text, "the output or the clock is wrong: find the cause before measuring again")

    def _validate_form(self) -> None:
        """Check all rules except the rules that depend on the measured number."""
        metric = self.definition
        for name in ("notebook", "experiment", "variant"):
            self._demand(bool(getattr(self, name)), f"{name} is empty", "state the origin of the value")
        self._demand(isinstance(self.params, dict), f"has params that are not a JSON object: {self.params!r:.60}", "use a dict")
        for name in _TEXTS:
            text = getattr(self, name)
            self._demand(
                isinstance(text, str),
                f"{name} is {text!r}, which is not a text",
                'use a text such as "bf16", or "" if there is none',
            )
        require_file_names(self.notebook, self.experiment)
        self._require_numbers()
        for column in _FLOATS:
            number = getattr(self, column)
            self._demand(
                number is None or is_finite_number(number),
                f"{column} is {number!r:.40}, which is not a finite number",
                "store null and the reason why there is no number",
            )
        for column in _INTEGERS:
            number = getattr(self, column)
            known = number is None or 0 <= number < _MOST_COUNTED
            self._demand(
                known, f"{column} is {number!r:.40}, which is not a count", "store a count, or null if there is no count"
            )
        for column in ("clock_mhz", "power_w"):
            reading = getattr(self, column)
            text = f"{column} is {reading:g}" if reading is not None else ""
            self._demand(reading is None or reading > 0, text, "store null for an unreadable value, never 0")
            self._demand(reading is None or reading < _MOST_READING, text, "clocks are in MHz (not kHz), power in watts")
        for column in ("host_load", "host_steal"):
            share = getattr(self, column)
            self._demand(share is None or 0 <= share <= 1, f"{column} is {share!r:.40}", "store a share from 0 to 1, or null")
        # Params must survive a round trip through JSON. A tuple, for example, would become a list.
        self._demand(
            _is_json(self.params),
            f"has params that are not a JSON object: {self.params!r:.200}",
            "use numbers, texts and lists; JSON has no tuples",
        )
        self._demand(_is_bounded(self.params), "has params beyond the range of a float", "store other numbers")
        if self.value is None:
            self._demand(bool(self.value_reason), "value is null without a reason", "give value_reason")
            return
        self._demand(not self.value_reason, "has both a value and a reason why there is no value", "remove one of them")
        if metric.needs_limit:
            self._demand(bool(self.limit_source), "has neither a limit nor the reason why there is no limit", "fill limit_source")
        if metric.needs_interval:
            known = None not in (self.n, self.ci_low, self.ci_high)
            self._demand(known, "lacks n or the 95 % confidence interval", "measure at least 30 samples")
        if self.ci_low is not None and self.ci_high is not None:
            inside = self.ci_low <= self.value <= self.ci_high
            self._demand(inside, "lies outside its own interval", "recompute the confidence interval")
        self._demand((self.ci_low is None) == (self.ci_high is None), "has an interval with one end", "store both ends")
        if metric.needs_check:
            self._demand(bool(self.check), "lacks its check", "verify the output and name the check")
        if self.check:
            known = None not in (self.check_error, self.check_tolerance)
            self._demand(known, f"check {self.check!r} lacks its error or tolerance", "record the error and the tolerance")

    def _require_numbers(self) -> None:
        # Other objects, such as tensors, would be written as text that cannot be read as a number.
        for columns, kind, name in ((_FLOATS, numbers.Real, "number"), (_INTEGERS, numbers.Integral, "whole number")):
            for column in columns:
                number = getattr(self, column)
                if number is not None and (not isinstance(number, kind) or isinstance(number, bool)):
                    what = f"{column} is {number!r:.40} of type {type(number).__name__}, which is not a {name}"
                    self._demand(False, what, "store a Python number, such as loss.item() of a tensor")

    def _failure(self) -> str:
        """Return the reason why the measured value is not valid, as the end of a sentence, or "" if it is valid."""
        if self.value is None:
            return ""
        if not math.isfinite(self.value):
            return "is not finite"
        error, tolerance = self.check_error, self.check_tolerance
        if self.check and error is not None and tolerance is not None and not error <= tolerance:  # NaN fails, too
            return f"failed its check {self.check!r}: error {error:.4g} above tolerance {tolerance:.4g}"
        direction = self.definition.direction
        if self.limit is None or direction == "none":
            return ""
        beyond = self.value > self.limit if direction == "higher" else self.value < self.limit
        return f"lies beyond its limit {self.limit:.6g} ({self.limit_source})" if beyond else ""

    def _demand(self, condition: bool, fault: str, next_step: str) -> None:
        if not condition:
            where = f"{self.notebook} / {self.experiment} / {self.variant} {self.dtype} {self.params}".strip()
            raise RowError(f"row of {self.metric} {fault}", where=where, next_step=next_step)


def make_row(known_dtypes: Collection[str], **columns: Any) -> Row:
    """Return a new row with the given columns. Rows that are read from a file are not made here.

    Args:
        known_dtypes: accepted names of number formats, besides "".
        columns: columns of the row, as for `Row`.

    Raises:
        RowError: rows do not have one of the columns, or the dtype is unknown.
    """
    known = [column.name for column in fields(Row)]
    where = " / ".join(str(columns.get(name)) for name in ("notebook", "experiment", "variant"))
    where += f": row of {columns['metric']}"
    for name in columns:
        if name not in known:
            raise RowError(
                f"rows have no column {name!r}",
                where=where,
                next_step=f"state it in params, as params={{{name!r}: …}}, or use one of the columns {', '.join(known)}",
            )
    dtype = columns.get("dtype", "")
    if dtype not in ("", *known_dtypes):
        raise RowError(
            f"dtype is {dtype!r}, which is no known number format",
            where=where,
            next_step=f"use one of {nearest_first(str(dtype), known_dtypes)}; state another format in params and omit dtype",
        )
    return Row(**columns)


_TEXTS = ("notebook", "experiment", "variant", "dtype", "metric", "value_reason", "limit_source", "check", "data_source")
_FLOATS = (
    *("value", "ci_low", "ci_high", "predicted", "limit", "check_error", "check_tolerance"),
    *("clock_mhz", "power_w", "host_load", "host_steal"),
)
_INTEGERS = ("rank", "n")
# Only the name of a notebook may contain dots, so the last dot of "notebook.experiment" separates the two names.
_FILE_NAMES = {"notebook": re.compile(r"\w[\w .+-]{0,79}"), "experiment": re.compile(r"\w[\w +-]{0,79}")}
# Counts must fit into a signed 64-bit integer, the type of the columns in Parquet and pandas.
_MOST_COUNTED = 2**63
# This bound is above every clock in MHz and every power in W, and below every clock in kHz and every power in mW.
_MOST_READING = 20_000
# Order of the columns in the file: origin, value, statistics, limit and check, circumstances.
COLUMNS = (
    "notebook",
    "experiment",
    "variant",
    "dtype",
    "params",
    "rank",
    "metric",
    "value",
    "unit",
    "value_reason",
    "n",
    "ci_low",
    "ci_high",
    "predicted",
    "limit",
    "limit_source",
    "check",
    "check_error",
    "check_tolerance",
    "data_source",
    "clock_mhz",
    "power_w",
    "throttle",
    "host_load",
    "host_steal",
)
# Columns at the end of `COLUMNS` that earlier versions did not have.
NEW_COLUMNS = 2
# Positions of the three cells that `_parse` needs before it can build the row.
_METRIC_CELLS = tuple(map(COLUMNS.index, ("notebook", "experiment", "metric")))


def rows_to_csv(rows: Iterable[Row]) -> str:
    """Return the rows as CSV. Floats are written with `repr`, so that reading them returns exactly the same numbers."""
    return "".join([_line(COLUMNS), *(_line([_cell(getattr(row, column)) for column in COLUMNS]) for row in rows)])


def _line(cells: Iterable[str]) -> str:
    # The writer must use its default line ending "\r\n", because it then quotes a single "\r" inside a cell. On disk, lines end
    # with "\n".
    text = io.StringIO()
    csv.writer(text).writerow(cells)
    return text.getvalue().removesuffix("\r\n") + "\n"


OwnMetrics = Mapping[str, Iterable[Metric]]


def own_metrics(rows: Iterable[Row]) -> dict[str, list[Metric]]:
    """Return the definitions of the metrics that the rows use and that are not built into the library.

    Returns:
        A dict that maps "notebook/experiment" to the metrics of this experiment.

    Raises:
        HyperionError: two rows of an experiment have a metric of the same name with different definitions.
    """
    found: dict[str, list[Metric]] = {}
    for row in rows:
        if row.metric not in BUILT_IN:
            found.setdefault(f"{row.notebook}/{row.experiment}", []).append(row.definition)
    unique = {name: require_one_definition(metrics, where=f"rows of {name}") for name, metrics in found.items()}
    return {name: [metrics[metric] for metric in sorted(metrics)] for name, metrics in unique.items()}


def own_metrics_to_json(metrics: OwnMetrics) -> dict[str, list[dict]]:
    """Return metric definitions as JSON values, which `own_metrics_from_json` reads."""
    return {name: [asdict(metric) for metric in of_experiment] for name, of_experiment in metrics.items()}


def own_metrics_from_json(document: object, where: object) -> dict[str, list[Metric]]:
    """Return a dict that maps "notebook/experiment" to the definitions that `own_metrics_to_json` wrote for this experiment.

    Args:
        document: the parsed JSON document.
        where: name of the file for error messages.

    Raises:
        HyperionError: the document does not have the expected form, defines a metric of an experiment twice, or redefines a
            built-in metric.
    """
    try:
        metrics = read_form(dict[str, list[Metric]], document, "metrics")
        for name, of_experiment in metrics.items():
            if len(require_one_definition(of_experiment, where)) < len(of_experiment):
                raise RowError(f"metrics.{name} defines a metric twice")
    except HyperionError as error:
        remedy = "restore the file from where it was copied, or read it with the version of Hyperion that wrote it"
        raise RowError(error.what, where=where, next_step=remedy) from error
    return metrics


def rows_from_csv(
    text: str, where: object = "rows.csv", *, validated: bool = True, metrics: OwnMetrics | None = None
) -> list[Row]:
    """Return the rows in a CSV text.

    Args:
        text: the CSV text.
        where: name of the file for error messages.
        validated: if True, check the rules of each row's metric. Use False for rows from a worker, because one failed check must
            not discard the other rows. `Run.record` validates the rows that it stores.
        metrics: definitions of metrics that are not built in, as `own_metrics` returns them. None uses the metrics that this
            process registered.

    Raises:
        RowError: the header is not the expected one, a cell is missing, a number is invalid, a metric is unknown, a unit is
            wrong, or a row breaks a rule.
    """
    # A frozenset, because `functools.lru_cache` needs hashable arguments.
    known = None if metrics is None else frozenset((name, metric) for name in metrics for metric in metrics[name])
    return list(_parsed(text, str(where), validated, known))


@functools.lru_cache(maxsize=4)
def _parsed(text: str, where: str, validated: bool, metrics: frozenset[tuple[str, Metric]] | None) -> tuple[Row, ...]:
    # The result is cached per text, because one command may read the same rows a hundred times. Rows are immutable.
    reader = csv.reader(io.StringIO(text), strict=True)
    own = None if metrics is None else {(name, metric.name): metric for name, metric in metrics}
    rows: list[Row] = []
    try:
        header = next(reader, None)
        added = [""] * (NEW_COLUMNS if header == list(COLUMNS[:-NEW_COLUMNS]) else 0)
        if header != list(COLUMNS) and not added:
            remedy = "read it with the version of Hyperion that wrote it, or run again"
            fault = f"header is not that of schema {SCHEMA_VERSION}: {header!r:.200}"
            raise RowError(fault, where=where, next_step=remedy)
        for number, cells in enumerate(reader, 1):
            rows.append(_parse(cells + added, f"{where}, row {number}", validated, own))
    except csv.Error as error:
        fault = f"invalid CSV after row {len(rows)}: {error}"
        raise RowError(fault, where=where, next_step="run the experiment again") from error
    # If two rows had the same key, a lookup by key would not find one of them.
    places: dict[tuple, int] = {}
    for number, row in enumerate(rows, 1):
        if (first := places.setdefault(row.key, number)) != number:
            raise RowError(f"rows {first} and {number} have the same key", where=where, next_step="run the experiment again")
    return tuple(rows)


def _parse(cells: list[str], where: str, validated: bool, own: dict[tuple[str, str], Metric] | None) -> Row:
    if len(cells) != len(COLUMNS):
        raise RowError(f"{len(cells)} cells instead of {len(COLUMNS)}", where=where, next_step="run the experiment again")
    notebook, experiment, metric = (cells[place] for place in _METRIC_CELLS)
    definition = None
    if own is not None and metric not in BUILT_IN:
        definition = own.get((f"{notebook}/{experiment}", metric))
        if definition is None:
            remedy = "restore the run from where it was copied, or measure the experiment again"
            raise RowError(f"unknown metric {metric!r:.100}: the run does not define it", where=where, next_step=remedy)
    try:
        row, unit = _row_and_unit(tuple(cells), validated, definition)
    except ValueError as error:
        raise RowError(f"unreadable cell: {error}", where=where, next_step="run the experiment again") from error
    if unit != row.unit:
        fault = f"the unit is {unit!r}, but the unit of {row.metric} is {row.unit!r}"
        raise RowError(fault, where=where, next_step="run the experiment again")
    return row


@functools.lru_cache(maxsize=8192)
def _row_and_unit(cells: tuple[str, ...], validated: bool, definition: Metric | None) -> tuple[Row, str]:
    # The result is cached per line, because recording an experiment leaves most lines of the file unchanged.
    named = dict(zip(COLUMNS, cells, strict=True))
    unit = named.pop("unit")
    columns: dict[str, Any] = {name: _typed(name, text) for name, text in named.items()}
    row = Row(**columns, own_metric=definition)
    if validated:
        row.validate()
    return row, unit


def _typed(name: str, text: str):
    if name in _FLOATS:
        return float(text) if text else None
    if name in _INTEGERS:
        return int(text) if text else None
    if name == "params":
        params = parse_json(text, RowError, "run the experiment again", where="params")
        if not isinstance(params, dict):
            raise ValueError(f"params is not a JSON object: {text!r}")
        return params
    if name == "throttle":
        return text or None
    return text


def _cell(value) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return _json(value)
    # Convert to `float` first, because the `repr` of a NumPy scalar is "np.float64(…)", and its text may have fewer digits.
    return repr(float(value)) if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral) else str(value)


def _is_json(params: dict) -> bool:
    try:
        return json.loads(_json(params)) == params
    except (TypeError, ValueError, RecursionError):
        return False


def _is_bounded(value) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_bounded, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int | float) or abs(value) <= sys.float_info.max


def canonical_params(params: dict) -> str:
    """Return params as a JSON string that does not depend on the order of the keys."""
    return json.dumps(params, sort_keys=True)


def _json(params: dict) -> str:
    # NaN and Infinity are not JSON, and other readers reject them.
    return json.dumps(params, sort_keys=True, allow_nan=False)
