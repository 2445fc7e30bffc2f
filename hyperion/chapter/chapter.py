"""A chapter predicts and runs the experiments of a notebook, and stores their results as rows in a run folder.

If the run folder already has rows for the same inputs, the chapter uses these rows and does not measure again. In replay, nothing
is measured: the rows come from a reference run, which is a stored run of another machine (the reference machine).
"""

import functools
import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from hyperion.chapter.context import Context, Forecast, Result
from hyperion.chapter.profiles import REPLAY, default_profile, finished_in, load_profile, measured_under, reference_run
from hyperion.chapter.subjects import experiment_named, module_of, subjects
from hyperion.chapter.variants import not_a_list_of, require_result, run_isolated
from hyperion.data.prepare.catalog import data_identity
from hyperion.dependencies import json_hash, reached_source_hash
from hyperion.errors import HyperionError, is_finite_number, not_none, require_seed
from hyperion.hardware import detect, fingerprint, torch_build
from hyperion.paths import results_folder
from hyperion.results import Prediction, Row, Run, is_run, must_remeasure, new_run_folder, rows_to_csv
from hyperion.results.execution import UNEXPECTED_CLAIM, UNEXPECTED_ROW, note_unexpected
from hyperion.results.missing_packages import installed_since
from hyperion.results.predictions import LATE
from hyperion.results.rows import UNEXPECTED
from hyperion.results.store import utc_now
from hyperion.terminal import progress_bar


