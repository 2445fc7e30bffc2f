"""Metrics of the chapter on megatron-core."""

from hyperion.results import Metric

METRICS = (
    Metric(
        "bubble_fraction",
        "fraction",
        "lower",
        "share of a step beyond the time of its micro-batches: 1 - m x slope of the step time over m, divided by the step time",
        False,
        True,
    ),
    Metric("logit_change", "fraction", "none", "largest change of a logit, divided by the largest logit"),
    Metric("model_state_bytes", "B", "lower", "bytes of parameters, gradients and moments of Adam on a rank", needs_check=True),
)
