"""The rows, samples and predictions of a run from which figures and pages are made, and functions that format numbers.

This module imports neither torch nor matplotlib, because functions that print to the terminal also use it.
"""

import functools
import json
import math
import re
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from hyperion.errors import HyperionError, not_none
from hyperion.results import Prediction, Row, Run
from hyperion.results.evidence import STEP_PHASES
from hyperion.results.places import stored_references
from hyperion.results.rows import canonical_params
from hyperion.results.series import LEAST_FOR_DRIFT, drift_of
from hyperion.results.store import samples_name

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Parameters = ParamSpec("Parameters")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Material:
    """Verified rows, samples and predictions of a run. Rows and predictions are read only once.

    Args:
        run: the run. If one of its files is damaged, a StoreError is raised when the file is first used.
    """

    run: Run

    @cached_property
    def rows(self) -> list[Row]:
        return self.run.rows()

    @cached_property
    def predictions(self) -> list[Prediction]:
        return self.run.predictions()

    @cached_property
    def _predictions(self) -> dict[tuple[str, str, str, str, str], list[Prediction]]:
        found: dict[tuple[str, str, str, str, str], list[Prediction]] = {}
        for p in self.predictions:
            found.setdefault((p.notebook, p.experiment, p.variant, p.dtype, p.metric), []).append(p)
        return found

    def prediction(self, row: Row) -> Prediction | None:
        """Return the stored prediction of a row, or None if the value was not predicted."""
        measured = self.finished.get(f"{row.notebook}/{row.experiment}", {}).get("input_hash")
        alike = self._predictions.get((row.notebook, row.experiment, row.variant, row.dtype, row.metric), [])
        return next((p for p in alike if p.input_hash == measured and p.predicts(row)), None)

    @cached_property
    def information(self) -> dict:
        return self.run.information()

    @cached_property
    def environments(self) -> dict[str, dict]:
        return self.run.environments()

    @cached_property
    def finished(self) -> dict[str, dict]:
        """Stored information about each finished experiment, as a dict with keys "notebook/experiment"; see `Run.experiments`."""
        return self.run.experiments()

    @cached_property
    def experiments(self) -> list[tuple[str, str]]:
        """Pairs (notebook, experiment) in row order."""
        return list(dict.fromkeys((row.notebook, row.experiment) for row in self.rows))

    @cached_property
    def image_caveat(self) -> str:
        """Sentence on why this run's accuracies cannot be compared with published ones.

        It is "" if the run used the official CIFAR-10 or measured no accuracy. The provenance of an experiment states the
        checksum of its data, and whether the publisher's checksums confirm the files.
        """
        measured_on = {(row.notebook, row.experiment): row.data_source for row in self.rows if row.metric in ACCURACIES}
        caveats = [_image_caveat(self._data_of(*pair), source) for pair, source in sorted(measured_on.items())]
        return next(filter(None, caveats), "")

    def _data_of(self, notebook: str, experiment: str) -> dict:
        """Return a dict that maps each data set of an experiment to its identity, such as its checksum.

        For a replayed experiment, the identity is read from the reference run.
        """
        reference, entries = self.replayed_from(notebook, experiment), self.finished
        for run in stored_references() if reference else ():
            if run.folder.name == reference:
                entries = run.experiments()
        return entries.get(f"{notebook}/{experiment}", {}).get("data") or {}

    @cached_property
    def drawn(self) -> dict[str, bytes | None]:
        """Figures that were already drawn, as {name: PNG}. `hyperion.book.outline.picture` uses it as a cache."""
        return {}

    @cached_property
    def not_drawn(self) -> dict[str, HyperionError]:
        """Figures that could not be drawn, as {name: error}. `hyperion.book.outline.picture` enters them."""
        return {}

    @property
    def replayed(self) -> list[str]:
        """Names of the reference machines from which experiments of this run were replayed."""
        return sorted({self.replayed_from(*pair) for pair in self.experiments} - {""})

    @property
    def data_sources(self) -> list[str]:
        return sorted({row.data_source for row in self.rows} - {""})

    def of(self, experiment: str, **wanted: Any) -> list[Row]:
        """Return all rows of an experiment, from all notebooks.

        Args:
            experiment: name of the experiment.
            wanted: required values of other columns, as for `select`.
        """
        return select(self.rows, experiment=experiment, **wanted)

    def samples(self, experiment: str) -> "pd.DataFrame":
        """Return the raw samples of an experiment. The table is empty if the experiment has not run."""
        import pandas as pd  # imported here, because its import takes most of a second in every process that trains

        frames = [self.run.samples(*pair) for pair in self.experiments if pair[1] == experiment]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    @cached_property
    def _steadiness(self) -> dict[tuple[str, str], dict[tuple[str, str, str, str], list[str]]]:
        """Results of `_steadiness_of`, by notebook and experiment."""
        return {}

    def _steadiness_of(self, notebook: str, experiment: str) -> dict[tuple[str, str, str, str], list[str]]:
        """Return {timing of an experiment: for each series of its samples, "yes" if it was steady, otherwise "no" with reasons}.

        The key of a timing is (variant, dtype, params as JSON, phase of a step or ""). The samples of other experiments are not
        read, because a notebook shows one experiment at a time.
        """
        if (notebook, experiment) in self._steadiness:
            return self._steadiness[notebook, experiment]
        found = self._steadiness[notebook, experiment] = {}
        if samples_name(notebook, experiment) not in self.run.hashes():
            return found
        samples = self.run.samples(notebook, experiment)
        if set(samples.columns) >= _STEPS_OF_RANKS:
            steps = samples[samples["kind"] == "step"]
            for _, series in steps.groupby(["workload", "ranks", "mode"]):
                # The warm-up has a fixed number of steps, which all ranks must run. If it is too short, the times drift.
                first, times = series.iloc[0], series.groupby("index").agg({"time_s": "max"})["time_s"]
                step = canonical_params({"ranks": int(first["ranks"]), "mode": first["mode"]})
                found[first["workload"], "", step, "step"] = [_state(list(times), []).replace("yes", NO_DRIFT)]
        if not {"variant", "dtype", "params", "index", "time_s", "warm", "unsteady"} <= set(samples.columns):
            return found
        timed = samples.dropna(subset=["params", "unsteady"])
        # The samples of each series are numbered from 0. Several series can have the same params.
        for _, series in timed.groupby((timed["index"] == 0).cumsum()):
            first = series.iloc[0]
            phase = first.get("phase")
            key = first["variant"], first["dtype"], canonical_params(json.loads(first["params"]))
            place = (*key, phase if isinstance(phase, str) else "")
            found.setdefault(place, []).append(_state(list(series["time_s"]), [] if first["warm"] else ["warm-up"]))
        return found

    def steadiness(self, row: Row) -> str:
        """Return whether the device was in a steady state while the samples of a row were taken.

        Returns:
            "yes", or "no" with the reasons: the times still changed at the end of the warm-up, or they drifted during the timing.
            `NO_DRIFT` for the steps of several ranks, whose warm-up is not tested.
            "unknown" with the number of samples if they are too few to show a drift. "unknown" for a time or a rate with an
            interval whose samples do not record the steadiness. "" for any other row. If a row is computed from several series,
            the worst of them counts.
        """
        found = self._steadiness_of(row.notebook, row.experiment)
        phase = row.metric.removesuffix("_time_s")
        # The param `clock` says how a time was taken, so that the samples need not repeat it.
        for params in (row.params, {name: value for name, value in row.params.items() if name != "clock"}):
            for of_step in ("", phase if phase in STEP_PHASES else "step"):
                if seen := found.get((row.variant, row.dtype, canonical_params(params), of_step)):
                    return worst_steadiness(seen)
        step = canonical_params({name: row.params[name] for name in ("ranks", "mode") if name in row.params})
        if is_timed(row) and (seen := found.get((row.variant, "", step, "step"))):
            return worst_steadiness(seen)
        return "unknown" if is_timed(row) and row.ci_low is not None and "seeds" not in row.params else ""

    def replayed_from(self, notebook: str, experiment: str) -> str:
        """Return the reference machine from which an experiment was replayed, or "" if it was measured in this run."""
        digest = self.finished.get(f"{notebook}/{experiment}", {}).get("input_hash", "")
        # The input hash of a replay is "replay:MACHINE:HASH" (see `Chapter`).
        return digest.removeprefix("replay:").partition(":")[0] if digest.startswith("replay:") else ""

    def machine(self, experiment: str) -> str:
        """Return the name of the device on which an experiment ran, for titles.

        For a replayed experiment, it is the reference machine followed by "(replay)".
        """
        pair = next(pair for pair in self.experiments if pair[1] == experiment)
        reference = self.replayed_from(*pair)
        return f"{reference} (replay)" if reference else device_name(self.information)


