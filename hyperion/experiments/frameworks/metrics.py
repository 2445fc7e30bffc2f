"""Metrics for the comparison of frameworks: differences from the plain loop, and energy per token."""

from hyperion.results import Metric

METRICS = (
    Metric("loss_difference", "nats", "lower", "largest difference of a step's loss from the plain loop", needs_check=True),
    Metric(
        "parameter_difference",
        "1",
        "lower",
        "largest difference of an element of the final state from the plain loop",
        needs_check=True,
    ),
    Metric("unequal_loss_difference", "nats", "none", "largest difference of a step's loss that unequal work causes"),
    Metric("energy_j_per_token", "J/token", "lower", "energy of the device for each trained token", False, True),
)
