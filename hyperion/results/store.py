"""Run folders: their rows, samples, predictions and finished experiments.

Each change to a run folder is one transaction.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperion.errors import nearest_first
from hyperion.forms import FieldError, read_form
from hyperion.results.execution import KEPT, MEASURED, note_experiment
from hyperion.results.files import (
    RESTORE,
    WRITER_LOCK,
    StoreError,
    commit,
    encode_samples,
    locked,
    manifest_names,
    read_manifest,
    read_samples,
    read_verified,
    verify_folder,
)
from hyperion.results.metrics import Metric
from hyperion.results.predictions import LATE, Prediction, predictions_digest, with_prediction
from hyperion.results.rows import (
    SCHEMA_VERSION,
    Row,
    RowError,
    own_metrics,
    own_metrics_from_json,
    own_metrics_to_json,
    require_file_names,
    rows_from_csv,
    rows_to_csv,
)
from hyperion.untrusted import DOCUMENT_BYTES, parse_json

if TYPE_CHECKING:
    import pandas as pd

ROWS, RUN, EXPERIMENTS, PREDICTIONS = "rows.csv", "run.json", "experiments.json", "predictions.json"
ENVIRONMENTS, METRICS = "environments.json", "metrics.json"


@dataclass(frozen=True)
class _Gpu:
    name: str


@dataclass(frozen=True)
class _Cpu:
    name: str
    cores: int


@dataclass(frozen=True)
class _RecordedSource:
    commit: str | None = None
    modified: bool | None = None
    hash: str | None = None


@dataclass(frozen=True)
class _Environment:
    """The fields of the stored description of a machine that the report and comparisons read. Other fields are ignored."""

    gpus: list[_Gpu] | None = None
    cpu: _Cpu | None = None
    source: _RecordedSource | None = None
    packages: dict[str, str | None] | None = None
    collective_settings: dict | None = None


@dataclass(frozen=True)
class _Information:
    """The fields of run.json that Hyperion reads. Other fields are ignored."""

    schema: int
    profile: str | None = None
    seed: int | None = None
    data_source: str | None = None
    environment: _Environment | None = None
    relaunch: dict | None = None


@dataclass(frozen=True)
class _Provenance:
    environment: str | None = None
    profile: str | None = None
    seed: int | None = None


@dataclass(frozen=True)
class _Finished:
    """An entry of experiments.json, which describes one stored experiment."""

    input_hash: str
    rows: int
    source: str = ""
    data: dict = field(default_factory=dict)
    provenance: _Provenance = field(default_factory=_Provenance)


class Run:
    """A run: one folder of results.

    The methods verify each file that they read, and they write atomically. Several processes may use the same folder.

    Args:
        folder: the folder. The constructor does not access it: use `Run.create` to create a folder, and `Run.open` to check an
            existing one.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    @classmethod
    def create(cls, folder: Path, information: dict) -> "Run":
        """Create a run folder.

        Args:
            folder: the folder; it is created if it does not exist.
            information: content of run.json, such as the environment, versions and hashes.

        Raises:
            StoreError: the folder is not writable, or it already contains a run.
        """
        folder = Path(folder)
        if (folder / RUN).exists():
            raise StoreError("folder already holds a run", where=folder, next_step="name a new folder, or continue this run")
        run = cls(folder)
        run.write({RUN: _json({"schema": SCHEMA_VERSION, **information}), ROWS: rows_to_csv([]).encode()})
        return run

    @classmethod
    def open(cls, folder: Path) -> "Run":
        """Open an existing run.

        Raises:
            StoreError: the folder contains no run, or the run has another schema version or was edited.
        """
        folder = Path(folder)
        if not (folder / RUN).is_file():
            raise StoreError(
                "no run here: run.json is missing", where=folder, next_step="name a folder that `make reproduce` created"
            )
        run = cls(folder)
        schema = run.information().get("schema")
        if schema != SCHEMA_VERSION:
            remedy = "read it with the version of Hyperion that wrote it"
            raise StoreError(
                f"run has schema {schema}, but this version reads schema {SCHEMA_VERSION}", where=folder / RUN, next_step=remedy
            )
        return run

    def information(self) -> dict:
        """Return the contents of run.json.

        Raises:
            HyperionError: the file is damaged, or a field that Hyperion reads has another type.
        """
        content = self.document(RUN)
        # Only the form is checked. The dict itself is returned, because it has more fields than Hyperion reads.
        read_form(_Information, content, RUN, extra=True)
        return content

    def rows(self, notebook: str | None = None, experiment: str | None = None) -> list[Row]:
        """Return the validated rows of the run, or only the rows of a notebook or an experiment.

        Args:
            notebook: if given, return only rows of this notebook.
            experiment: if given, return only rows of this experiment.

        Raises:
            RowError: a row breaks the rules of its metric, or two rows have the same key.
        """
        text = _text(read_verified(self.folder, ROWS), self.folder / ROWS)
        rows = rows_from_csv(text, where=self.folder / ROWS, metrics=self.own_metrics())
        return [
            row
            for row in rows
            if (notebook is None or row.notebook == notebook) and (experiment is None or row.experiment == experiment)
        ]

    def own_metrics(self) -> dict[str, list[Metric]]:
        """Return the definitions of this run's own metrics, which are the metrics that the library does not define.

        The definitions apply only to the rows of this run. A registered metric of the same name is a different metric and is not
        changed.

        Returns:
            A dict that maps "notebook/experiment" to the metrics of this experiment.

        Raises:
            HyperionError: the file is damaged, does not have the expected form, or redefines a built-in metric.
        """
        return own_metrics_from_json(self._json_of(METRICS), self.folder / METRICS)

    def samples(self, notebook: str, experiment: str) -> "pd.DataFrame":
        """Return the raw samples and curves that an experiment recorded.

        Raises:
            StoreError: the run has no such samples, or the file is damaged, is too large, or contains other types than numbers,
                dates, strings and lists of numbers.
        """
        name = samples_name(notebook, experiment)
        if not (self.folder / name).exists() and name not in (names := manifest_names(self.folder)):
            known = [Path(one).stem for one in names if one.startswith("samples/")]
            raise StoreError(
                f"the run has no samples of the experiment {experiment!r} in the notebook {notebook!r}",
                where=self.folder,
                next_step=f"use the notebook and the experiment of {nearest_first(f'{notebook}.{experiment}', known)}",
            )
        return read_samples(read_verified(self.folder, name), self.folder / name)

    def record(
        self,
        notebook: str,
        experiment: str,
        rows: Iterable[Row],
        samples: "pd.DataFrame",
        *,
        input_hash: str,
        source: str = "",
        data: dict | None = None,
        provenance: dict | None = None,
        environment: dict | None = None,
        started_at: str = "",
    ) -> None:
        """Store the rows and the samples of a finished experiment. They replace earlier rows and samples of this experiment.

        Args:
            notebook, experiment: names of the notebook and the experiment.
            rows: rows of the experiment.
            samples: raw samples and curves of the experiment.
            input_hash: hash of everything on which the result depends. The method `finished` returns the stored hash.
            source: the data source that the experiment used; "" if it used no data set.
            data: identity of the data sets that the experiment used, as `data_identity` returns it.
            provenance: conditions of the measurement: profile, seed, sizes, versions and source, as JSON values.
            environment: full description of the machine and the software. Each environment is stored once, and
                provenance["environment"] is its digest.
            started_at: UTC time before the first sample, from `utc_now`. `verify` compares it with the times of the predictions.
                "" if it is unknown.

        Raises:
            RowError: a row breaks the rules of its metric, belongs to another experiment, or occurs twice. Nothing is stored in
                this case.
            StoreError: the source is not a text. Nothing is stored in this case either.
        """
        require_file_names(notebook, experiment)
        # Rows are checked before the lock is taken, so that a wrong row stores nothing.
        rows = _checked(notebook, experiment, rows)
        entry = {"input_hash": input_hash, "rows": len(rows), "source": source, "data": data or {}}
        _require_readable(_Finished, entry, f"{notebook} / {experiment}", "correct the Result of this experiment")
        # `commit` takes the lock of the folder for each write. This second lock covers both reading the old rows and writing the
        # new ones, so that two writers cannot overwrite each other's rows.
        with locked(self.folder, WRITER_LOCK, create=True):
            if started_at:
                predicted = [p for p in self.predictions(notebook, experiment) if p.input_hash == input_hash]
                entry |= {"started_at": started_at, "predictions": predictions_digest(predicted)}
            entry["provenance"], files = dict(provenance or {}), {}
            if environment is not None:
                # All experiments of one session share the environment. It is stored once, under its digest.
                digest = entry["provenance"]["environment"] = environment_digest(environment)
                files[ENVIRONMENTS] = _json(self.environments() | {digest: environment})
            encoded = encode_samples(samples, f"{notebook} / {experiment}")
            read_samples(encoded, samples_name(notebook, experiment))  # raises an error for samples that cannot be read
            self.write(
                files
                | self._rows_files(notebook, experiment, rows)
                | {
                    samples_name(notebook, experiment): encoded,
                    EXPERIMENTS: _json(self.experiments() | {f"{notebook}/{experiment}": entry}),
                }
            )
        # This comes after the transaction, because the driver must not count an experiment whose rows are not stored.
        note_experiment(notebook, experiment, MEASURED)

    def confirm(self, notebook: str, experiment: str, rows: Iterable[Row]) -> None:
        """Report to the driver that stored rows of an experiment are reused, and update their predictions.

        `rows` contains the reused rows with the new predictions. In all other columns, they must equal the stored rows.
        """
        rows = _checked(notebook, experiment, rows)
        with locked(self.folder, WRITER_LOCK, create=True):
            if rows != self.rows(notebook, experiment):
                self.write(self._rows_files(notebook, experiment, rows))
        note_experiment(notebook, experiment, KEPT)

    def finished(self, notebook: str, experiment: str) -> dict | None:
        """Return the entry of a finished experiment, or None if the experiment is not finished.

        The entry is a dict with the keys "input_hash", "rows", "source", "data" and "provenance". The provenance contains the
        profile, the seed and the environment of the experiment, which may differ from those in run.json.
        """
        return self.experiments().get(f"{notebook}/{experiment}")

    def environments(self) -> dict[str, dict]:
        """Return a dict that maps the digest of each environment in which this run was measured to the environment.

        The provenance of an experiment contains the digest of its environment.

        Raises:
            HyperionError: the file is damaged, or an environment does not match its digest.
        """
        environments = self._json_of(ENVIRONMENTS)
        read_form(dict[str, _Environment], environments, ENVIRONMENTS, extra=True)
        for digest, environment in environments.items():
            if digest != environment_digest(environment):
                fault = f"environment {digest!r:.40} does not match its digest: it was edited"
                raise StoreError(fault, where=self.folder / ENVIRONMENTS, next_step=RESTORE)
        return environments

    def predict(self, predictions: Iterable[Prediction]) -> None:
        """Store predictions before the first sample. Stored predictions do not change, with two exceptions.

        First, a missing guess is added if the experiment is not finished. Second, the estimates of a configuration are replaced
        if the rows from which they were computed have changed. The reader's guess is kept.

        Raises:
            StoreError: a field of a prediction has the wrong type, or a number is not finite. Nothing is stored in this case.
        """
        predictions = list(predictions)
        for p in predictions:
            where = f"{p.notebook} / {p.experiment} / {p.variant} / {p.metric}"
            _require_readable(Prediction, asdict(p), where, "correct the forecast of this experiment")
        with locked(self.folder, WRITER_LOCK, create=True):
            written = before = self.predictions()
            experiments = self.experiments()
            for prediction in predictions:
                finished = experiments.get(f"{prediction.notebook}/{prediction.experiment}")
                if finished is not None and finished["input_hash"] == prediction.input_hash:
                    prediction = replace(prediction, guess=None)  # the experiment is already measured, so a guess is too late
                written = with_prediction(written, prediction.sealed() if prediction.made_at else prediction)
            # A notebook predicts when it shows the predictions, and again when it runs the experiment.
            if written != before or PREDICTIONS not in manifest_names(self.folder):
                self.write({PREDICTIONS: _json([asdict(p) for p in written])})

    def predictions(self, notebook: str | None = None, experiment: str | None = None) -> list[Prediction]:
        """Return the stored predictions of the run, or only those of the given notebook or experiment."""
        if PREDICTIONS not in manifest_names(self.folder):
            return []
        predictions = read_form(list[Prediction], self.document(PREDICTIONS), PREDICTIONS)
        for p in (p for p in predictions if (p.digest or p.made_at) and p.digest != p.sealed().digest):
            fault = f"the prediction of {p.metric} by {p.experiment!r:.60} does not match its digest: it was edited"
            raise StoreError(fault, where=self.folder / PREDICTIONS, next_step=RESTORE)
        return [
            p
            for p in predictions
            if (notebook is None or p.notebook == notebook) and (experiment is None or p.experiment == experiment)
        ]

    def hashes(self) -> dict[str, str]:
        """Return a dict that maps the name of each file in the manifest to its sha256."""
        with locked(self.folder):
            return {name: entry["sha256"] for name, entry in read_manifest(self.folder).entries.items()}

    def write(self, contents: dict[str, bytes]) -> None:
        """Add or replace files of the run as one transaction. The paths are relative to the folder of the run."""
        commit(self.folder, contents)

    def read(self, name: str) -> bytes:
        """Return the verified content of a file of the run."""
        return read_verified(self.folder, name)

    def document(self, name: str) -> Any:
        """Return the parsed content of a JSON file of the run, after verifying the file.

        Raises:
            StoreError: the file is damaged, is not JSON, or is larger than 64 MiB.
        """
        content = read_verified(self.folder, name)
        if len(content) > DOCUMENT_BYTES:
            raise StoreError(
                f"{len(content)} bytes of JSON are more than Hyperion writes", where=self.folder / name, next_step=RESTORE
            )
        return parse_json(content, StoreError, RESTORE, where=self.folder / name)

    def verify(self) -> list[str]:
        """Verify that files match the manifest, that rows follow their rules, and that the JSON files agree with each other.

        `hyperion.results.evidence.verify_run` also recomputes rows from their samples.

        Returns:
            The names of the verified files.

        Raises:
            HyperionError: a file is damaged or a rule is broken. The message describes the first error.
        """
        names = verify_folder(self.folder)
        rows, experiments, environments = self.rows(), self.experiments(), self.environments()
        used = {(f"{row.notebook}/{row.experiment}", row.metric) for row in rows}
        for name, metrics in self.own_metrics().items():
            if unused := [metric.name for metric in metrics if (name, metric.name) not in used]:
                fault = f"{METRICS} defines {unused[0]} for {name!r:.200}, which has no row of this metric in {ROWS}"
                raise StoreError(fault, where=self.folder / METRICS, next_step=RESTORE)
        self.information()  # reading this file validates it
        self._verify_predictions(experiments)
        counted = Counter(f"{row.notebook}/{row.experiment}" for row in rows)
        for name, entry in experiments.items():
            if entry["rows"] != counted[name]:
                fault = f"{name} has {counted[name]} rows in {ROWS}, but {EXPERIMENTS} says {entry['rows']}"
                raise StoreError(fault, where=self.folder / ROWS, next_step=RESTORE)
            digest = entry.get("provenance", {}).get("environment")
            if digest is not None and digest not in environments:
                fault = f"{name} was measured in environment {digest!r:.40}, which {ENVIRONMENTS} lacks"
                raise StoreError(fault, where=self.folder / EXPERIMENTS, next_step=RESTORE)
        if unknown := sorted(counted.keys() - experiments.keys()):
            fault = f"{unknown[0]} has rows in {ROWS} and no entry in {EXPERIMENTS}"
            raise StoreError(fault, where=self.folder / ROWS, next_step=RESTORE)
        return names

    def contents_without(self, notebooks: Collection[str]) -> dict[str, bytes]:
        """Verify the run, and return its files without everything that belongs to the given notebooks.

        Pictures are left out too if a notebook is left out, because they may show its rows.

        Returns:
            A dict that maps the path of each file, relative to the folder of the run, to its content.
        """
        contents = {name: self.read(name) for name in self.verify()}
        if not notebooks:
            return contents
        experiments = {name: entry for name, entry in self.experiments().items() if name.partition("/")[0] not in notebooks}
        rows = [row for row in self.rows() if row.notebook not in notebooks]
        predictions = [asdict(p) for p in self.predictions() if p.notebook not in notebooks]
        of_these = tuple(f"{folder}/{notebook}." for folder in ("samples", "notebooks") for notebook in notebooks)
        contents = {name: content for name, content in contents.items() if not name.startswith((*of_these, "benchmarks/"))}
        contents |= {ROWS: rows_to_csv(rows).encode(), EXPERIMENTS: _json(experiments), PREDICTIONS: _json(predictions)}
        if METRICS in contents:
            contents[METRICS] = _json(own_metrics_to_json(own_metrics(rows)))
        return contents

    def _verify_predictions(self, experiments: dict[str, dict]) -> None:
        """Check that the predictions of each experiment are those that were stored before its first sample.

        An experiment is not checked if one of its predictions is marked as made after the measurement, which happens if rows on
        which it depends have changed since.

        Raises:
            StoreError: a prediction is later than the first sample, or the predictions are not those that were stored.
        """
        predictions = self.predictions()
        for name, entry in experiments.items():
            # Runs of earlier versions have no start times to compare.
            if not entry.get("started_at"):
                continue
            predicted = [p for p in predictions if (f"{p.notebook}/{p.experiment}", p.input_hash) == (name, entry["input_hash"])]
            if any(p.basis.endswith(LATE) for p in predicted):
                continue
            # ISO 8601 times in UTC with a fixed number of digits can be compared as strings.
            late = next((p for p in predicted if p.made_at > entry["started_at"]), None)
            fault = f"a prediction of {name} was made at {late.made_at}, after the first sample" if late else ""
            if not fault and predictions_digest(predicted) != entry.get("predictions"):
                fault = f"the predictions of {name} are not those that were stored before its first sample"
            if fault:
                raise StoreError(fault, where=self.folder / PREDICTIONS, next_step=RESTORE)

    def _rows_files(self, notebook: str, experiment: str, rows: list[Row]) -> dict[str, bytes]:
        """Return the new content of rows.csv and metrics.json. The given rows replace earlier rows of the experiment."""
        rows = [row for row in self.rows() if (row.notebook, row.experiment) != (notebook, experiment)] + rows
        metrics, files = own_metrics(rows), {ROWS: rows_to_csv(rows).encode()}
        if metrics or METRICS in manifest_names(self.folder):
            files[METRICS] = _json(own_metrics_to_json(metrics))
        return files

    def experiments(self) -> dict[str, dict]:
        """Return a dict with one entry for each experiment that is stored in this run.

        The keys have the form "notebook/experiment". Each value is a dict with information about the stored experiment, such as
        the number of its rows. `finished` describes its fields.

        Raises:
            HyperionError: the file is damaged, or an entry does not have the expected fields.
        """
        found = self._json_of(EXPERIMENTS)
        read_form(dict[str, _Finished], found, EXPERIMENTS, extra=True)
        for name in found:
            # `[::2]` drops the separator.
            require_file_names(*name.partition("/")[::2])
        return found

    def _json_of(self, name: str) -> dict:
        return self.document(name) if name in manifest_names(self.folder) else {}


