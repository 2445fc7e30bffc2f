"""Results: rows and their rules, run folders on disk, statistics, and comparison of runs. Does not import torch."""

from hyperion.results.circumstances import Circumstance, circumstances
from hyperion.results.compare import VERDICTS, Comparison, compare, relaunches, sensitivity, why_indicative
from hyperion.results.evidence import verify_run
from hyperion.results.execution import must_remeasure
from hyperion.results.files import StoreError, write_atomically
from hyperion.results.metrics import BUSY_GPU, REGISTRY, Metric, metric_named, register_metric
from hyperion.results.places import find_run, find_runs, is_run, new_run_folder, set_latest
from hyperion.results.predictions import Prediction
from hyperion.results.rows import SCHEMA_VERSION, Row, RowError, rows_from_csv, rows_to_csv
from hyperion.results.statistics import (
    Estimate,
    estimates_of_medians,
    independent_ratio_estimate,
    mean_estimate,
    median_estimate,
    nearest_rank,
    proportion_estimate,
    ratio_estimate,
)
from hyperion.results.store import Run

__all__ = [
    "BUSY_GPU",
    "REGISTRY",
    "SCHEMA_VERSION",
    "VERDICTS",
    "Circumstance",
    "Comparison",
    "Estimate",
    "Metric",
    "Prediction",
    "Row",
    "RowError",
    "Run",
    "StoreError",
    "circumstances",
    "compare",
    "estimates_of_medians",
    "find_run",
    "find_runs",
    "independent_ratio_estimate",
    "is_run",
    "mean_estimate",
    "median_estimate",
    "metric_named",
    "must_remeasure",
    "nearest_rank",
    "new_run_folder",
    "proportion_estimate",
    "ratio_estimate",
    "register_metric",
    "relaunches",
    "rows_from_csv",
    "rows_to_csv",
    "sensitivity",
    "set_latest",
    "verify_run",
    "why_indicative",
    "write_atomically",
]
