"""What an experiment gets, a context and typed options, and what it gives back: forecasts, rows and samples."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hyperion.errors import HyperionError, not_none
from hyperion.hardware import Device
from hyperion.results import Estimate, Row

# Called with (done, total, note) to show an experiment's progress.
Report = Callable[[int, int, str], object]


@dataclass(frozen=True, kw_only=True)
class Context:
    """Everything an experiment may depend on, JSON-able so that it can travel to a worker process.

    Args:
        notebook, experiment: where its rows belong.
        sizes: what the profile says of it.
        seed: seeds inputs, initialisation and shuffling.
        data_source: the source asked for; `auto` takes the first that there is.
        allow_synthetic: whether `auto` may fall back to synthetic data.
        synthetic: sizes of the synthetic sets: {"lines": {split: n}, "images": {split: n}}.
        workspace: folder for checkpoints, so that a killed experiment goes on.
        upstream: rows of this run that the experiment says it reads, for ceilings measured earlier.
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
        """This process's device: on a rank that rank's, else the first one."""
        from hyperion.processes.group import world  # imports torch, which pages made from contexts' rows do not need

        return world().device

    def row(self, variant: str, metric: str, value: float | Estimate | None, **columns) -> Row:
        """Return a row of this experiment. An estimate also gives the number of samples and the interval."""
        if isinstance(value, Estimate):
            columns = {"n": value.n, "ci_low": value.ci_low, "ci_high": value.ci_high} | columns
            value = value.value
        return Row(notebook=self.notebook, experiment=self.experiment, variant=variant, metric=metric, value=value, **columns)

    def absent_row(self, variant: str, metric: str, reason: str, **columns) -> Row:
        """Return a row without value: nothing was measured, for this reason."""
        return self.row(variant, metric, None, value_reason=reason, **columns)

    def error_row(self, variant: str, metric: str, error: float, check: str, tolerance: float, **columns) -> Row:
        """Return a row whose value is an error that must not exceed a tolerance; `check` says what was compared."""
        columns |= {"check": check, "check_error": error, "check_tolerance": tolerance}
        return self.row(variant, metric, error, **columns)

    def best_upstream(self, metric: str, dtype: str) -> Row | None:
        """The largest value of a metric measured earlier in this run, warm caches left out; None when none was."""
        rows = [row for row in self.upstream if (row.metric, row.dtype, row.hot) == (metric, dtype, False)]
        return max((row for row in rows if row.value is not None), key=lambda row: not_none(row.value), default=None)


# Strict: neither "8" nor 8.0 stands for the count 8.
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


class Table(BaseModel):
    """Base of a table inside options, such as one of several shapes. A subclass documents each field under "Args"."""

    model_config = _STRICT


class Options(BaseModel):
    """Base of an experiment's options. A subclass documents each field under "Args" and gives a default only where most
    profiles agree.

    Args:
        timeout_s: seconds after which a process that the experiment starts is killed.
    """

    model_config = _STRICT

    timeout_s: float = Field(default=3600.0, gt=0)

    @classmethod
    def of(cls, context: Context) -> Self:
        """Return the options that an experiment was given.

        Raises:
            HyperionError: an unknown, missing or invalid option, by name.
        """
        return cls.parse(context.sizes, context.experiment)

    @classmethod
    def parse(cls, sizes: dict, experiment: str) -> Self:
        """Return the options in a table of a profile.

        Raises:
            HyperionError: an unknown, missing or invalid option, by name.
        """
        try:
            # By way of JSON: there a strict model takes lists for tuples and tables for nested models.
            return cls.model_validate_json(json.dumps(sizes))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            known = ", ".join(cls.model_fields)
            raise HyperionError(
                f"option {name!r} of the experiment {experiment!r}: {first['msg']}",
                where="sizes of the experiment: sizes.toml of its subject, or the call that gave them",
                next_step=f"correct it; the options are {known}",
            ) from error


@dataclass(frozen=True)
class Forecast:
    """An estimate of one row's value from ceilings and shapes, or None with the reason in `basis`.

    Args:
        each_rank: it foretells what every rank has in a row of its own, not what all have together.
    """

    variant: str
    metric: str
    estimate: float | None
    basis: str
    dtype: str = ""
    params: dict = field(default_factory=dict)
    each_rank: bool = False


@dataclass(frozen=True)
class Result:
    """What an experiment measured.

    Args:
        rows: tidy rows, validated when stored.
        samples: raw samples and curves behind them.
        source: the data source it took, "" where no data set is involved.
        replayed_from: the reference machine it was rebuilt from, "" when it was measured here.
    """

    rows: list[Row]
    samples: pd.DataFrame
    source: str = ""
    replayed_from: str = ""


@dataclass(frozen=True)
class Experiment:
    """One experiment: how it is predicted and how it is run.

    Args:
        forecast: returns the predictions; the reader is asked to guess the first one.
        run: measures, and reports progress to a callable (done, total, note).
        isolated: run it in a separate process, so that its peak memory can be measured.
        reads: experiments of the same run whose rows it uses; when those rows change, it runs again.
        forecast_reads: experiments whose rows only its forecast uses; when those change, only the forecast is repeated.
        options: class of its options, which profiles give; None for an experiment without any.
        data: data sets it loads, by the names of `hyperion.data.prepare.catalog`.
    """

    forecast: Callable[[Context], list[Forecast]]
    run: Callable[[Context, Report], Result]
    options: type[Options] | None = None
    isolated: bool = False
    reads: tuple[str, ...] = ()
    forecast_reads: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
