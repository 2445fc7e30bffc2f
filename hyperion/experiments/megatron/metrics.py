"""Metrics of the chapter on megatron-core."""

from hyperion.results import Metric

METRICS = (
    Metric(
        "bubble_fraction",
        "fraction",
        "lower",
        "fraction of a step in which a stage runs neither a forward nor a backward pass, as the mean over the stages",
        False,
        True,
    ),
    Metric("logit_change", "fraction", "none", "largest change of a logit, divided by the largest logit"),
    Metric("training_bytes", "B", "lower", "bytes of state and activations on the fullest rank, computed and not measured"),
    Metric("model_state_bytes", "B", "lower", "bytes of parameters, gradients and moments of Adam on a rank", needs_check=True),
)
