"""Metrics for inference that the library does not define elsewhere."""

from hyperion.results import Metric

LATENCIES = {0.5: "latency_p50_s", 0.95: "latency_p95_s", 0.99: "latency_p99_s"}
METRICS = (
    *(
        Metric(name, "s", "lower", f"{100 * share:g}th percentile of the time of a call on the host's clock", needs_interval=True)
        for share, name in LATENCIES.items()
    ),
    Metric("export_time_s", "s", "lower", "time to export a model, and to compile the exported graph into a file"),
    Metric("kernels_per_call", "items", "lower", "kernels that one call launches; on a CPU, operators that compute"),
    Metric(
        "perplexity_ratio",
        "ratio",
        "lower",
        "perplexity of the quantised model over that of the original, from paired losses of the same windows",
        needs_interval=True,
    ),
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
