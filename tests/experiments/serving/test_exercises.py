"""The exercises of serving: what is given fails, a right answer passes."""

from hyperion.experiments.serving.exercises import CACHE_GIB, judge_latency, judge_percentile, judge_tpot
from tests.exercise_scores import solved


def test_a_percentile_needs_all_requests():
    def of_successes(latencies, percent):
        known = sorted(latency for latency in latencies if latency is not None)
        return known[max(0, -(-len(known) * percent // 100) - 1)]

    def of_valid_runs(latencies, percent):
        return None if None in latencies else of_successes(latencies, percent)

    assert list(judge_percentile(of_successes)["right"]) == [True, True, True, False, False, False]
    assert solved(judge_percentile(of_valid_runs))

    def of_arrival(latencies, percent):
        return None if None in latencies else latencies[len(latencies) * percent // 100]

    assert not solved(judge_percentile(of_arrival))


def test_latency_counts_from_when_a_request_was_due():
    given = judge_latency(lambda due_s, sent_s, end_s: end_s - sent_s)
    assert list(given["right"]) == [True, False] and given["seen"][1].startswith("1 of 100")
    right = judge_latency(lambda due_s, sent_s, end_s: end_s - due_s)
    assert solved(right) and right["seen"][1].startswith("45 of 100")


def test_the_time_per_token_divides_by_intervals():
    assert list(judge_tpot(lambda first, last, tokens: (last - first) / tokens)["right"]) == [False, False, False]
    assert solved(judge_tpot(lambda first, last, tokens: (last - first) / (tokens - 1) if tokens > 1 else None))


def test_the_size_of_the_cache():
    assert CACHE_GIB.expected == 8 and CACHE_GIB.judge(8) == "right"
