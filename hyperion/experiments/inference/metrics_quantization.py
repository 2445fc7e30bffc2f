"""Metrics of quantised models, of decoding, and of optimizers with 8-bit states."""

from hyperion.results import Metric, register_metric

METRICS = tuple(
    register_metric(metric)
    for metric in (
        Metric(
            "perplexity_ratio",
            "ratio",
            "lower",
            "perplexity of the quantised model over that of the original, from paired losses of the same windows",
            needs_interval=True,
        ),
        Metric(
            "accuracy_difference",
            "fraction",
            "higher",
            "accuracy of the quantised model minus that of the original, on the same images",
            needs_interval=True,
        ),
        Metric(
            "weight_bytes", "B", "lower", "bytes of the stored weights of all quantised layers, with scales", needs_check=True
        ),
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
            "bytes of weights and cache over the time of a token, divided by the run's fastest memory stream",
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
)
