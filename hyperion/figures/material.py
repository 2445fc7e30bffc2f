"""What every figure and page is made from: the rows, samples and predictions of one run, and the machine's name."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ParamSpec, TypeVar

import pandas as pd

from hyperion.errors import HyperionError, not_none
from hyperion.figures.machines import machine_name, replayed_from
from hyperion.results import Prediction, Row, Run

Parameters = ParamSpec("Parameters")
Made = TypeVar("Made")


def made_from_rows(what: str) -> Callable[[Callable[Parameters, Made]], Callable[Parameters, Made]]:
    """Decorate a function that makes a table or a picture from rows: rows that it cannot use are an error in words.

    The rows of a run keep the rules of their metrics, but a run of somebody else may lack any parameter that a table or a
    picture of its experiment is made from, or have it in another type.

    Args:
        what: what the function makes, as the beginning of a sentence.

    Raises:
        HyperionError: by the decorated function, instead of any other exception; that one is its cause.
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
    """Rows whose columns have the wanted values, `select(rows, metric="accuracy", dtype="bf16")`."""
    return [row for row in rows if all(getattr(row, column) == value for column, value in wanted.items())]


def measured(rows: Iterable[Row]) -> list[Row]:
    """Rows that have a value."""
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
        """Figures drawn so far by name (hyperion.book.outline.picture)."""
        return {}

    @property
    def replayed(self) -> list[str]:
        """Reference machines that experiments of this run were replayed from."""
        return sorted({replayed_from(self.run, *pair) for pair in self.experiments} - {""})

    @property
    def data_sources(self) -> list[str]:
        return sorted({row.data_source for row in self.rows} - {""})

    def of(self, experiment: str, **wanted) -> list[Row]:
        """Rows of an experiment, whichever notebook ran it."""
        return select(self.rows, experiment=experiment, **wanted)

    def samples(self, experiment: str) -> pd.DataFrame:
        """Raw samples of an experiment, empty when it has not run."""
        frames = [self.run.samples(*pair) for pair in self.experiments if pair[1] == experiment]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def machine(self, experiment: str) -> str:
        """Name for titles of the machine that an experiment of this run was measured on."""
        return next(machine_name(self.run, *pair) for pair in self.experiments if pair[1] == experiment)
