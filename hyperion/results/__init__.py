"""Results: rows and their rules, runs on disk, statistics, comparison. Knows no torch."""

from hyperion.results.compare import Comparison, compare, relaunches, sensitivity
from hyperion.results.evidence import verify_run
from hyperion.results.execution import must_remeasure
from hyperion.results.files import StoreError, write_atomically
from hyperion.results.folders import find_run, new_run_folder, set_latest
from hyperion.results.metrics import REGISTRY, Metric, metric_named
from hyperion.results.rows import SCHEMA_VERSION, Row, RowError, rows_from_csv, rows_to_csv
from hyperion.results.statistics import (
    Estimate,
    estimates_of_medians,
    holm,
    independent_ratio_estimate,
    mean_estimate,
    median_estimate,
    proportion_estimate,
    ratio_estimate,
    welch_p_value,
)
from hyperion.results.store import Prediction, Run

__all__ = [
    "REGISTRY", "SCHEMA_VERSION", "Comparison", "Estimate", "Metric", "Prediction", "Row", "RowError", "Run", "StoreError",
    "compare", "estimates_of_medians", "find_run", "holm", "independent_ratio_estimate", "mean_estimate", "median_estimate",
    "metric_named", "must_remeasure", "new_run_folder", "proportion_estimate", "ratio_estimate", "relaunches", "rows_from_csv",
    "rows_to_csv", "sensitivity", "set_latest", "verify_run", "welch_p_value", "write_atomically",
]  # fmt: skip