class Chapter:
    """Experiments of one notebook in one run folder. Use `open_chapter` to create a chapter."""

    def __init__(self, notebook: str, profile: str, data_source: str, run: Run, seed: int, reference: Run | None):
        self.notebook, self.profile, self.data_source = notebook, load_profile(profile), data_source
        self.results, self.seed, self.reference = run, seed, reference
        self._measured_here: set[str] = set()

    @functools.cached_property
    def environment(self) -> dict:
        """Hardware and software versions with which the rows are measured.

        In replay, they are those of the reference machine.
        """
        return fingerprint() if self.reference is None else self.reference.information()["environment"]

    @property
    def on_accelerator(self) -> bool:
        """True if the rows come from a machine with a GPU. In replay, this is the reference machine."""
        return bool(self.environment["gpus"])

    def expect(self, holds: object, otherwise: str) -> None:
        """Check a claim of the notebook.

        If the claim is false, print `otherwise` as UNEXPECTED and report it to the program that runs the notebook. The notebook
        continues. Unlike `assert`, this check also works if PYTHONOPTIMIZE is set.

        Args:
            holds: True if the claim is true. A bool, or an array or tensor with a single bool.
            otherwise: sentence that states what is wrong if the claim is false, with the measured numbers.

        Raises:
            HyperionError: `holds` is not a truth value, but for example None, a number, a list or an array of several elements.
        """
        if not _truth(holds, otherwise):
            self._unexpected(otherwise, UNEXPECTED_CLAIM)

    def expect_timing(self, holds: object, otherwise: str) -> None:
        """Check a claim about measured times. On a GPU, this is the same as `expect`. On a CPU, a false claim is only a warning.

        Usually, no other process uses the GPU, but other processes share the CPU. One second of their work can make a claim about
        times on the CPU false.
        """
        if self.on_accelerator:
            self.expect(holds, otherwise)
        elif not _truth(holds, otherwise):
            print(f"WARNING: {otherwise}. On a CPU other processes can cause this: run this notebook alone to check.")

    def expect_within(self, row: Row, low: float, high: float, what: str) -> None:
        """Check that the 95 % confidence interval of a measured value lies within bounds.

        If the whole interval lies outside the bounds, the value is reported as UNEXPECTED. If a bound lies inside the interval,
        the interval is too wide for a decision, and a warning is printed.

        Args:
            row: row with the value. It must have an interval.
            low, high: bounds in the unit of the row.
            what: name of the quantity, which begins the printed sentence.
        """
        ci_low, ci_high = not_none(row.ci_low), not_none(row.ci_high)
        value = f"{what}: {row.value:.4g} ({ci_low:.4g} to {ci_high:.4g})"
        if low <= ci_low and ci_high <= high:
            return
        if ci_high < low or ci_low > high:
            self.expect_timing(False, f"{value} lies outside {low:g} to {high:g}")
        else:
            print(f"WARNING: undecided: {value} may be outside {low:g} to {high:g}. More samples would decide.")

    def options(self, experiment: str) -> Any:
        """Return the options of an experiment as an instance of its `Options` subclass, with the values from `sizes`.

        Raises:
            HyperionError: an option is unknown, missing or invalid, or the experiment has no options. The message names the
                option.
        """
        options = experiment_named(experiment).options
        if options is None:
            raise HyperionError(
                f"the experiment {experiment!r} has no options",
                where=f"EXPERIMENT of {module_of(experiment)}",
                next_step="pass the subclass of Options: Experiment(forecast, run, options=…)",
            )
        return options.parse(self.sizes(experiment), experiment)

    def sizes(self, experiment: str) -> dict:
        """Return the profile's sizes for an experiment.

        In replay, return the sizes with which the reference machine measured the rows.
        """
        if self.reference is not None:
            provenance, _ = measured_under(self.reference, self.notebook, experiment)
            return provenance["sizes"]
        return self.profile.sizes(experiment)

    def predict(self, experiment: str, guess: float | None = None) -> pd.DataFrame:
        """Store the reader's guess and the library's estimates before the measurement.

        The reader guesses the value of the first prediction. A stored prediction changes only if the rows that the estimates were
        computed from have changed; the estimates are then computed again. In replay, the estimates come from the reference
        machine, and the guess comes from the reader of this notebook.

        Args:
            experiment: name of the experiment.
            guess: the reader's guess in the unit of the first prediction, or None for no guess.

        Returns:
            The predictions as a table with the columns variant, dtype, params, metric, guess, ceiling, estimate, low, high and
            basis.

        Raises:
            HyperionError: the guess is not a finite number, or the forecast of the experiment cannot be stored.
        """
        guess = _require_guess(guess)
        if self.reference is None:
            digest, predictions = self._input_hash(experiment), self._forecasts(experiment)
        else:
            digest, predictions = self._replayed_forecasts(experiment)
        # Only the first prediction gets the reader's guess.
        self.results.predict(replace(p, guess=None if place else guess) for place, p in enumerate(predictions))
        predictions = self._predictions(experiment, digest)
        if guess is not None and predictions and predictions[0].guess != guess:
            first = predictions[0].guess
            stored = "The prediction is stored without a guess" if first is None else f"The guess {first:g} is already stored"
            print(
                f"{stored} and stays; the new guess {guess:g} is ignored. "
                "To guess again, restart the kernel and run all cells. This creates a new run."
            )
        columns = ["variant", "dtype", "params", "metric", "guess", "ceiling", "estimate", "low", "high", "basis"]
        shown = [replace(p, ceiling=p.known_ceiling, estimate=None) if p.is_ceiling else p for p in predictions]
        return pd.DataFrame([{column: getattr(p, column) for column in columns} for p in shown], columns=columns)

    def ceiling(self, row: Row) -> float | None:
        """Return the ceiling stored with the prediction of a row, or None if no ceiling was stored."""
        stored = self.results.predictions(row.notebook, row.experiment)
        return next((p.known_ceiling for p in stored if p.predicts(row)), None)

    def run(self, experiment: str) -> Result:
        """Run an experiment, store its rows and samples, and return them.

        If the run already has rows for the same inputs, return these rows without measuring. In replay, nothing is measured: the
        rows and samples come from the reference machine.

        Raises:
            HyperionError: the experiment returned no `Result`, or one without rows or samples. Nothing is stored in this case.
        """
        # Without an explicit call, store the predictions now. They must exist before the first sample.
        self.predict(experiment)
        if self.reference is not None:
            return self._replay(experiment)
        digest, data = self._input_hash(experiment), self._data(experiment)
        if self._holds(experiment, digest) and not self._must_repeat(experiment):
            return self._keep(experiment, digest)
        # Recorded after the predictions are stored and before the first sample, because `Run.verify` compares the times.
        provenance, environment, started_at = self._provenance(experiment), self.environment, utc_now()
        result = require_result(experiment, self._measure(experiment, digest, data))
        rows = [row.without_failed_value() for row in result.rows]
        result = replace(result, rows=_with_predictions(rows, self._predictions(experiment, digest)))
        # The identity of the data is read after the run, because the experiment may have downloaded the data.
        taken = self._data(experiment)
        self.results.record(
            self.notebook,
            experiment,
            result.rows,
            result.samples,
            input_hash=digest,
            source=result.source,
            # Data that existed before the run keep the identity that was part of the compared inputs.
            data={name: found or taken[name] for name, found in data.items()},
            provenance=provenance,
            environment=environment,
            started_at=started_at,
        )
        # A second call in the same kernel uses these rows, even if one of them is unexpected. Otherwise every further call would
        # measure again.
        self._measured_here.add(experiment)
        self._report_unexpected(result.rows)
        _report_unmatched(experiment, self._predictions(experiment, digest), result.rows)
        busy = sum(row.busy for row in result.rows)
        if busy:
            print(
                f"WARNING: other processes used more than a tenth of the cores while {experiment} was measured. Times in "
                f"{busy} of its rows are too long. Measure again on an idle machine in a new run: RUN=new with `make reproduce`, "
                "output = None in a notebook, another name with `hyperion launches`."
            )
        return result

    def _holds(self, experiment: str, digest: str) -> bool:
        """Return True if the run folder has rows of this experiment for the same inputs and data."""
        finished = self.results.finished(self.notebook, experiment)
        return finished is not None and (finished["input_hash"], finished.get("data")) == (digest, self._data(experiment))

    def _must_repeat(self, experiment: str) -> bool:
        """Return True if a stored experiment must be measured again.

        This is the case if a package was installed that a row names as missing, if a check of one of its values failed, or if a
        notebook check on its values failed. If only a notebook check failed, an isolated experiment (a training run) is not
        repeated, because the same seed gives the same result.
        """
        if experiment in self._measured_here:
            return False
        rows = self.results.rows(self.notebook, experiment)
        installed = installed_since(rows)
        lacking = any(row.is_unexpected for row in rows)
        if not installed and not lacking and (not must_remeasure() or experiment_named(experiment).isolated):
            return False
        if installed:
            why = f"these packages were installed since: {', '.join(installed)}"
        else:
            why = f"{'a value of it' if lacking else 'a check of this notebook on earlier results'} was unexpected"
        print(f"{experiment}: measured again, because {why}")
        if lacking and self._workspace(experiment).exists():  # otherwise, its checkpoints would reproduce the rejected value
            shutil.rmtree(self._workspace(experiment))
        return True

    def _unexpected(self, sentence: str, what: str) -> None:
        sentence = " ".join(sentence.split())  # the program that runs the notebook expects each sentence on a single line
        print(f"UNEXPECTED: {sentence}")
        note_unexpected(self.notebook, sentence, what)

    def _report_unexpected(self, rows: list[Row]) -> None:
        for row in (row for row in rows if row.is_unexpected):
            parts = [row.experiment, row.variant, row.dtype, *(f"{name} {value}" for name, value in row.params.items())]
            parts += [] if row.rank is None else [f"rank {row.rank}"]
            reason = row.value_reason.removeprefix(UNEXPECTED)
            self._unexpected(f"{', '.join(filter(None, parts))}: {row.metric} {reason}", UNEXPECTED_ROW)

    def _keep(self, experiment: str, digest: str) -> Result:
        print(f"{experiment}: this run already has its rows, nothing measured again")
        stored = self.results.rows(self.notebook, experiment)
        rows = _with_predictions(stored, self._predictions(experiment, digest))
        self.results.confirm(self.notebook, experiment, rows)
        source = not_none(self.results.finished(self.notebook, experiment))["source"]
        return Result(rows, self.results.samples(self.notebook, experiment), source)

    def _measure(self, experiment: str, digest: str, data: dict) -> Result:
        chosen = experiment_named(experiment)
        # The folder name contains a hash of the inputs and the data, so an experiment never resumes from checkpoints of another
        # configuration or of other data.
        folder = self._workspace(experiment) / json_hash([digest, data])
        context = self._context(experiment, chosen.reads, folder)
        with progress_bar(desc=experiment, leave=False) as bar:

            def report(done: int, total: int, note: str = "") -> None:
                bar.total, bar.n = total, done
                bar.set_postfix_str(note)

            result = run_isolated(context, report) if chosen.isolated else chosen.run(context, report)
            # tqdm shows a bar that closes before it is full in red, as if the experiment had failed.
            bar.n = bar.total = bar.total or 1
            return result

    def _workspace(self, experiment: str) -> Path:
        return self.results.folder / "checkpoints" / f"{self.notebook}.{experiment}"

    def _context(self, experiment: str, reads: Iterable[str], workspace: Path | None = None) -> Context:
        return Context(
            notebook=self.notebook,
            experiment=experiment,
            sizes=self.sizes(experiment),
            seed=self.seed,
            data_source=self.data_source,
            allow_synthetic=self.profile.allow_synthetic,
            synthetic=self.profile.synthetic,
            workspace=workspace or self.results.folder,
            upstream=[row for row in self.results.rows() if row.experiment in reads],
        )

    def _input_hash(self, experiment: str) -> str:
        """Return a hash of all inputs of the experiment except the data files, which `_data` identifies."""
        chosen = experiment_named(experiment)
        context = self._context(experiment, chosen.reads)
        asked = {"source": self.data_source, "synthetic": context.synthetic, "allowed": context.allow_synthetic}
        return json_hash(
            {
                "experiment": experiment,
                "sizes": context.sizes,
                "seed": context.seed,
                "data": asked if chosen.data else None,
                # Measured values of other experiments are inputs: if they change, this experiment is measured again.
                "upstream": _values_of(context.upstream),
                "device": context.device.name,
                "torch": torch_build().torch,
                # Only library files that the experiment's module imports are hashed, so that edits elsewhere do not invalidate
                # its rows.
                "library": reached_source_hash(module_of(experiment)),
            }
        )

    def _data(self, experiment: str) -> dict:
        return data_identity(experiment_named(experiment).data, self.data_source)

    def _provenance(self, experiment: str) -> dict:
        """Return the provenance of an experiment: its settings, the device, and the version of the source code.

        "source" describes the whole library, and "code" is the hash of the files that the experiment imports.
        """
        return {
            "profile": self.profile.name,
            "data_source": self.data_source,
            "seed": self.seed,
            "sizes": self.sizes(experiment),
            "device": self._context(experiment, ()).device.name,
            "torch": torch_build().torch,
            "source": self.environment["source"],
            "code": reached_source_hash(module_of(experiment)),
        }

    def _predictions(self, experiment: str, digest: str) -> list[Prediction]:
        return [p for p in self.results.predictions(self.notebook, experiment) if p.input_hash == digest]

    def _forecasts(self, experiment: str) -> list[Prediction]:
        """Return the library's predictions, computed from the limits measured in this run, such as the memory bandwidth."""
        chosen, digest = experiment_named(experiment), self._input_hash(experiment)
        context = self._context(experiment, (*chosen.reads, *chosen.forecast_reads))
        # The experiment may already have been measured. The estimate does not use the measured values, but the stored basis tells
        # the reader that it was made after the measurement.
        late, made_at = LATE if self._holds(experiment, digest) else "", utc_now()
        return [
            Prediction(
                notebook=self.notebook,
                experiment=experiment,
                variant=forecast.variant,
                dtype=forecast.dtype,
                params=forecast.params,
                metric=forecast.metric,
                guess=None,
                estimate=forecast.estimate,
                basis=forecast.basis + late,
                input_hash=digest,
                upstream_hash=_values_of(context.upstream),
                each_rank=forecast.each_rank,
                ceiling=forecast.ceiling,
                low=forecast.low,
                high=forecast.high,
                made_at=made_at,
            )
            for forecast in _require_forecasts(experiment, chosen.forecast(context))
        ]

    def _replayed_forecasts(self, experiment: str) -> tuple[str, list[Prediction]]:
        """Return (input hash of the replay, predictions that the reference run stored before its measurement)."""
        if self._is_older_than(experiment):
            return self._absent_hash, []
        subjects()  # registers the metrics of the predictions, because a replay need not import the experiment
        measured = finished_in(not_none(self.reference), self.notebook, experiment)["input_hash"]
        # The prefix separates the predictions of a replay from those of measurements with the same inputs.
        digest = f"replay:{not_none(self.reference).folder.name}:{measured}"
        written = not_none(self.reference).predictions(self.notebook, experiment)
        # The predictions keep the time at which they were made. Predictions of earlier versions have no time.
        return digest, [replace(p, guess=None, input_hash=digest) for p in written if p.input_hash == measured]

    def _is_older_than(self, experiment: str) -> bool:
        """Return True if the reference run lacks this experiment and the notebook also works without its values."""
        lacks = not_none(self.reference).finished(self.notebook, experiment) is None
        return lacks and experiment_named(experiment).stand_in is not None

    @property
    def _absent_hash(self) -> str:
        return f"replay:{not_none(self.reference).folder.name}:absent"

    def _replay(self, experiment: str) -> Result:
        reference = not_none(self.reference)
        machine = reference.folder.name
        if self._is_older_than(experiment):
            variant, metric = not_none(experiment_named(experiment).stand_in)
            reason = f"not measured: the reference run {machine} is older than this experiment"
            row = Row(
                notebook=self.notebook, experiment=experiment, variant=variant, metric=metric, value=None, value_reason=reason
            )
            rows = [row]
            self.results.record(self.notebook, experiment, rows, pd.DataFrame(), input_hash=self._absent_hash)
            return Result(rows, pd.DataFrame(), replayed_from=machine)
        finished = finished_in(reference, self.notebook, experiment)
        provenance, environment = measured_under(reference, self.notebook, experiment)
        # Earlier versions stored ceilings as predictions. They are removed here, so that a notebook never shows a ceiling as a
        # prediction.
        ceilings = [p for p in reference.predictions(self.notebook, experiment) if p.is_ceiling]
        rows = [
            replace(row, predicted=None) if any(p.predicts(row) for p in ceilings) else row
            for row in reference.rows(self.notebook, experiment)
        ]
        samples = reference.samples(self.notebook, experiment)
        self.results.record(
            self.notebook,
            experiment,
            rows,
            samples,
            input_hash=f"replay:{machine}:{finished['input_hash']}",
            source=finished["source"],
            provenance=provenance,
            environment=environment,
        )
        self._report_unexpected(rows)
        return Result(rows, samples, finished["source"], replayed_from=machine)


