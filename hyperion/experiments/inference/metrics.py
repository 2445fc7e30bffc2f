"""Metrics of runtimes. `perplexity_ratio` and the latencies are also metrics of quantised weights."""

from hyperion.results import Metric
from hyperion.workloads.percentiles import LATENCIES

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
)
