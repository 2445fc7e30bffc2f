"""Metric for the overhead of `hyperion monitor` on the time of a training step."""

from hyperion.results import Metric

METRICS = (
    Metric(
        "monitor_overhead",
        "fraction",
        "lower",
        "mean step time while `hyperion monitor` runs, divided by that while it is stopped, minus 1",
        True,
        True,
    ),
)
