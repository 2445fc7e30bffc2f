"""Interface of experiments. An experiment receives a context and typed options, and returns forecasts, rows and samples."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hyperion.errors import HyperionError, not_none
from hyperion.hardware import ROW_DTYPES, Device
from hyperion.processes.this_rank import world
from hyperion.results import Estimate, Row
from hyperion.results.rows import idle_rows, make_row

# Function that an experiment calls with (done, total, note) to show its progress.
Report = Callable[[int, int, str], object]


@dataclass(frozen=True, kw_only=True)
class Context:
    """All inputs that an experiment may depend on. They are JSON-compatible, so that they can be sent to a worker process.

    Args:
        notebook, experiment: names of the notebook and the experiment, which are part of every row.
        sizes: a dict that maps each option of the experiment to its value in the profile.
        seed: seed of the random generators for inputs, initial weights and shuffling.
        data_source: name of the requested data source. "auto" uses the first source that is available.
        allow_synthetic: whether "auto" may use synthetic data if no real data are available.
        synthetic: sizes of the synthetic data sets: {"lines": {split: n}, "images": {split: n}}.
        workspace: folder for checkpoints, from which a killed experiment can resume.
        upstream: rows of other experiments of this run that this experiment uses, such as measured ceilings.
    """

    notebook: str
    experiment: str
    sizes: dict
    seed: int = 0
    data_source: str = "auto"
    allow_synthetic: bool = True
    synthetic: dict = field(default_factory=dict)
    workspace: Path
    upstream: list[Row] = field(default_factory=list, repr=False)

    @property
    def device(self) -> Device:
        """Device of this process. On a rank of a process group it is the rank's device, otherwise the first device."""
        return world().device

    def row(self, variant: str, metric: str, value: float | Estimate | None, **columns: Any) -> Row:
        """Return a row of this experiment.

        Args:
            variant, metric: variant of the experiment, and name of the metric.
            value: value of the row. With an `Estimate`, the row also gets its number of samples and its interval. None for a row
                without a value.
            columns: additional columns of the row, as for `hyperion.results.Row`.

        Raises:
            RowError: rows do not have one of the columns, or the dtype is not in `hyperion.hardware.ROW_DTYPES`.
        """
        if isinstance(value, Estimate):
            columns = value.columns | columns
            value = value.value
        place = {"notebook": self.notebook, "experiment": self.experiment, "variant": variant, "metric": metric}
        return make_row(ROW_DTYPES, **place, value=value, **columns)

    def absent_row(self, variant: str, metric: str, reason: str, **columns: Any) -> Row:
        """Return a row without a value. `reason` states why nothing was measured."""
        return self.row(variant, metric, None, value_reason=reason, **columns)

    def error_row(self, variant: str, metric: str, error: float, check: str, tolerance: float, **columns: Any) -> Row:
        """Return a row whose value is an error that must not exceed a tolerance. `check` states what was compared."""
        columns |= {"check": check, "check_error": error, "check_tolerance": tolerance}
        return self.row(variant, metric, error, **columns)

    def best_gemm(self, dtype: str) -> Row | None:
        """Return the row of the fastest matrix product with a dtype among the rows in `upstream`, or None if there is none.

        Rows measured with warm caches are ignored. Rows measured while other processes used the CPU cores are used only if there
        are no others.
        """
        rows = [row for row in self.upstream if (row.metric, row.dtype, row.hot) == ("gemm_tflops", dtype, False)]
        known = [row for row in rows if row.value is not None]
        return max(idle_rows(known), key=lambda row: not_none(row.value), default=None)


# In strict mode, pydantic does not accept "8" or 8.0 for the integer 8.
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


class Table(BaseModel):
    """Base class of an option that is itself a table of values, such as the shape of a matrix product.

    A subclass documents each field under "Args".
    """

    model_config = _STRICT


