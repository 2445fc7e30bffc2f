"""Flat tables of a run: CSV files with one line per measured point.

The file names and the columns are those that the project's documents specify:

    hardware/precision_results.csv       Size, Precision, Time (s), TFLOPS: square products with cold caches
    hardware/bandwidth_results.csv       Size (M elements), Bandwidth (GB/s): z = x + y in fp32 with cold caches
    scaling/<model>_batch_scaling.csv    one line per batch; a batch that does not fit has the words `out of memory`
    scaling/scaling_analysis.csv         speed-up and efficiency by number of GPUs; `missing` stands for what was not measured
    training/epoch_metrics.csv           one line per epoch, split and rank; a cell is empty if the row does not exist

and one more file:

    frameworks/kernels.csv               the kernels of a traced step that take the most time, for each training framework

The function `flat_tables` in the figures.py of a subject makes its tables. All values come from rows, so these tables contain
nothing that a run did not measure.
"""

from collections.abc import Sequence

import pandas as pd

from hyperion.chapter.subjects import subjects
from hyperion.results import Row


def flat_tables(runs: Sequence[Sequence[Row]]) -> dict[str, pd.DataFrame]:
    """Return the tables of all subjects for which there are rows, as {path: table}.

    Args:
        runs: rows of each run. The lines of several runs, such as launches, are concatenated. scaling_analysis.csv instead
            contains the mean over the runs, their number and the standard deviation.
    """
    tables: dict[str, pd.DataFrame] = {}
    for subject in subjects():
        tables |= getattr(subject.figures, "flat_tables", _no_tables)(runs)
    return {path: table for path, table in tables.items() if len(table)}


def _no_tables(runs: Sequence[Sequence[Row]]) -> dict[str, pd.DataFrame]:
    return {}
