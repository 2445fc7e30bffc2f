"""Metrics for the comparison of frameworks: differences from the plain loop, energy per token, and parts of a step."""

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
    Metric(
        "traced_step_time_s", "s", "lower", "one optimizer step under the profiler, mean over the traced steps", needs_check=True
    ),
    Metric("tracing_slowdown", "ratio", "lower", "traced step time over the median of the timed steps of the same launch"),
    Metric("part_time_s", "s", "lower", "time of a part of a traced step; all parts add up to the step", needs_check=True),
    Metric("part_difference_s", "s", "none", "time of a part of a traced step minus that of the plain loop"),
    Metric("kernel_time_s", "s", "lower", "time of a kernel in a traced step; on a CPU, of an operator without those it calls"),
)
