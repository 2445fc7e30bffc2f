"""Predictions that were made before the first sample, and which rows they are about."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from hyperion.results.rows import Row, canonical_params

# Suffix of the basis of a prediction that was made after the measurement.
LATE = "; made after the measurement"
# Rates whose estimates were ceilings in runs of earlier versions: the roofline, the bandwidths of memory and links, and the rates
# of steps that consist only of matrix products and memory traffic at the measured ceilings.
CEILING_METRICS = ("gemm_tflops", "bandwidth_gb_s", "busbw_gb_s", "taf_tflops", "images_per_s", "tokens_per_s")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A prediction that was made before the first sample: the reader's guess and the library's estimate.

    Args:
        notebook, experiment, variant, dtype, params, metric: the columns of the predicted row.
        guess: the reader's guess; None if the reader has not guessed.
        estimate: the library's estimate; None if the library cannot predict the value.
        basis: the measured ceilings and the shapes from which the estimate was computed, or the reason why there is no
            estimate.
        input_hash: hash of the inputs of the experiment. Each configuration of an experiment has its own predictions.
        upstream_hash: digest of the earlier rows from which the estimate was computed.
        each_rank: if True, the prediction applies to the row of each individual rank. If False, it applies to rows without a
            rank, which are values of the whole run.
        ceiling: upper limit that the value cannot exceed; None if no limit is known. A ceiling is not an estimate.
        low, high: ends of the 80 % interval of the estimate; None if the library states no interval.
        made_at: UTC time at which the prediction was made, before the first sample. "" in runs of earlier versions.
        digest: hash of all other fields except the guess, which the reader may add later. "" in runs of earlier versions.
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
    upstream_hash: str = ""
    each_rank: bool = False
    ceiling: float | None = None
    low: float | None = None
    high: float | None = None
    made_at: str = ""
    digest: str = ""

    @property
    def is_ceiling(self) -> bool:
        """True if the stored estimate is a ceiling, because earlier versions stored ceilings of some rates as estimates."""
        return not self.made_at and self.estimate is not None and self.metric in CEILING_METRICS

    @property
    def known_ceiling(self) -> float | None:
        """The stored ceiling of the value, also in runs of earlier versions."""
        return self.estimate if self.is_ceiling else self.ceiling

    def sealed(self) -> "Prediction":
        """Return the prediction with its digest."""
        # The guess may be added later, so it is not part of the digest.
        fields = {name: value for name, value in asdict(self).items() if name not in ("guess", "digest")}
        for name in ("estimate", "ceiling", "low", "high"):
            # The store reads all numbers back as floats, so 0 and 0.0 must have the same digest.
            fields[name] = None if fields[name] is None else float(fields[name])
        text = json.dumps(fields, sort_keys=True, allow_nan=False)
        return replace(self, digest=hashlib.sha256(text.encode()).hexdigest()[:16])

    def predicts(self, row: Row) -> bool:
        """Return True if this is a prediction for the row.

        A prediction has only the params on which it depends. A row may have more params. A prediction for the whole run does not
        apply to the row of a single rank.
        """
        same = (self.notebook, self.experiment, self.variant, self.dtype, self.metric) == (
            row.notebook,
            row.experiment,
            row.variant,
            row.dtype,
            row.metric,
        )
        # `<=` on dict views: the row has each param of the prediction with the same value.
        return same and self.each_rank == (row.rank is not None) and self.params.items() <= row.params.items()


def predictions_digest(predictions: Iterable[Prediction]) -> str:
    """Return a hash of the digests of predictions that does not depend on their order."""
    return hashlib.sha256(" ".join(sorted(p.digest for p in predictions)).encode()).hexdigest()[:16]


def with_prediction(written: list[Prediction], new: Prediction) -> list[Prediction]:
    """Return the stored predictions with the new prediction added.

    Older predictions for the same inputs of the experiment that were computed from other rows are removed. The reader's first
    guess is kept.
    """

    def configuration(p: Prediction) -> tuple:
        return p.notebook, p.experiment, p.input_hash

    def key(p: Prediction) -> tuple:
        return configuration(p), p.variant, p.dtype, canonical_params(p.params), p.metric, p.upstream_hash

    # If the prediction is already stored, only add a missing guess.
    for place, stored in enumerate(written):
        if key(stored) == key(new):
            guess = new.guess if stored.guess is None else stored.guess
            return [*written[:place], replace(stored, guess=guess), *written[place + 1 :]]
    outdated = [p for p in written if configuration(p) == configuration(new) and p.upstream_hash != new.upstream_hash]
    guess = next((p.guess for p in outdated if p.guess is not None), new.guess)
    return [p for p in written if p not in outdated] + [replace(new, guess=guess)]
