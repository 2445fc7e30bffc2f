"""What figures and pages are made from: the rows, samples and predictions of a run, the list of figures, numbers as text.

Imports neither torch nor matplotlib: terminal output uses it, too.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import pandas as pd

from hyperion.errors import HyperionError, not_none
from hyperion.results import Prediction, Row, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Parameters = ParamSpec("Parameters")
Made = TypeVar("Made")


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
    return digest.removeprefix("replay:").partition(":")[0] if digest.startswith("replay:") else ""


def machine_name(run: Run, notebook: str, experiment: str) -> str:
    """Return the device that the experiment ran on, or the reference machine followed by "(replay)", for titles."""
    reference = replayed_from(run, notebook, experiment)
    return f"{reference} (replay)" if reference else device_name(run.information())


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


# The experiment of a figure that spans the run.
ALL = "all"


@dataclass(frozen=True)
class Plot:
    """One figure.

    Args:
        name: stem of its file.
        experiment: the experiment it belongs to; `ALL` for one that spans the run.
        caption: what the reader should see in it.
        draw: draw it from a run's rows; return None when the run has nothing for it.
        published: whether `draw` accepts `published=True`, to add another machine's published numbers.
    """

    name: str
    experiment: str
    caption: str
    draw: "Callable[..., Figure | None]"
    published: bool = False


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


def number(value: float | None, digits: int = 4) -> str:
    """Return `value` with `digits` significant digits and thousands separators, "" for None."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits - 2}e}"
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def number_within(value: float | None, low: float | None, high: float | None) -> str:
    """Return `value` to the second digit of its interval's width; further digits are noise."""
    decimals = _decimals(value, low, high)
    return number(value) if value is None or decimals is None else f"{value:,.{decimals}f}"


def interval(value: float | None, low: float | None, high: float | None) -> str:
    """Return a confidence interval as "low – high", with the decimals of `number_within`."""
    if low is None or high is None:
        return ""
    decimals = _decimals(value, low, high)
    if decimals is None:
        return f"{number(low)} – {number(high)}"
    return f"{low:,.{decimals}f} – {high:,.{decimals}f}"


def percent(fraction: float | None, signed: bool = False) -> str:
    """Return a fraction in percent with one decimal, "" for None."""
    if fraction is None:
        return ""
    return f"{100 * fraction:{'+' if signed else ''}.1f}"


def quoted_value(value: float, unit: str) -> str:
    """Return a value with its unit for a sentence; fractions in percent."""
    if unit == "fraction":
        # Below this 0.0 % would be left.
        return f"{percent(value)} %" if value == 0 or abs(value) >= 5e-4 else f"{value:.1e}"
    shown = f"{number(value / 1e6)} M" if abs(value) >= 1e6 else number(value)
    return shown + {"1": "", "perplexity": "", "ratio": " ×"}.get(unit, f" {unit}")


def items(count: float) -> str:
    """Return a count for an axis: "20 M", "1.5 k", "512"."""
    for size, mark in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= size:
            return f"{count / size:g}{mark}"
    return f"{count:g}"


def byte_size(count: float) -> str:
    """Return bytes in the largest binary unit that gives at least 1: "64 B", "4 KiB", "1.5 GiB"."""
    for size, mark in ((2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB")):
        if count >= size:
            return f"{count / size:.3g}{mark}"
    return f"{count:.4g} B"


def memory_unit(gib: list[float]) -> tuple[float, str]:
    """Return (units in a GiB, the unit's name): MiB where all values are below half a GiB."""
    return (1.0, "GiB") if max(gib, default=1.0) >= 0.5 else (1024.0, "MiB")


def _decimals(value: float | None, low: float | None, high: float | None) -> int | None:
    """Return the decimals for a value and its interval, None without an interval or for a tiny value."""
    if value is None or low is None or high is None or high <= low or abs(value) < 1e-4:
        return None
    # Between three and six significant digits: a narrow interval needs no more, a wide one no fewer.
    magnitude = math.floor(math.log10(abs(value)))
    return max(0, 2 - magnitude, min(1 - math.floor(math.log10(high - low)), 5 - magnitude))