def _truth(holds: Any, otherwise: str) -> bool:
    kind = type(holds)
    # NumPy arrays have an attribute `size`, and tensors have a method `numel`. `item` converts a NumPy or torch bool to a Python
    # bool. Larger arrays have no single truth value.
    if hasattr(holds, "item") and (holds.numel() if hasattr(holds, "numel") else getattr(holds, "size", None)) == 1:
        holds = holds.item()
    if not isinstance(holds, bool):
        raise HyperionError(
            f"the check of {otherwise!r} got {kind.__name__} {str(holds)[:80]!r}, which is not a truth value",
            next_step="pass one bool: compare with a number, or reduce an array with .all() or .any()",
        )
    return holds


def _with_predictions(rows: list[Row], predictions: list[Prediction]) -> list[Row]:
    """Return the rows with the stored estimates in the column `predicted`."""

    def estimate(row: Row) -> float | None:
        return next((p.estimate for p in predictions if p.predicts(row)), None)

    return [replace(row, predicted=estimate(row)) for row in rows]


def _report_unmatched(experiment: str, predictions: list[Prediction], rows: list[Row]) -> None:
    """Print the predictions for which there is no row. Otherwise a misspelled variant or a missing dtype would go unnoticed."""
    unmatched = [p for p in predictions if not any(p.predicts(row) for row in rows)]
    if unmatched:
        columns = (
            [p.variant, p.metric, p.dtype, *(f"{name}={value}" for name, value in p.params.items())] for p in unmatched[:3]
        )
        named = [" ".join(filter(None, texts)) for texts in columns]
        more = f" and {len(unmatched) - 3} more" if len(unmatched) > 3 else ""
        print(
            f"NOTE: {experiment} has no row for these predictions: {'; '.join(named)}{more}. Nothing is compared with them. "
            "A row must have the same variant, metric and dtype as the prediction, and all of its params."
        )


