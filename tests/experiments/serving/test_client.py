"""The load client against a server that sends tokens at known times."""

import itertools
import json
import math
import socket
import struct
import time

import pytest

from hyperion.experiments.serving.client import (
    Endpoint,
    Reply,
    closed_loop,
    complete,
    in_event_loop,
    open_loop,
    throughput,
    why_invalid,
)
from tests.experiments.serving.scripted import Script, scripted_server


def ask(address, tokens=5, **options):
    endpoint = Endpoint(address, "k", "m", **options)

    async def work():
        async with endpoint.session() as session:
            return await complete(session, endpoint, "p", tokens)

    return in_event_loop(work)


def loop_of(function, address, prompts, *arguments, **options):
    endpoint = Endpoint(address, "k", "m", **options)
    return in_event_loop(lambda: function(endpoint, prompts, *arguments))


def test_times_of_one_answer():
    """Lower bounds hold on a busy machine, too. The sum of the gaps tells n - 1 from n intervals."""
    with scripted_server(Script(first_s=0.3, gap_s=0.1)) as address:
        reply = ask(address, tokens=6)
    assert reply.error == "" and reply.pieces == (" 0", " 1", " 2", " 3", " 4", " 5")
    assert reply.tokens == 6 and reply.status == 200
    assert reply.ttft_s >= 0.3, "the headers came at once, but the first token did not"
    assert reply.tpot_s == pytest.approx((reply.last_s - reply.first_s) / 5, rel=1e-12)
    assert reply.tpot_s >= 0.09
    assert reply.request_time_s >= 0.3 + 5 * 0.1


def test_the_tokens_are_those_that_the_server_counts_and_an_event_without_text_is_no_token():
    """A server may send several tokens in an event. Its first and last events often have no text."""
    texts = (("", 0.0), (" a b", 0.3), (" c d", 0.6), ("", 0.6))
    script = Script(texts=texts, counted=4)
    with scripted_server(script) as address:
        reply = ask(address)
    assert reply.error == "" and reply.pieces == (" a b", " c d") and reply.tokens == 4
    assert reply.ttft_s >= 0.3 and reply.tpot_s == pytest.approx((reply.last_s - reply.first_s) / 3, rel=1e-12)
    assert reply.end_s - reply.last_s >= 0.5, "the last event has no text"


def test_the_time_per_token_has_one_interval_less_than_tokens():
    assert Reply(due_s=0, end_s=3, first_s=1.0, last_s=2.0, tokens=11).tpot_s == pytest.approx(0.1)
    assert math.isnan(Reply(due_s=0, end_s=3, first_s=1.0, last_s=1.0, tokens=1).tpot_s)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (Script(fail_every=1, status=503), "status 503: fail"),
        (Script(cut=True), "the stream ended without a finish_reason"),
        (Script(usage=False), "the server counted no tokens"),
    ],
)
def test_failures_are_replies_with_an_error(script, error):
    with scripted_server(script) as address:
        assert ask(address).error == error


def test_a_deadline_ends_a_request_and_a_run():
    with scripted_server(Script(first_s=30)) as address:
        begin = time.perf_counter()
        assert "not finished after 0.2 s" in ask(address, deadline_s=0.2).error
        endpoint = Endpoint(address, "k", "m").within(0.3)
        replies = in_event_loop(lambda: closed_loop(endpoint, ["p"] * 6, 3, 2))
        assert len(replies) == 6 and all("not finished" in reply.error for reply in replies)
        assert time.perf_counter() - begin < 15
    assert "ConnectError" in ask("http://127.0.0.1:1").error


def test_a_closed_loop_has_a_fixed_number_of_users():
    script = Script(first_s=0.2)
    with scripted_server(script) as address:
        replies = loop_of(closed_loop, address, [f"p{i}" for i in range(6)], 2, 3)
    assert sorted(reply.prompt for reply in replies) == [f"p{i}" for i in range(6)]
    events = sorted([(reply.due_s, 1) for reply in replies] + [(reply.end_s, -1) for reply in replies])
    running = [sum(change for _, change in events[: place + 1]) for place in range(len(events))]
    assert max(running) == 3
    rate, tokens = throughput(replies)
    assert tokens == pytest.approx(2 * rate)
    # Little's law: the mean number of requests in the system is the rate times the mean request time. It is the number of users,
    # except at the end of a run: a user without a further request waits for the last one, at most as long as the longest takes.
    times_s = [reply.request_time_s for reply in replies]
    in_system = rate * sum(times_s) / len(times_s)
    assert 3 * (1 - max(times_s) * rate / len(times_s)) - 1e-9 < in_system < 3 + 1e-9


@pytest.mark.slow
def test_latency_in_an_open_loop_counts_from_when_a_request_was_due():
    """A stall with one connection: requests are sent late. Counted from sending, only the first one would be slow."""
    with scripted_server(Script(serial=True, stall_s=1.0)) as address:
        replies = loop_of(open_loop, address, ["p"] * 10, 1, 50.0, 0, connections=1)
    assert not why_invalid(replies, 10)
    assert sum(reply.ttft_s > 0.5 for reply in replies) >= 8
    due = [reply.due_s for reply in replies]
    assert due == sorted(due) and due[-1] - due[0] < 0.8, "arrivals do not wait for answers"


def test_arrivals_are_a_poisson_process():
    with scripted_server(Script()) as address:
        replies = loop_of(open_loop, address, ["p"] * 40, 1, 100.0, 3)
    gaps = [later.due_s - earlier.due_s for earlier, later in itertools.pairwise(replies)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert 0.6 / 100 < mean < 1.6 / 100 and 0.5 < spread / mean < 1.6


def test_the_seed_determines_the_arrivals():
    with scripted_server(Script()) as address:
        runs = [loop_of(open_loop, address, ["p"] * 5, 1, 1000.0, seed) for seed in (3, 3, 4)]
    first, again, other = ([reply.due_s - run[0].due_s for reply in run] for run in runs)
    assert first == pytest.approx(again, abs=1e-9) and first != pytest.approx(other, abs=1e-9)


def test_a_run_with_a_failure_is_invalid():
    with scripted_server(Script(fail_every=5)) as address:
        replies = loop_of(closed_loop, address, ["p"] * 10, 2, 2)
    assert why_invalid(replies, 10) == "invalid: 8 of 10 requests succeeded; the first error: status 500: fail"
    good = [reply for reply in replies if not reply.error]
    assert why_invalid(good, 10) == "invalid: 8 of 10 requests succeeded", "replies that are missing are failures, too"
    assert why_invalid(good, 8) == ""


@pytest.mark.parametrize("stops", [True, False])
def test_the_scripted_server_notices_a_connection_that_is_reset(stops):
    script = Script(gap_s=1e-3, stops=stops, work_s=1e-3)
    with scripted_server(script) as address:
        client = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
        body = json.dumps({"max_tokens": 40}).encode()
        client.sendall(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        client.recv(1)
        # With this option, closing a connection resets it, as closing one with unread data does.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        deadline_s = time.monotonic() + 30
        while not (script.hung_up or script.finished) and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert (script.hung_up, script.finished) == ((1, 0) if stops else (0, 1))