class Options(BaseModel):
    """Base class of an experiment's options.

    A subclass documents each field under "Args". A field has a default only if most profiles use the same value.

    Args:
        timeout_s: time limit in seconds for each process that the experiment starts. A process that runs longer is killed.
    """

    model_config = _STRICT

    timeout_s: float = Field(default=3600.0, gt=0)

    @classmethod
    def of(cls, context: Context) -> Self:
        """Return the options that an experiment receives in its context.

        Raises:
            HyperionError: an option is unknown, missing or invalid. The message names the option.
        """
        return cls.parse(context.sizes, context.experiment)

    @classmethod
    def parse(cls, sizes: dict, experiment: str, profile: str = "") -> Self:
        """Return the options with the values that a profile states.

        Args:
            sizes: a dict that maps each option to its value.
            experiment: name of the experiment, for error messages.
            profile: name of the profile, for error messages; "" if the values come from a call.

        Raises:
            HyperionError: an option is unknown, missing or invalid. The message names the option and its value.
        """
        try:
            # Pass the sizes as JSON: only then does a strict model accept lists for tuples and dicts for nested models.
            return cls.model_validate_json(json.dumps(sizes))
        except ValidationError as error:
            # A misspelt name is an unknown and a missing option. The unknown one shows the mistake.
            first = min(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
            name = ".".join(str(part) for part in first["loc"])
            known = ", ".join(cls.model_fields)
            faults = {"extra_forbidden": "there is no such option", "missing": "it has no value"}
            value = f"; the value is {first['input']!r:.80}" if name else ""  # a check of several options has no single value
            fault = faults.get(first["type"], first["msg"] + value)
            within = f" in the profile {profile!r}" if profile else ""
            raise HyperionError(
                f"option {name!r} of the experiment {experiment!r}{within}: {fault}",
                where="options of the experiment: in sizes.toml of its subject, or in the arguments of the call",
                next_step=f"correct this option; the experiment has the options {known}",
            ) from error


@dataclass(frozen=True)
class Forecast:
    """Prediction of the value of one row, made before the measurement.

    Args:
        variant, metric, dtype, params: columns of the predicted row.
        estimate: predicted value in the unit of the metric, or None if there is no prediction.
        basis: how the prediction was computed, or the reason why there is none.
        each_rank: if True, the prediction is for the rows of single ranks. If False, it is for the row of all ranks.
        ceiling: limit that the value cannot exceed, or None if there is none. It is not a prediction.
        low, high: ends of the prediction's 80 % interval, or None if it has none. Predictions of rates have an interval.
    """

    variant: str
    metric: str
    estimate: float | None
    basis: str
    dtype: str = ""
    params: dict = field(default_factory=dict)
    each_rank: bool = False
    ceiling: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Result:
    """Results of an experiment.

    Args:
        rows: one row for each measured value. They are validated when they are stored.
        samples: raw samples and curves from which the rows were computed; empty if there are none.
        source: data source that the experiment used, or "" if it used no data set.
        replayed_from: reference machine that measured the rows, or "" if this machine measured them.
    """

    rows: list[Row]
    samples: pd.DataFrame = field(default_factory=pd.DataFrame)
    source: str = ""
    replayed_from: str = ""


@dataclass(frozen=True)
class Experiment:
    """One experiment: the functions that predict and run it, and what they depend on.

    Args:
        forecast: function that returns the predictions. The reader is asked to guess the value of the first one.
        run: function that measures and returns a `Result`. It shows its progress by calling report(done, total, note).
        options: subclass of `Options` for the experiment's options, whose values come from profiles. None for an experiment
            without options.
        isolated: if True, the experiment runs in a separate process, so that its peak memory can be measured.
        reads: experiments of the same run whose rows this experiment uses. If those rows change, this experiment runs again.
        forecast_reads: experiments whose rows only `forecast` uses. If those rows change, only `forecast` runs again.
        data: names of the data sets that the experiment loads, as in `hyperion.data.prepare.catalog`.
        stand_in: (variant, metric) of the row that states why nothing was measured, if the notebook also works without values.
            None if it needs values. With this row, a reference run that is older than the experiment can still be replayed.
    """

    forecast: Callable[[Context], list[Forecast]]
    run: Callable[[Context, Report], Result]
    options: type[Options] | None = None
    isolated: bool = False
    reads: tuple[str, ...] = ()
    forecast_reads: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    stand_in: tuple[str, str] | None = None
