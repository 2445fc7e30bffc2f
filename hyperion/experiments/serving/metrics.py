"""Metrics for serving: latencies, throughput, size of the cache, and memory growth of a server."""

from hyperion.results import Metric

# Rows of times that the client cannot observe have a reason that begins with this text.
NOT_OBSERVED = "not observed"
# Name of the check that compares the memory growth with its bound.
GROWTH_CHECK = "upper end of the interval, bytes for each request"
METRICS = (
    Metric(
        "ttft_s",
        "s",
        "lower",
        "time to first token: from when a request was due to its first text; percentile over requests, median over runs",
        False,
        True,
        True,
    ),
    Metric("tpot_s", "s", "lower", "time per output token after the first", True, True, True),
    Metric(
        "request_time_s",
        "s",
        "lower",
        "from when a request was due to the end of its answer; percentile over requests, median over runs",
        False,
        True,
        True,
    ),
    Metric("output_tokens_per_s", "tokens/s", "higher", "tokens of all answers over the time of a run", False, True, True),
    Metric("requests_per_s", "requests/s", "higher", "answered requests over the time of a run", False, True, True),
    Metric("start_time_s", "s", "lower", "from the start of a server to its first answer"),
    Metric("drain_time_s", "s", "lower", "from SIGTERM to the end of the server", needs_check=True),
    Metric("kv_cache_bytes", "B", "none", "bytes of the keys and values of a number of tokens", needs_check=True),
    Metric("logit_error", "1", "lower", "largest difference of bf16 logits from fp32 logits for the same tokens"),
    Metric("server_memory_bytes", "B", "lower", "resident memory of all processes of a server"),
    Metric("growth_bytes", "B", "none", "memory that a server gains with each request: slope of a line", False, True, True),
)