# The state of a series that does not drift, but whose warm-up is not tested.
NO_DRIFT = "yes (drift only)"
# Columns of samples that contain the steps of several ranks. A step takes as long as on its slowest rank.
_STEPS_OF_RANKS = {"workload", "ranks", "mode", "kind", "rank", "index", "time_s"}


def _state(times: Sequence[float], reasons: list[str]) -> str:
    """Return whether a series of times is steady, as `Material.steadiness` does.

    Args:
        times: the times in the order in which they were taken.
        reasons: reasons known so far why the series is not steady.
    """
    drift = drift_of(times)
    if drift.present:
        reasons = [*reasons, f"drift {percent(drift.relative, signed=True)} %"]
    if reasons:
        return f"no ({', '.join(reasons)})"
    return f"unknown ({len(times)} samples)" if len(times) < LEAST_FOR_DRIFT else "yes"


def is_timed(row: Row) -> bool:
    """Return whether the value of a row is a time or a rate."""
    return row.unit == "s" or row.unit.endswith("/s") or row.unit.endswith("FLOPS")


def worst_steadiness(states: Iterable[str]) -> str:
    """Return the worst of several results of `Material.steadiness`. From worst to best: "no", "unknown", "yes", ""."""
    return max(states, key=lambda state: ("", "yes", "unknown", "no").index(state.partition(" ")[0]))


