"""Predictions as they are shown before the first sample: what is asked, the guess, the estimate, and what it rests on."""

import pandas as pd

from hyperion.figures.formats import number
from hyperion.figures.tables import identity_of, text_of, unit_mark
from hyperion.results import metric_named


def prediction_table(predictions: pd.DataFrame) -> pd.DataFrame:
    """One line a prediction: what tells them apart, your guess, the library's estimate, both with unit.

    Predictions with neither are left out, except for the first, which the reader is asked to guess.

    Args:
        predictions: columns variant, dtype, params (dict), metric, guess, estimate, basis.
    """
    lines, identities = [], []
    for position, line in enumerate(predictions.itertuples(index=False)):
        guess, estimate = _known(line.guess), _known(line.estimate)
        if position and guess is None and estimate is None:
            continue
        identities.append(identity_of(line.variant, line.dtype, None, line.params))
        unit = unit_mark(metric_named(line.metric).unit)
        lines.append(
            {"what": f"{line.metric}{unit}", "your guess": number(guess) or "none", "estimate": number(estimate) or "none"}
        )
    identity = pd.DataFrame(identities, dtype=object).map(text_of)
    told = [column for column in identity if identity[column].ne("").any() and (column != "rank")]
    return pd.concat([identity[told], pd.DataFrame(lines)], axis=1)


def prediction_basis(predictions: pd.DataFrame) -> list[str]:
    """One sentence a basis: what the estimates rest on, or why there is none, and for which formats where that differs."""
    groups: dict[tuple[str, bool], dict[str, None]] = {}
    for line in predictions.itertuples(index=False):
        known = _known(line.estimate) is not None
        basis = line.basis.removeprefix("no estimate: ").removeprefix("no limit: ")
        groups.setdefault((basis, known), {})[line.dtype or line.variant] = None
    everyone = len(groups) == 1
    return [
        ("Estimate" if known else "No estimate") + ("" if everyone else f" for {', '.join(names)}") + f": {basis}."
        for (basis, known), names in groups.items()
    ]


def _known(value) -> float | None:
    """A number, or None where pandas keeps NaN for an absent one."""
    return None if value is None or value != value else value