def _values_of(rows: list[Row]) -> str:
    """Return a hash of measured rows without their predictions, or "" if there are no rows."""
    return json_hash(rows_to_csv([replace(row, predicted=None) for row in rows])) if rows else ""


def _require_forecasts(experiment: str, found: Any) -> list[Forecast]:
    """Return what the forecast of an experiment returned if it can be stored."""
    if fault := not_a_list_of(Forecast, found):
        raise HyperionError(
            f"the forecast of the experiment {experiment!r} returned {fault}",
            where=f"the function forecast of {module_of(experiment)}",
            next_step="return [Forecast(variant, metric, estimate, basis)], or [] if there is no prediction",
        )
    return list(found)


def _run_folder(output: str) -> Path:
    """Return the folder of a run.

    A run in results/ can be given as NAME or as results/NAME, from any working directory.
    """
    folder = Path(output)
    stored = results_folder() / folder.name
    named = folder.parent.name in ("", "results") and not folder.is_absolute()
    return stored if named and not folder.exists() and is_run(stored) else folder


def _require_guess(guess: Any) -> float | None:
    """Return a guess as a float. Check it before it is stored, because a run with an invalid prediction cannot be read again."""
    if guess is None:
        return None
    if is_finite_number(guess):
        return float(guess)
    raise HyperionError(
        f"the guess {guess!r} is not a finite number",
        where="the first code cell",
        next_step="set your guess to a number, for example 12.5, and run that cell and this one again",
    )