def environment_digest(environment: dict) -> str:
    """Return the digest of an environment (16 hexadecimal digits), which environments.json and provenances contain."""
    return hashlib.sha256(_json(environment)).hexdigest()[:16]


def samples_name(notebook: str, experiment: str) -> str:
    """Return the path of an experiment's samples file, relative to the folder of the run."""
    return f"samples/{notebook}.{experiment}.parquet"


def _checked(notebook: str, experiment: str, rows: Iterable[Row]) -> list[Row]:
    rows = list(rows)
    for row in rows:
        row.validate()
        if (row.notebook, row.experiment) != (notebook, experiment):
            raise RowError(
                f"row belongs to {row.notebook}/{row.experiment}",
                where=f"{notebook}/{experiment}",
                next_step="make the rows of an experiment with its own context, or state its notebook and its experiment",
            )
    counts = Counter(row.key for row in rows)
    if twice := next((row for row in rows if counts[row.key] > 1), None):
        shown = " ".join(filter(None, (twice.variant, twice.dtype, str(twice.params or ""), twice.metric)))
        raise RowError(
            f"{counts[twice.key]} rows have the same key: {shown}",
            where=f"{notebook}/{experiment}",
            next_step="give the rows different variants, dtypes or params",
        )
    return rows


def utc_now() -> str:
    """Return the current UTC time in ISO 8601 with milliseconds. Such strings sort by time."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _require_readable(form: type, value: dict, where: str, next_step: str) -> None:
    # Each file of a run is read as a whole, so a single entry that its reader refuses would make the whole run unreadable.
    try:
        read_form(form, value, form.__name__.strip("_").lower())
    except FieldError as error:
        raise StoreError(error.what, where=where, next_step=next_step) from error


def _text(content: bytes, where: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise StoreError(f"not UTF-8: {error}", where=where, next_step=RESTORE) from error


def _json(value) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