def held_by_power(row: Row) -> bool:
    """Return whether the power limit of the device lowered the clock while a row with a limit in FLOPS was measured.

    One reading at the power limit is not enough, because the device may have kept its maximum clock. The median clock must be
    visibly lower than the maximum clock, which the source of the limit states.
    """
    maximum = re.search(r"ops/clock x ([\d.]+) MHz", row.limit_source)
    if "power" not in (row.throttle or "") or row.clock_mhz is None or maximum is None:
        return False
    return row.clock_mhz < (1 - VISIBLE) * float(maximum[1])


# A clock that is lower by more than this fraction is visible in the rate.
VISIBLE = 0.02
# Metrics whose values depend on the pixels of the images.
ACCURACIES = ("accuracy", "accuracy_sd", "time_to_accuracy_s")
# Copies of CIFAR-10 known to be lossily compressed, by the checksum in an experiment's provenance.
_LOSSY_CIFAR10 = {"15f3c4a60ca7572f"}
_NOT_COMPARABLE = "accuracies and times to an accuracy cannot be compared with published ones."


def _image_caveat(data: dict, source: str) -> str:
    """Return a sentence on why accuracies on this copy of CIFAR-10 cannot be compared with published ones.

    Return "" if the CIFAR-10 files are official, or if the images are synthetic.

    Args:
        data: a dict that maps each data set to its identity. The identity of CIFAR-10 gives its location, its checksum and,
            except in runs of earlier versions, whether the files are official.
        source: data source of the rows.
    """
    entry = data.get("cifar-10") or {}
    if entry.get("sha256") in _LOSSY_CIFAR10:
        return f"Lossy mirror: the images of CIFAR-10 were compressed lossily, so {_NOT_COMPARABLE}"
    if entry.get("official") or source not in ("mirror", "cache"):
        return ""
    return f"Unofficial {source}: no published checksum proves the pixels of this CIFAR-10, so {_NOT_COMPARABLE}"


