"""The data of figures and pages: rows, samples and predictions of one run, and the name of its machine."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ParamSpec, TypeVar

import pandas as pd

from hyperion.errors import HyperionError, not_none
from hyperion.results import Prediction, Row, Run

Parameters = ParamSpec("Parameters")
Made = TypeVar("Made")

_REPLAY = "replay:"


def made_from_rows(what: str) -> Callable[[Callable[Parameters, Made]], Callable[Parameters, Made]]:
    """Decorate a function that makes a table or a figure, so that unusable rows raise a HyperionError.

    Stored rows obey the rules of their metrics. Nothing checks their parameters: in a run from elsewhere one may be missing or
    of another type.

    Args:
        what: what the function makes, the subject of the error message.

    Raises:
        HyperionError: instead of any other exception of the decorated function, which is its cause.
    """

    def decorated(function: Callable[Parameters, Made]) -> Callable[Parameters, Made]:
        @functools.wraps(function)
        def make(*args: Parameters.args, **named: Parameters.kwargs) -> Made:
            try:
                return function(*args, **named)
            except HyperionError:
                raise
            except Exception as error:
                raise HyperionError(
                    f"{what} cannot be made from these rows: {type(error).__name__}: {str(error)[:200]}",
                    next_step="check the run with `hyperion verify`; if it finds nothing wrong, report this with the run",
                ) from error

        return make

    return decorated


def select(rows: Iterable[Row], **wanted) -> list[Row]:
    """Return the rows whose columns have the wanted values: `select(rows, metric="accuracy", dtype="bf16")`."""
    return [row for row in rows if all(getattr(row, column) == value for column, value in wanted.items())]


def measured(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that have a value; `values` returns the values."""
    return [row for row in rows if row.value is not None]


def values(rows: Iterable[Row]) -> list[float]:
    """Return the values of measured rows.

    Raises:
        ValueError: a row has no value.
    """
    return [not_none(row.value) for row in rows]


@dataclass(frozen=True)
class Material:
    """Verified rows, samples and predictions of a run, read once.

    Args:
        run: the run; a damaged file in it raises StoreError on first use.
    """

    run: Run

    @cached_property
    def rows(self) -> list[Row]:
        return self.run.rows()

    @cached_property
    def predictions(self) -> list[Prediction]:
        return self.run.predictions()

    @cached_property
    def information(self) -> dict:
        return self.run.information()

    @cached_property
    def environments(self) -> dict[str, dict]:
        return self.run.environments()

    @cached_property
    def experiments(self) -> list[tuple[str, str]]:
        """(notebook, experiment) pairs in the order of the rows."""
        return list(dict.fromkeys((row.notebook, row.experiment) for row in self.rows))

    @cached_property
    def drawn(self) -> dict[str, bytes | None]:
        """PNG of the figures drawn so far by name, a cache of hyperion.book.outline.picture."""
        return {}

    @property
    def replayed(self) -> list[str]:
        """Names of the reference machines that experiments of this run were replayed from."""
        return sorted({replayed_from(self.run, *pair) for pair in self.experiments} - {""})

    @property
    def data_sources(self) -> list[str]:
        return sorted({row.data_source for row in self.rows} - {""})

    def of(self, experiment: str, **wanted) -> list[Row]:
        """Return the rows of an experiment, of any notebook."""
        return select(self.rows, experiment=experiment, **wanted)

    def samples(self, experiment: str) -> pd.DataFrame:
        """Return the raw samples of an experiment, empty when it has not run."""
        frames = [self.run.samples(*pair) for pair in self.experiments if pair[1] == experiment]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def machine(self, experiment: str) -> str:
        """Return the name, for titles, of the machine that an experiment of this run was measured on."""
        return next(machine_name(self.run, *pair) for pair in self.experiments if pair[1] == experiment)


def device_name(information: dict) -> str:
    """Return the name of the first GPU in run.json, else of the CPU.

    Args:
        information: contents of run.json, with the hardware fingerprint under "environment".
    """
    environment = information.get("environment") or {}
    gpus = environment.get("gpus") or []
    if gpus:
        return gpus[0]["name"]
    cpu = environment.get("cpu")
    return f"{cpu['name']} ({cpu['cores']} cores)" if cpu else "a machine that run.json does not describe"


def replayed_from(run: Run, notebook: str, experiment: str) -> str:
    """Return the reference machine that an experiment of this run was replayed from, "" when it was measured here."""
    finished = run.finished(notebook, experiment)
    digest = finished["input_hash"] if finished else ""
    return digest.removeprefix(_REPLAY).partition(":")[0] if digest.startswith(_REPLAY) else ""


def machine_name(run: Run, notebook: str, experiment: str) -> str:
    """Return the device that the experiment ran on, or the reference machine followed by "(replay)", for titles."""
    reference = replayed_from(run, notebook, experiment)
    return f"{reference} (replay)" if reference else device_name(run.information())
