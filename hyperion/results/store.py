"""A run's folder: rows, samples, predictions and finished experiments, each change one transaction."""

import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from hyperion.results.files import WRITER_LOCK, StoreError, commit, locked, read_verified, verify_folder, vouched_names
from hyperion.results.rows import SCHEMA_VERSION, Row, RowError, rows_from_csv, rows_to_csv

ROWS, RUN, EXPERIMENTS, PREDICTIONS = "rows.csv", "run.json", "experiments.json", "predictions.json"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A value foretold before the first sample: the reader's guess and the library's estimate, either of them None.

    The fields notebook to metric are those of the row it foretells.

    Args:
        basis: what the estimate was computed from (ceilings and shapes), or why there is none.
        input_hash: hash of what the experiment depends on; another configuration is another prediction.
    """

    notebook: str
    experiment: str
    variant: str
    dtype: str
    params: dict
    metric: str
    guess: float | None
    estimate: float | None
    basis: str
    input_hash: str


class Run:
    """One folder of results. Every method reads or writes whole, verified files; several processes may share the folder."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    @classmethod
    def create(cls, folder: Path, information: dict) -> "Run":
        """Make a run folder with its run.json (environment, versions, hashes; JSON-able). An existing run is refused.

        Raises:
            StoreError: the folder is not writable, or already holds a run.
        """
        folder = Path(folder)
        if (folder / RUN).exists():
            raise StoreError(
                "folder already holds a run", where=folder, next_step="name a new folder, or continue this run"
            )
        run = cls(folder)
        run.write({RUN: _json({"schema": SCHEMA_VERSION, **information}), ROWS: rows_to_csv([]).encode()})
        return run

    @classmethod
    def open(cls, folder: Path) -> "Run":
        """An existing run.

        Raises:
            StoreError: there is no run in the folder, or it was written with another schema, or edited.
        """
        folder = Path(folder)
        if not (folder / RUN).is_file():
            raise StoreError(
                "no run here: run.json is missing", where=folder, next_step="name a folder made by `make reproduce`"
            )
        run = cls(folder)
        schema = run.information().get("schema")
        if schema != SCHEMA_VERSION:
            remedy = "read it with the version of Hyperion that wrote it"
            raise StoreError(f"run has schema {schema}, this is {SCHEMA_VERSION}", where=folder / RUN, next_step=remedy)
        return run

    def information(self) -> dict:
        """The contents of run.json."""
        return json.loads(read_verified(self.folder, RUN))

    def rows(self, notebook: str | None = None, experiment: str | None = None) -> list[Row]:
        """Validated rows, of one notebook or experiment if named."""
        rows = rows_from_csv(read_verified(self.folder, ROWS).decode(), where=self.folder / ROWS)
        return [
            row
            for row in rows
            if (notebook is None or row.notebook == notebook) and (experiment is None or row.experiment == experiment)
        ]

    def samples(self, notebook: str, experiment: str) -> pd.DataFrame:
        """Raw samples and curves of an experiment, as it recorded them."""
        return pd.read_parquet(io.BytesIO(read_verified(self.folder, _samples_name(notebook, experiment))))

    def record(
        self,
        notebook: str,
        experiment: str,
        rows: Iterable[Row],
        samples: pd.DataFrame,
        *,
        input_hash: str,
        source: str = "",
    ) -> None:
        """Store a finished experiment: its rows replace those of an earlier go at it, its samples lie beside.

        Args:
            input_hash: hash of everything the result depends on; `finished` answers by it.
            source: the data source the experiment took, if any.

        Raises:
            RowError: a row breaks its metric's rules, names another experiment, or occurs twice. Nothing is stored then.
        """
        rows = list(rows)
        for row in rows:
            row.validate()
            if (row.notebook, row.experiment) != (notebook, experiment):
                raise RowError(f"row belongs to {row.notebook}/{row.experiment}", where=f"{notebook}/{experiment}")
        if len({row.key for row in rows}) != len(rows):
            raise RowError(
                "two rows with the same key", where=f"{notebook}/{experiment}", next_step="tell them apart in params"
            )
        with locked(self.folder, WRITER_LOCK, create=True):
            kept = [row for row in self.rows() if (row.notebook, row.experiment) != (notebook, experiment)]
            finished = self._experiments() | {
                f"{notebook}/{experiment}": {"input_hash": input_hash, "rows": len(rows), "source": source}
            }
            buffer = io.BytesIO()
            samples.to_parquet(buffer, index=False)
            self.write(
                {
                    _samples_name(notebook, experiment): buffer.getvalue(),
                    ROWS: rows_to_csv(kept + rows).encode(),
                    EXPERIMENTS: _json(finished),
                }
            )

    def finished(self, notebook: str, experiment: str) -> dict | None:
        """{input_hash, rows, source} of a stored experiment, None when it was not finished."""
        return self._experiments().get(f"{notebook}/{experiment}")

    def predict(self, predictions: Iterable[Prediction]) -> None:
        """Write predictions down, before the first sample. A prediction once written for a variant is never changed."""
        with locked(self.folder, WRITER_LOCK, create=True):
            written = {_prediction_key(p): p for p in self.predictions()}
            for prediction in predictions:
                written.setdefault(_prediction_key(prediction), prediction)
            self.write({PREDICTIONS: _json([asdict(p) for p in written.values()])})

    def predictions(self, notebook: str | None = None, experiment: str | None = None) -> list[Prediction]:
        """Predictions written so far, of one notebook or experiment if named."""
        if PREDICTIONS not in vouched_names(self.folder):
            return []
        predictions = [Prediction(**entry) for entry in json.loads(read_verified(self.folder, PREDICTIONS))]
        return [
            p
            for p in predictions
            if (notebook is None or p.notebook == notebook) and (experiment is None or p.experiment == experiment)
        ]

    def write(self, contents: dict[str, bytes]) -> None:
        """Add or replace files of the run (paths relative to it) as one transaction."""
        commit(self.folder, contents)

    def read(self, name: str) -> bytes:
        """A verified file of the run."""
        return read_verified(self.folder, name)

    def verify(self) -> list[str]:
        """Check every file against the manifest and every row against its rules; return the names checked."""
        names = verify_folder(self.folder)
        self.rows()
        return names

    def _experiments(self) -> dict:
        if EXPERIMENTS not in vouched_names(self.folder):
            return {}
        return json.loads(read_verified(self.folder, EXPERIMENTS))


def _samples_name(notebook: str, experiment: str) -> str:
    return f"samples/{notebook}.{experiment}.parquet"


def _prediction_key(p: Prediction) -> tuple:
    params = json.dumps(p.params, sort_keys=True)
    return (p.notebook, p.experiment, p.variant, p.dtype, params, p.metric, p.input_hash)


def _json(value) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
