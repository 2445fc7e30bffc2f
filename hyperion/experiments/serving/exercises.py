"""Exercises for the chapter on serving: percentiles with failures, latencies during a stall, time per token, and cache size."""

from collections.abc import Callable, Sequence

import pandas as pd

from hyperion.chapter.exercises import Question, explains_errors

# 2 (keys and values) x 32 layers x 8 heads x 128 features x 2 bytes = 128 KiB per token, times 32 x 2,048 tokens.
CACHE_GIB = Question(
    2 * 32 * 8 * 128 * 2 * 32 * 2048 / 2**30,
    "2 x layers x key-value heads x features x bytes x tokens of all requests; 1 GiB is 2^30 bytes",
)


@explains_errors
def judge_percentile(my_percentile: Callable[[Sequence[float | None], float], float | None]) -> pd.DataFrame:
    """Test a function that computes a percentile of latencies.

    Args:
        my_percentile: function of (latencies in seconds, percent). The latency of a failed request is None. The function returns
            one of the latencies, or None if the run is invalid.

    Returns:
        A table with one line for each run: whether the answer is right, and what was observed.
    """
    slow: list[float | None] = [*[0.1] * 90, *[2.0] * 10]
    runs: dict[str, tuple[list[float | None], float, float | None]] = {
        "100 answers, p50": (slow, 50, 0.1),
        "100 answers, p99": (slow, 99, 2.0),
        "answers in another order, p95": ([*reversed(slow)], 95, 2.0),
        "the slow requests failed, p99": ([0.1] * 90 + [None] * 10, 99, None),
        "one request failed, p50": ([0.1] * 99 + [None], 50, None),
        "all requests failed, p50": ([None] * 10, 50, None),
    }
    lines = []
    for name, (latencies, percent, expected) in runs.items():
        try:
            answer = my_percentile(latencies, percent)
            right = answer is None if expected is None else answer is not None and abs(answer - expected) < 1e-9
            seen = "no value" if answer is None else f"{answer:g} s"
        except Exception as error:  # the reader's code may raise any exception, which counts as wrong
            right, seen = False, f"{type(error).__name__}: {error}"
        lines.append({"run": name, "right": right, "seen": seen})
    return pd.DataFrame(lines)


def stalled_server(stall_s: float = 5.0, service_s: float = 0.01, gap_s: float = 0.1, requests: int = 100) -> list[dict]:
    """Return the times of requests to a server that handles one request at a time and stalls once.

    A client with one connection sends each request when it is due, or when the previous one is answered, whichever is later. The
    server stalls during the first request.

    Returns:
        For each request: `due_s`, when it was due; `sent_s`, when it was sent; `end_s`, when it was answered. All are in seconds.
    """
    free_s, times = 0.0, []
    for number in range(requests):
        due_s = number * gap_s
        sent_s = max(due_s, free_s)
        free_s = sent_s + service_s + (stall_s if number == 0 else 0.0)
        times.append({"due_s": due_s, "sent_s": sent_s, "end_s": free_s})
    return times


@explains_errors
def judge_latency(my_latency: Callable[[float, float, float], float]) -> pd.DataFrame:
    """Test a function that computes the latency of a request in an open loop.

    Args:
        my_latency: function of (due_s, sent_s, end_s) that returns the latency in seconds.

    Returns:
        A table with one line for each server: whether the share of slow requests is right, and what was observed.
    """
    lines = []
    for name, stall_s in (("no stall", 0.0), ("a stall of 5 s", 5.0)):
        times = stalled_server(stall_s)
        slow = sum(my_latency(one["due_s"], one["sent_s"], one["end_s"]) > 1.0 for one in times)
        expected = sum(one["end_s"] - one["due_s"] > 1.0 for one in times)
        seen = f"{slow} of {len(times)} requests take more than 1 s"
        lines.append({"server": name, "right": slow == expected, "seen": seen})
    return pd.DataFrame(lines)


@explains_errors
def judge_tpot(my_tpot: Callable[[float, float, int], float | None]) -> pd.DataFrame:
    """Test a function that computes the time per output token after the first.

    Args:
        my_tpot: function of (time of the first token, time of the last token, number of tokens). It returns seconds, or None if
            the answer has too few tokens.

    Returns:
        A table with one line for each answer: whether the result is right, and what was observed.
    """
    lines = []
    for tokens, expected in ((11, 0.1), (2, 1.0), (1, None)):
        try:
            answer = my_tpot(3.0, 4.0 if tokens > 1 else 3.0, tokens)
            right = answer is None if expected is None else answer is not None and abs(answer - expected) < 1e-9
            seen = "no value" if answer is None else f"{answer:g} s"
        except Exception as error:  # the reader's code may raise any exception, which counts as wrong
            right, seen = False, f"{type(error).__name__}: {error}"
        lines.append({"answer": f"{tokens} tokens", "right": right, "seen": seen})
    return pd.DataFrame(lines)
