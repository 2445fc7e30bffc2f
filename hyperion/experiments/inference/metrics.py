"""Metrics of this subject that the library does not have."""

from hyperion.experiments.inference import metrics_quantization
from hyperion.results import Metric, register_metric

LATENCIES = {0.5: "latency_p50_s", 0.95: "latency_p95_s", 0.99: "latency_p99_s"}
_OWN = (
    *(
        Metric(name, "s", "lower", f"{100 * share:g}th percentile of the time of a call on the host's clock", needs_interval=True)
        for share, name in LATENCIES.items()
    ),
    Metric("export_time_s", "s", "lower", "time to export a model, and to compile the exported graph into a file"),
    Metric("kernels_per_call", "items", "lower", "kernels that one call launches; on a CPU, operators that compute"),
    Metric(
        "error_over_tolerance",
        "1",
        "lower",
        "largest error against float64, divided by a tolerance that is derived from the rounding of inputs; at most 1 passes",
    ),
)
METRICS = (*metrics_quantization.METRICS, *map(register_metric, _OWN))
