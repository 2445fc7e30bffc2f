"""Metric for errors of operators and models against float64."""

from hyperion.results import Metric

METRICS = (
    Metric(
        "error_over_tolerance",
        "1",
        "lower",
        "largest error against float64, divided by a tolerance that is derived from the rounding of inputs; at most 1 passes",
    ),
)
