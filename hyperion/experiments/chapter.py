"""A chapter: the notebook's side of an experiment. Predict, run, keep; or find what an earlier go already kept."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
from tqdm.auto import tqdm

from hyperion.data.sources import sources_on_offer
from hyperion.dependencies import reached_source_hash
from hyperion.errors import HyperionError
from hyperion.experiments.context import Context, Forecast, Result
from hyperion.experiments.isolated import run_isolated
from hyperion.experiments.profiles import REPLAY, default_profile, load_profile
from hyperion.experiments.registry import experiment_named
from hyperion.hardware import detect, fingerprint
from hyperion.paths import reference_folder
from hyperion.results import Prediction, Row, Run, find_run, new_run_folder


class Chapter:
    """One notebook's experiments in one run folder. Made by `open_chapter`."""

    def __init__(self, notebook: str, profile: str, data_source: str, run: Run, seed: int, reference: Run | None):
        self.notebook, self.profile, self.data_source = notebook, load_profile(profile), data_source
        self.results, self.seed, self.reference = run, seed, reference

    @property
    def on_accelerator(self) -> bool:
        """Whether the rows come from a GPU: this machine's, or the reference machine's in replay."""
        return bool((self.reference or self.results).information()["environment"]["gpus"])

    def sizes(self, experiment: str) -> dict:
        """What the profile says of an experiment; in replay, what the reference run's profile says of it."""
        profile = self.profile if self.reference is None else load_profile(self.reference.information()["profile"])
        return profile.sizes(self.notebook, experiment)

    def predict(self, experiment: str, guess: float | None = None) -> pd.DataFrame:
        """Write down the reader's guess (of the first line) and the library's estimates; what is written stays.

        Args:
            guess: the reader's guess, in the unit of the first forecast's metric.

        Returns:
            The predictions as a table.
        """
        if self.reference is not None:
            predictions = self.reference.predictions(self.notebook, experiment)
        else:
            context = self._context(experiment)
            forecasts = experiment_named(experiment).forecast(context)
            digest = self._input_hash(context)
            self.results.predict(
                self._prediction(experiment, forecast, guess if first else None, digest)
                for first, forecast in ((index == 0, forecast) for index, forecast in enumerate(forecasts))
            )
            predictions = [p for p in self.results.predictions(self.notebook, experiment) if p.input_hash == digest]
        columns = ["variant", "dtype", "params", "metric", "guess", "estimate", "basis"]
        return pd.DataFrame([{column: getattr(p, column) for column in columns} for p in predictions], columns=columns)

    def run(self, experiment: str) -> Result:
        """Run an experiment and keep its rows, or return what this run folder already keeps of the very same experiment.

        In replay nothing is measured: rows and samples come from the reference machine, each as it was measured there.
        """
        if self.reference is not None:
            return self._replay(experiment)
        context = self._context(experiment)
        digest = self._input_hash(context)
        kept = self.results.finished(self.notebook, experiment)
        if kept is not None and kept["input_hash"] == digest:
            print(f"{experiment}: kept from an earlier call of this run, nothing measured again")
            samples = self.results.samples(self.notebook, experiment)
            return Result(self.results.rows(self.notebook, experiment), samples, kept["source"])
        self.predict(experiment)
        # Checkpoints of another configuration must not be resumed, so the folder bears the hash.
        result = self._measure(experiment, replace(context, workspace=context.workspace / digest))
        result = replace(result, rows=self._with_predictions(experiment, result.rows, digest))
        self.results.record(
            self.notebook, experiment, result.rows, result.samples, input_hash=digest, source=result.source
        )
        return result

    def _measure(self, experiment: str, context: Context) -> Result:
        chosen = experiment_named(experiment)
        with tqdm(desc=experiment, leave=False) as bar:

            def report(done: int, total: int, note: str = "") -> None:
                bar.total, bar.n = total, done
                bar.set_postfix_str(note)

            return run_isolated(context, report) if chosen.isolated else chosen.run(context, report)

    def _context(self, experiment: str) -> Context:
        return Context(
            notebook=self.notebook,
            experiment=experiment,
            sizes=self.sizes(experiment),
            seed=self.seed,
            data_source=self.data_source,
            allow_synthetic=self.profile.allow_synthetic,
            synthetic=self.profile.synthetic,
            workspace=self.results.folder / "checkpoints" / f"{self.notebook}.{experiment}",
            upstream=self.results.rows(),
        )

    def _input_hash(self, context: Context) -> str:
        """Hash of what the experiment depends on, times and measured values left out."""
        depends = {
            "experiment": context.experiment,
            "sizes": context.sizes,
            "seed": context.seed,
            "data_source": context.data_source,
            "data_on_offer": sources_on_offer() if context.data_source == "auto" else None,
            "synthetic": context.synthetic,
            "device": context.device.name,
            "library": reached_source_hash(f"hyperion.experiments.{context.experiment}"),
        }
        return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]

    def _prediction(self, experiment: str, forecast: Forecast, guess: float | None, digest: str) -> Prediction:
        return Prediction(
            notebook=self.notebook, experiment=experiment, variant=forecast.variant, dtype=forecast.dtype,
            params=forecast.params, metric=forecast.metric, guess=guess, estimate=forecast.estimate,
            basis=forecast.basis, input_hash=digest,
        )  # fmt: skip

    def _with_predictions(self, experiment: str, rows: list[Row], digest: str) -> list[Row]:
        """The rows with the estimates that were written down for them."""
        predictions = [p for p in self.results.predictions(self.notebook, experiment) if p.input_hash == digest]

        def estimate(row: Row) -> float | None:
            # A forecast names the parameters it depends on; a row may state more of them.
            for p in predictions:
                same = (p.variant, p.dtype, p.metric) == (row.variant, row.dtype, row.metric)
                if same and p.params.items() <= row.params.items():
                    return p.estimate
            return None

        return [replace(row, predicted=estimate(row)) for row in rows]

    def _replay(self, experiment: str) -> Result:
        machine = self.reference.folder.name
        rows = self.reference.rows(self.notebook, experiment)
        kept = self.reference.finished(self.notebook, experiment)
        if kept is None:
            raise HyperionError(
                f"the reference run of {machine} holds no experiment {experiment}",
                where=self.reference.folder,
                next_step="run it on a machine with PROFILE=smoke or full, or choose another reference",
            )
        samples = self.reference.samples(self.notebook, experiment)
        digest = f"replay:{machine}:{kept['input_hash']}"
        self.results.record(self.notebook, experiment, rows, samples, input_hash=digest, source=kept["source"])
        return Result(rows, samples, kept["source"], replayed_from=machine)


