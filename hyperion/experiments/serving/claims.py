"""Claims of the chapter on serving. A claim is a pair (True if the claim holds, sentence to print if it does not hold)."""

from collections.abc import Callable, Sequence

from hyperion.experiments.serving.backends import UNAVAILABLE
from hyperion.experiments.serving.kv_cache_memory import TENSORS
from hyperion.experiments.serving.metrics import GROWTH_CHECK
from hyperion.experiments.serving.server_answers import COMPARED
from hyperion.experiments.serving.server_soak import DRAIN, HANG_UPS, OVERLOAD, SOAK
from hyperion.results import Row

Claim = tuple[bool, str]

# Rows of these metrics lack a value only if a package is missing. The other metrics have rows without a value for good reasons,
# such as a percentile of too few requests.
_ALWAYS_MEASURED = ("count", "share", "output_tokens_per_s", "requests_per_s", "start_time_s", "drain_time_s")
_REASON_LENGTH = 500  # a reason may contain the end of a log
# The results that each experiment must have for a backend whose packages are installed.
_RESULTS: dict[str, dict[str, Callable[[Row], bool]]] = {
    "server_answers": {"compared answers": lambda row: row.metric == "count" and row.params.get("what") == COMPARED},
    "kv_cache_memory": {"bytes of the cache": lambda row: row.variant == TENSORS and row.value is not None},
    "server_load": {
        "throughput": lambda row: row.metric == "output_tokens_per_s",
        "an open loop": lambda row: row.metric == "requests_per_s" and "load" in row.params,
    },
    "server_soak": {
        "answered requests": lambda row: row.metric == "count" and row.variant == SOAK,
        "clients that hang up": lambda row: row.variant == HANG_UPS,
        "refused requests": lambda row: row.metric == "count" and "status" in row.params,
        "overload": lambda row: row.metric == "count" and row.variant == OVERLOAD,
        "SIGTERM": lambda row: row.metric == "count" and row.variant == DRAIN,
    },
}


def value_claims(experiment: str, rows: Sequence[Row]) -> list[Claim]:
    """Check that an experiment has all its results for each backend whose packages are installed.

    A server that does not start, a failed request or a missing proof of batching leaves a row without a value. Such a row is not
    unexpected by itself, because the reason may be a missing package, but then all rows of the backend state this reason.

    Args:
        experiment: name of an experiment of this chapter.
        rows: its rows.
    """
    present = [row for row in rows if not row.value_reason.startswith(UNAVAILABLE)]
    claims = [
        (row.value is not None, f"{row.variant}, {row.dtype}, {row.metric}: {row.value_reason:.{_REASON_LENGTH}}")
        for row in present
        if row.metric in _ALWAYS_MEASURED
    ]
    if not all(holds for holds, _ in claims):
        return claims  # the missing results have the same cause
    missing = [name for name, is_result in _RESULTS[experiment].items() if present and not any(map(is_result, present))]
    return [*claims, (not missing, f"{experiment} has no row of these results: {', '.join(missing)}")]


def growth_claims(rows: Sequence[Row]) -> list[Claim]:
    """Check that the memory of a server grows by less than the bound of its row with each request.

    The upper end of the interval is compared with the bound. A row without this check is measured for comparison only.
    """
    claims = []
    for row in rows:
        if row.metric == "growth_bytes" and row.check == GROWTH_CHECK:
            above = f"{row.check_error:,.0f} bytes for each request, allowed {row.check_tolerance:,.0f}"
            held = row.value is not None and row.ci_high is not None and row.ci_high <= (row.check_tolerance or 0)
            claims.append((held, f"{row.params['backend']}, {row.variant}: {above}"))
    return claims