def open_chapter(
    notebook: str, *, profile: str = "auto", data_source: str = "auto", output: str | None = None, seed: int = 0
) -> Chapter:
    """Open the chapter of a notebook in a run folder.

    Args:
        notebook: file name of the notebook without its extension.
        profile: smoke, full, study, replay, replay:<machine> or auto. auto selects smoke on a CPU and full on an accelerator.
        data_source: auto, mirror, cache, download or synthetic.
        output: folder of the run, or the name of a run in results/. If the folder contains no run, one is created in it. None
            creates a new folder in results/.
        seed: seed of all random numbers that the chapter's experiments draw.

    Raises:
        HyperionError: the profile is unknown, the seed is out of range, there is no reference run to replay, or the folder is not
            writable.
    """
    require_seed(seed)
    if output is not None and not isinstance(output, str | os.PathLike):
        raise HyperionError(
            f"output is {output!r}, which is not a folder",
            where="the first code cell",
            next_step='set output to None or to a run, for example output = "20261123-101500-01_hardware_exploration"',
        )
    device = detect()
    name, _, machine = (default_profile(device.kind) if profile == "auto" else profile).partition(":")
    load_profile(name)
    folder = _run_folder(output) if output else new_run_folder(notebook)
    if is_run(folder):
        run = Run.open(folder)
    else:
        run = Run.create(folder, run_information(name, data_source, seed))
    reference = reference_run(machine, notebook) if name == REPLAY else None
    if reference is not None:
        print(f"BANNER: replay. Every number below was measured on {reference.folder.name}, none on this machine.")
    else:
        print(f"{device.name}: profile {name}, rows are stored in {folder.name}")
    return Chapter(notebook, name, data_source, run, seed, reference)


def run_information(profile: str, data_source: str, seed: int) -> dict:
    """Return the content of run.json: the settings and the environment of the run."""
    return {"profile": profile, "data_source": data_source, "seed": seed, "environment": fingerprint()}