def open_chapter(
    notebook: str, *, profile: str = "auto", data_source: str = "auto", output: str | None = None, seed: int = 0
) -> Chapter:
    """Open a notebook's chapter in a run folder.

    Args:
        notebook: the notebook's file name without its ending.
        profile: smoke, full, study, replay (or replay:<machine>), or auto: smoke on a CPU, full on an accelerator.
        data_source: auto, mirror, cache, download or synthetic.
        output: folder of the run, made if it holds none; None makes a new one under results/.
        seed: seeds everything the chapter's experiments draw.

    Raises:
        HyperionError: unknown profile, no reference to replay, or a folder that cannot be written.
    """
    device = detect()
    name, _, machine = (default_profile(device.kind) if profile == "auto" else profile).partition(":")
    load_profile(name)
    folder = Path(output) if output else new_run_folder(notebook)
    if (folder / "run.json").is_file():
        run = Run.open(folder)
    else:
        run = Run.create(folder, run_information(name, data_source, seed))
    reference = _reference(machine, notebook) if name == REPLAY else None
    if reference is not None:
        print(f"BANNER: replay. Every number below was measured on {reference.folder.name}, none on this machine.")
    else:
        print(f"{device.name}: profile {name}, rows go to {folder.name}")
    return Chapter(notebook, name, data_source, run, seed, reference)


def run_information(profile: str, data_source: str, seed: int) -> dict:
    """What run.json says of a run: how it was asked for, and the environment it ran in."""
    return {"profile": profile, "data_source": data_source, "seed": seed, "environment": fingerprint()}


def _reference(machine: str, notebook: str) -> Run:
    """The named reference run, or the first that holds the notebook."""
    if machine:
        return Run.open(find_run(str(reference_folder() / machine)))
    for path in sorted(reference_folder().glob("*/run.json")):
        run = Run.open(path.parent)
        if run.rows(notebook):
            return run
    raise HyperionError(
        f"no reference run holds {notebook}", where=reference_folder(), next_step="run it here: PROFILE=smoke"
    )
