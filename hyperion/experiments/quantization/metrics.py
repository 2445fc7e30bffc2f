"""Metrics of quantised weights, decoding, and training with few bits."""

from hyperion.results import Metric

METRICS = (
    Metric("weight_bytes", "B", "lower", "bytes of the stored weights of all quantised layers, with scales", needs_check=True),
    Metric(
        "decode_time_s",
        "s",
        "lower",
        "one token of a greedy decode of one sequence with a cache, median",
        needs_limit=True,
        needs_interval=True,
        needs_check=True,
    ),
    Metric(
        "decode_bandwidth_share",
        "fraction",
        "higher",
        "bytes of weights and cache over the time of a token, divided by the run's bandwidth of a copy of the largest arrays",
        needs_limit=True,
        needs_interval=True,
    ),
    Metric("optimizer_state_bytes", "B", "lower", "bytes of the tensors in the state of an optimizer", needs_check=True),
    Metric(
        "loss_difference_nats",
        "nats",
        "lower",
        "mean training loss of a variant minus that of its twin, on the same batches",
        needs_interval=True,
    ),
)