def device_name(information: dict) -> str:
    """Return the name of the first GPU in run.json, or of the CPU if there is no GPU.

    Args:
        information: contents of run.json, with the hardware fingerprint under "environment".
    """
    environment = information.get("environment") or {}
    gpus = environment.get("gpus") or []
    if gpus:
        return gpus[0]["name"]
    cpu = environment.get("cpu")
    return f"{cpu['name']} ({cpu['cores']} cores)" if cpu else "a machine that run.json does not describe"


def select(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Return the rows whose columns have the wanted values, for example `select(rows, metric="accuracy", dtype="bf16")`."""
    return [row for row in rows if all(getattr(row, column) == value for column, value in wanted.items())]


def measured(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that have a value. Use `values` to get the values of these rows."""
    return [row for row in rows if row.value is not None]


def values(rows: Iterable[Row]) -> list[float]:
    """Return the values of measured rows.

    Raises:
        ValueError: a row has no value.
    """
    return [not_none(row.value) for row in rows]


# Value of `Plot.experiment` for a figure about the whole run instead of one experiment.
ALL = "all"


@dataclass(frozen=True)
class Plot:
    """One figure.

    Args:
        name: name of the figure, and of its file without the extension.
        experiment: experiment that the figure belongs to, or `ALL` for a figure about the whole run.
        caption: what the reader should see in the figure.
        draw: function that draws the figure from a `Material`. It returns None if the run has no rows for the figure.
        published: if True, `draw` accepts `published=True`, which adds published numbers of another machine.
    """

    name: str
    experiment: str
    caption: str
    draw: "Callable[..., Figure | None]"
    published: bool = False


@dataclass(frozen=True)
class Panel:
    """One panel of the summary figure of a run. The function `summary_panels` of a subject's figures.py returns them.

    Args:
        experiment: experiment of the rows in the panel.
        draw: function that draws the panel.
    """

    experiment: str
    draw: "Callable[[Axes], None]"


@dataclass(frozen=True)
class Quote:
    """A value of a run that a reader may want to quote. The function `headlines` of a subject's figures.py yields them.

    Args:
        label: name of the quantity, with the conditions that a reader has to know, such as the number format and the batch size.
        row: the row that contains the value.
        kind: "speed" for a time, a rate or a ratio of times, "mean" for a quality averaged over trainings, "quality" for the
            quality of one training, or "difference" for a difference between values that must be equal.
        count: number of trainings of a mean, or number of ranks of a difference. If several runs have the value, the one with the
            largest count is quoted.
        timings: the rows of times from which a ratio was computed. The ratio is steady if all of them are.
    """

    label: str
    row: Row
    kind: Literal["speed", "mean", "quality", "difference"] = "speed"
    count: int = 0
    timings: Sequence[Row] = ()


def best_rows(rows: Iterable[Row], kind: Callable[[Row], Hashable]) -> list[Row]:
    """Return the row with the highest value of each kind. The kinds are in the order in which they occur.

    Args:
        rows: rows with a value.
        kind: function that returns the kind of a row.
    """
    best: dict[Hashable, Row] = {}
    for row in rows:
        other = best.setdefault(kind(row), row)
        if not_none(row.value) > not_none(other.value):
            best[kind(row)] = row
    return list(best.values())


def made_from_rows(what: str) -> Callable[[Callable[Parameters, Made]], Callable[Parameters, Made]]:
    """Return a decorator for functions that make a table or a figure, so that unusable rows raise a HyperionError.

    Row params are not checked when rows are stored. In a run from another person, a param may be missing or have another type.

    Args:
        what: name of the table or the figure, the subject of the error message.

    Raises:
        HyperionError: the decorated function raised an exception, which becomes the cause of the HyperionError.
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
                    where=_own_line(error),
                    next_step="correct this line if it is yours; else check the run with `hyperion verify`, and if it is valid, "
                    "report this error with the run",
                ) from error

        return make

    return decorated


def _own_line(error: Exception) -> str:
    """Return the last line of an exception's traceback that is in no installed package, as file:line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def number(value: float | None, digits: int = 4) -> str:
    """Format `value` with `digits` significant digits and thousands separators. None gives ""."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:zg}"
    # Position of the first significant digit: 0 for 1 to 9, 1 for 10 to 99.
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits - 2}e}"
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def number_within(value: float | None, low: float | None, high: float | None) -> str:
    """Format `value` as precisely as its interval allows. Further digits would be noise.

    The last digit shown is the second significant digit of the interval's width.
    """
    decimals = _decimals(value, low, high)
    return number(value) if value is None or decimals is None else f"{value:z,.{decimals}f}"


def interval(value: float | None, low: float | None, high: float | None) -> str:
    """Format a confidence interval as "low – high", with as many decimals as `number_within`."""
    if low is None or high is None:
        return ""
    decimals = _decimals(value, low, high)
    if decimals is None:
        return f"{number(low)} – {number(high)}"
    return f"{low:z,.{decimals}f} – {high:z,.{decimals}f}"


def percent(fraction: float | None, signed: bool = False) -> str:
    """Format a fraction in percent with one decimal. None gives "". If `signed`, positive numbers begin with "+"."""
    if fraction is None:
        return ""
    return signed_number(100 * fraction, 1) if signed else f"{100 * fraction:z.1f}"


def signed_number(value: float, decimals: int) -> str:
    """Format `value` with its sign and this number of decimals. A number that rounds to zero has no sign."""
    text = f"{value:z.{decimals}f}"
    return f"+{text}" if float(text) > 0 else text


def quoted_value(value: float, unit: str) -> str:
    """Format a value with its unit, for use in a sentence. Fractions are shown in percent."""
    if unit == "fraction":
        if value == 0 or abs(value) >= 5e-4:
            return f"{percent(value)} %"
        # One decimal would round these to 0.0 %. Rounding errors and other tiny fractions are easier to compare as powers of 10.
        return f"{100 * value:.2g} %" if abs(value) >= 1e-5 else f"{value:.1e}"
    if unit == "B" and abs(value) >= 1e6:
        return f"{number(value / 1e6)} MB"
    if unit == "items" and value == 1:
        return "1 item"
    shown = f"{number(value / 1e6)} M" if abs(value) >= 1e6 else number(value)
    return shown + {"1": "", "perplexity": "", "ratio": " ×"}.get(unit, f" {unit}")


def items(count: float) -> str:
    """Format a count for an axis, such as "20 M", "1.5 k" or "512"."""
    for size, mark in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= size:
            return f"{count / size:g}{mark}"
    return f"{count:g}"


def byte_size(count: float) -> str:
    """Format a number of bytes in the largest binary unit that gives at least 1, such as "64 B", "4 KiB" or "1.5 GiB"."""
    for size, mark in ((2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB")):
        if count >= size:
            return f"{count / size:.3g}{mark}"
    return f"{count:.4g} B"


def memory_unit(gib: list[float]) -> tuple[float, str]:
    """Return the unit for an axis with these values, as (number of units in a GiB, name of the unit).

    The unit is MiB if all values are below half a GiB, otherwise GiB.
    """
    return (1.0, "GiB") if max(gib, default=1.0) >= 0.5 else (1024.0, "MiB")


def _decimals(value: float | None, low: float | None, high: float | None) -> int | None:
    """Return the number of decimals of a displayed value, which depends on the width of its interval.

    Return None if there is no interval or the value is tiny.
    """
    if value is None or low is None or high is None or high <= low or abs(value) < 1e-4:
        return None
    # Show at least three and at most six significant digits, even if the interval is very wide or very narrow.
    magnitude = math.floor(math.log10(abs(value)))
    return max(0, 2 - magnitude, min(1 - math.floor(math.log10(high - low)), 5 - magnitude))
