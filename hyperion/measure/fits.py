"""Fit the terms of a time, such as a latency and a time per byte, to measured times."""

import numpy as np


def fit_nonnegative(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the factor of each column, such that the sum of the scaled columns is close to the measured times.

    The fit minimizes the squares of the relative errors. With absolute errors, the longest times would dominate it. No factor is
    negative, because a negative latency or time per byte has no meaning.

    Args:
        columns: one row for each measurement, and one column for each term, such as 1 for a latency and the number of bytes.
        seconds: measured times. All of them are positive.
    """
    # Imported here, because the import takes half a second, which would delay every worker process.
    from scipy.optimize import nnls

    # The columns can differ by many orders of magnitude (1 and microseconds). Scaling them keeps the problem well conditioned.
    scale = columns.max(axis=0)
    scale[scale == 0] = 1.0
    # Dividing each row by its time turns the residuals into relative errors.
    return nnls(columns / scale / seconds[:, None], np.ones(len(seconds)))[0] / scale
