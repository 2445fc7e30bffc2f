"""Summary of the table that the marking of an exercise returns."""

import pandas as pd


def solved(score: pd.DataFrame) -> bool:
    """Return True if every answer is right."""
    return bool(score["right"].all())
