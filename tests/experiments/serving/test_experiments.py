"""The experiments of serving with a toy backend: rows, reasons, planted faults. One test runs the real server."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from safetensors.torch import save_file

from hyperion.chapter import experiment_named, load_profile
from hyperion.experiments.serving import kv_cache_memory, server_answers, server_load, server_soak
from hyperion.experiments.serving import server as servers
from hyperion.experiments.serving.backends import BACKENDS, Backend, ServerSizes
from hyperion.experiments.serving.claims import growth_claims, value_claims
from hyperion.experiments.serving.client import Endpoint, Reply
from hyperion.experiments.serving.metrics import GROWTH_CHECK
from hyperion.experiments.serving.served_models import ServedModel, pieces_of, served_model
from hyperion.experiments.serving.server import Server, ServerError, close_servers, start_server
from hyperion.experiments.serving.server_answers import Reference, differing_pieces, first_undecided
from hyperion.experiments.serving.server_load import tokens_sent_together
from hyperion.experiments.serving.server_soak import RequestRefused, hang_up, slope_estimate
from hyperion.hardware import detect, detect_cpu
from hyperion.processes.child_process import has_ended
from hyperion.results import Row, RowError
from hyperion.results.statistics import LEAST_FOR_AN_INTERVAL
from tests.chapter.toy import perform, toy_context
from tests.experiments.serving.scripted import Script, scripted_server
from tests.hardware.machines import facts

pytestmark = pytest.mark.usefixtures("one_thread", "metrics")

ROOT = Path(__file__).resolve().parents[3]
SIZES = {"max_requests": 8, "blocks": 16, "block_tokens": 16, "batch_tokens": 128, "start_timeout_s": 60.0}
SOAK = {
    "model": "toy",
    "dtype": "fp32",
    "backend": "toy",
    "compared_backend": "",
    "compared_requests": 0,
    "server": SIZES,
    "requests": 40,
    "users": 4,
    "prompt_tokens": 4,
    "output_tokens": 2,
    "hang_up_every": 10,
    "long_tokens": 100,
    "growth_bound_bytes": 65536,
    "time_limit_s": 30.0,
}
LOAD = {
    "model": "toy",
    "dtype": "fp32",
    "backends": ["toy", "vllm"],
    "server": SIZES,
    "prompt_tokens": 4,
    "output_tokens": 3,
    "levels": [{"users": 1, "requests": 4}, {"users": 2, "requests": 100}],
    "open_load": 0.5,
    "open_requests": 5,
    "runs": 3,
    "run_limit_s": 20.0,
}


@pytest.fixture(scope="module")
def metrics():
    """Register the metrics of serving, which rows need. A test that runs alone has no other test that does."""
    experiment_named("server_soak")


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """A function that makes a scripted backend available as "toy", with a model that nobody reads."""

    def use(**script) -> Backend:
        options = lambda folder, port, dtype, device, sizes: [str(port), json.dumps(script)]  # noqa: E731
        backend = Backend("toy", "tests.experiments.serving.toy_backend", (), options, log_mark="CB: toy")
        monkeypatch.setitem(BACKENDS, "toy", backend)
        # The same program under another name, as the backend for comparison.
        monkeypatch.setitem(BACKENDS, "other", dataclasses.replace(backend, name="other"))
        for module in (server_load, server_soak):
            monkeypatch.setattr(module, "served_model", lambda context, name: ServedModel(name, tmp_path, "synthetic"))
            monkeypatch.setattr(module, "prompts_of", lambda context, folder, count, *rest: [f"p{i}" for i in range(count)])
        monkeypatch.setattr(server_load, "decoding_limit", lambda *arguments: (None, "no limit: toy"))
        return backend

    yield use
    close_servers()


def by_variant(rows, metric):
    return {row.variant: row for row in rows if row.metric == metric}


@pytest.mark.long
@pytest.mark.process
def test_a_soak_has_a_checked_row_for_each_fault(toy, tmp_path):
    toy(gap_s=0.01, work_s=0.003)
    rows = perform(toy_context("server_soak", SOAK, tmp_path), tmp_path).rows
    counts = by_variant(rows, "count")
    assert counts[server_soak.SOAK].value == 40
    assert {name: row.params.get("status") for name, row in counts.items() if "status" in row.params} == {
        "no JSON": 400,
        "too large": 413,
        "prompt larger than the cache": 413,
        "answer larger than the cache": 413,
        "no key": 401,
        "wrong key": 401,
    }
    assert counts[server_soak.OVERLOAD].value == 4 and counts[server_soak.DRAIN].value == 4
    assert by_variant(rows, "share")[server_soak.HANG_UPS].value < 0.5
    # A prompt of 4 tokens occupies one block of 16 tokens.
    assert counts[server_soak.HANG_UPS].value == SOAK["users"] and counts[server_soak.HANG_UPS].params["hang_ups"] >= 16
    growth = by_variant(rows, "growth_bytes")
    assert growth[server_soak.RSS].ci_high < 65536
    assert growth[server_soak.DEVICE_MEMORY].value_reason.startswith("the device is the CPU")
    assert by_variant(rows, "drain_time_s")[server_soak.DRAIN].value > 0
    assert [otherwise for holds, otherwise in value_claims("server_soak", rows) if not holds] == []


@pytest.mark.process
@pytest.mark.long
def test_a_compared_backend_answers_some_of_the_requests_and_its_growth_has_no_bound(toy, tmp_path):
    toy(gap_s=0.01, work_s=0.003, ballast_bytes=1 << 20)
    options = SOAK | {"compared_backend": "other", "compared_requests": 30, "long_tokens": 30}
    result = experiment_named("server_soak").run(toy_context("server_soak", options, tmp_path), lambda *progress: None)
    counts = {
        row.params["backend"]: row.value for row in result.rows if row.variant == server_soak.SOAK and row.metric == "count"
    }
    assert counts == {"toy": 40, "other": 30}
    growth = {
        row.params["backend"]: row for row in result.rows if row.variant == server_soak.RSS and row.metric == "growth_bytes"
    }
    assert growth["toy"].check == GROWTH_CHECK and growth["toy"].without_failed_value().is_unexpected
    assert not growth["other"].without_failed_value().is_unexpected and growth["other"].value > 5e5
    rates = [row for row in result.rows if row.metric == "output_tokens_per_s"]
    # 4 users whose answers take two tokens of 10 ms each, and the time of the connection.
    assert [row.params["backend"] for row in rates] == ["toy", "other"] and all(0 < row.value < 2 * 4 / 0.01 for row in rates)
    assert result.samples.groupby("backend").size().to_dict() == {"toy": 40, "other": 30}
    predicted = server_soak.forecast(toy_context("server_soak", options, tmp_path))
    assert [forecast.params["backend"] for forecast in predicted] == ["toy", "toy", "other", "other"]


@pytest.mark.long
def test_a_backend_for_comparison_that_does_not_start_costs_no_row_of_the_other(toy, tmp_path, monkeypatch):
    toy(gap_s=0.01, work_s=0.003)
    monkeypatch.setitem(BACKENDS, "other", dataclasses.replace(BACKENDS["other"], module="no_such_module"))
    options = SOAK | {"compared_backend": "other", "compared_requests": 30, "long_tokens": 30}
    rows = experiment_named("server_soak").run(toy_context("server_soak", options, tmp_path), lambda *progress: None).rows
    soaks = {row.params["backend"]: row for row in rows if row.variant == server_soak.SOAK and row.metric == "count"}
    assert soaks["toy"].value == 40 and soaks["other"].value is None and "did not start" in soaks["other"].value_reason


@pytest.mark.long
@pytest.mark.process
def test_planted_faults_of_a_server_are_found(toy, tmp_path):
    toy(gap_s=0.01, work_s=0.003, ballast_bytes=1 << 20, stops=False)
    rows = experiment_named("server_soak").run(toy_context("server_soak", SOAK, tmp_path), lambda *progress: None).rows
    failed = {row.variant for row in rows if row.without_failed_value().is_unexpected}
    assert failed == {server_soak.RSS, server_soak.HANG_UPS}


@pytest.mark.parametrize("blocks", [0, 16])
def test_a_server_that_keeps_the_blocks_of_hang_ups_does_not_answer_the_load(blocks, tmp_path):
    context = toy_context("server_soak", SOAK, tmp_path)
    options = server_soak.ServerSoakOptions.of(context)
    with served_in_this_process(gap_s=0.001, blocks=blocks) as server:
        if blocks:  # the load waits for blocks that are never free
            server.endpoint = dataclasses.replace(server.endpoint, deadline_s=2.0)
        row = server_soak._block_row(context, options, server, [f"p{i}" for i in range(200)])
    assert blocks or row.params["hang_ups"] >= 16
    assert value_claims("server_soak", [row.without_failed_value()])[0][0] is not bool(blocks)
    assert row.without_failed_value().is_unexpected is bool(blocks) and row.value == (0 if blocks else SOAK["users"])


def test_the_memory_of_a_server_is_that_of_its_processes_which_are_not_listed_for_each_reading(tmp_path, monkeypatch):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as front:
        assert front.stdin is not None and front.stdout is not None
        front.stdout.readline()  # its child runs
        server = Server(front, Endpoint("", "", ""), tmp_path / "log", 0)
        family = [psutil.Process(front.pid), *psutil.Process(front.pid).children()]
        expected = sum(process.memory_info().rss for process in family)
        assert len(family) == 2 and server.rss_bytes() == pytest.approx(expected, rel=0.05)
        monkeypatch.setattr(Server, "processes", lambda self: [])
        assert server.rss_bytes() > 0, "listed less than a second ago"
        monkeypatch.setattr(servers, "_LIST_EVERY_S", 0.0)
        assert server.rss_bytes() == 0
        front.stdin.write(b"\n")


@pytest.mark.parametrize(("growth_bytes", "holds"), [(800.0, True), (15_500.0, False), (800_000.0, False)])
def test_growth_above_the_bound_refutes_its_claim(growth_bytes, holds):
    interval = {"n": 10, "ci_low": growth_bytes - 1000, "ci_high": growth_bytes + 1000, "limit_source": "no limit: made up"}
    check = {"check": GROWTH_CHECK, "check_error": growth_bytes + 1000, "check_tolerance": 16384}
    common = {"notebook": "n", "experiment": "server_soak", "variant": server_soak.RSS, "metric": "growth_bytes"}
    row = Row(value=growth_bytes, params={"backend": "toy"}, **common, **interval, **check)
    assert [one for one, _ in growth_claims([row.without_failed_value()])] == [holds]
    assert growth_claims([dataclasses.replace(row, check="failed requests", check_error=0.0)]) == []


@pytest.mark.parametrize(
    ("accepted", "running_s", "refused"),
    [(0, 5, True), (2, 5, True), (1000, 0.2, False), (0, 0.15, False)],
    ids=["at once", "after two answers", "never", "when all is finished"],
)
def test_a_draining_server_must_refuse_while_it_answers(accepted, running_s, refused, monkeypatch):
    monkeypatch.setattr(server_soak, "_PAUSE_S", 0.01)
    asked = []

    async def ask():
        asked.append(1)
        await asyncio.sleep(0 if refused else running_s)
        return SimpleNamespace(error="refused" if len(asked) > accepted else "")

    async def work():
        running = [asyncio.create_task(asyncio.sleep(running_s))]
        found = await server_soak.refused_while(running, ask)
        running[0].cancel()
        return found

    assert asyncio.run(work()) is refused


def test_a_backend_that_gets_no_core_for_a_moment_is_not_idle(monkeypatch):
    monkeypatch.setattr(server_soak, "_WINDOW_S", 1e-3)
    readings = iter([5.0, 6.0, 6.0, 7.0, 7.5, 7.5, 7.5, 9.0])
    server = SimpleNamespace(backend_cpu_s=lambda: next(readings))
    assert asyncio.run(server_soak._cpu_until_idle(server, 4.0, 0.0)) == 3.5


@contextlib.contextmanager
def served_in_this_process(**script):
    """A scripted server without a front, in the place of a running server."""
    with scripted_server(Script(**script)) as address:
        yield SimpleNamespace(endpoint=Endpoint(address, "key", "toy"), start_s=1.0, rss_bytes=lambda: 0, log_text=str)


def test_the_first_readings_of_a_soak_are_not_fitted(tmp_path):
    context = toy_context("server_soak", SOAK, tmp_path)
    options = server_soak.ServerSoakOptions.of(context)
    with served_in_this_process() as server:
        replies, readings = server_soak._soak(context, options, server, [f"p{i}" for i in range(60)])
    assert [reply.error for reply in replies] == [""] * 40
    assert readings["requests"].tolist() == [*range(1, 41)] and readings["fitted"].tolist() == [False] * 8 + [True] * 32


def test_requests_that_fail_make_the_soak_invalid(tmp_path):
    context = toy_context("server_soak", SOAK, tmp_path)
    options = server_soak.ServerSoakOptions.of(context)
    with served_in_this_process(fail_every=7) as server:
        replies, readings = server_soak._soak(context, options, server, [f"p{i}" for i in range(60)])
    (row,) = server_soak._soak_rows(context, options, replies, readings, options.growth_bound_bytes)
    assert row.value is None and "of 40 requests succeeded; the first error: status 500" in row.value_reason


def test_a_server_that_fails_in_one_step_keeps_the_rows_of_the_others(tmp_path, monkeypatch):
    context = toy_context("server_soak", SOAK, tmp_path)
    options = server_soak.ServerSoakOptions.of(context)

    def late(timeout_s):
        raise ServerError("the front did not end within 40 s")

    async def no_text(*args):
        raise ServerError("a client that hangs up received no text")

    async def hung_up(*args):
        return None

    with served_in_this_process() as server:
        server.drain, server.wait = lambda: None, late
        monkeypatch.setattr(server_soak, "hang_up", hung_up)
        (row,) = server_soak._drain_rows(context, options, server, [f"p{i}" for i in range(8)])
        assert (row.variant, row.value_reason) == (server_soak.DRAIN, "invalid: the front did not end within 40 s")
        monkeypatch.setattr(server_soak, "hang_up", no_text)
        replies, _ = server_soak._soak(context, options, server, [f"p{i}" for i in range(60)])
        assert len(replies) > options.requests and any(reply.error for reply in replies)
        (row,) = server_soak._rows_or_reason(
            context, options, server_soak.DRAIN, "", lambda: server_soak._drain_rows(context, options, server, ["p"] * 8)
        )
        assert row.value is None and row.value_reason == "invalid: a client that hangs up received no text"


@pytest.mark.parametrize(
    ("script", "kind", "problem"),
    [
        ({"fail_every": 1, "status": 500}, ServerError, "status 500"),
        ({"fail_every": 1, "status": 503}, RequestRefused, "status 503"),
        ({"event": '{"error": "made up"}'}, ServerError, "the server reports 'made up'"),
        ({"event": '{"choices": [{"text": ""}]}'}, ServerError, "the answer ended"),
        ({"event": "no JSON"}, ServerError, "JSONDecodeError"),
        ({"event": "[1]"}, ServerError, "which is no JSON object"),
        ({"first_s": 60.0}, ServerError, "nothing after 0."),
    ],
)
def test_a_client_that_receives_no_text_has_not_hung_up(script, kind, problem):
    with served_in_this_process(**script) as server:
        endpoint = server.endpoint.within(0.5) if "first_s" in script else server.endpoint
        begin = time.monotonic()

        async def work():
            async with endpoint.session() as session:
                await hang_up(session, endpoint, "p", 3)

        with pytest.raises(ServerError, match=problem) as error:
            asyncio.run(work())
    assert type(error.value) is kind and time.monotonic() - begin < 30


def test_a_request_that_the_front_refuses_occupies_no_block(tmp_path):
    context = toy_context("server_soak", SOAK, tmp_path)
    options = server_soak.ServerSoakOptions.of(context)
    script = Script(fail_every=2, status=503)
    with scripted_server(script) as address:
        server = SimpleNamespace(endpoint=Endpoint(address, "key", "toy"))
        row = server_soak._block_row(context, options, server, [f"p{i}" for i in range(200)])
    assert row.params["hang_ups"] >= 16 and len(script.requests) >= 32


def test_a_backend_that_has_ended_has_no_cpu_time(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(ServerError, match="the backend has ended"):
        Server(ended, Endpoint("", "", ""), tmp_path / "log", ended.pid).backend_cpu_s()


@pytest.mark.process
def test_a_backend_that_ends_after_the_soak_costs_no_row_of_the_soak(toy, tmp_path, monkeypatch):
    toy(gap_s=0.01, work_s=0.003)
    soak = server_soak._soak

    def and_kill(context, options, server, prompts):
        outcome = soak(context, options, server, prompts)
        os.kill(server.backend_pid, signal.SIGKILL)
        return outcome

    monkeypatch.setattr(server_soak, "_soak", and_kill)
    run = experiment_named("server_soak").run
    rows = [row.without_failed_value() for row in run(toy_context("server_soak", SOAK, tmp_path), lambda *progress: None).rows]
    counts = by_variant(rows, "count")
    assert counts[server_soak.SOAK].value == 40 and by_variant(rows, "growth_bytes")[server_soak.RSS].value is not None
    assert counts[server_soak.DRAIN].value is None
    assert {row.variant for row in rows if row.value_reason.startswith("invalid")} >= {server_soak.HANG_UPS, server_soak.DRAIN}
    assert not all(holds for holds, _ in value_claims("server_soak", rows))


@pytest.mark.process
def test_requests_of_an_open_loop_wait_in_the_client_if_the_server_has_no_place(toy, tmp_path):
    toy(first_s=0.2)
    loops = {"levels": [{"users": 2, "requests": 10}], "open_load": 20.0, "open_requests": 40, "runs": 1}
    options = LOAD | loops | {"backends": ["toy"]}
    rows = perform(toy_context("server_load", options, tmp_path), tmp_path).rows
    opened = {row.params["percentile"]: row for row in rows if row.metric == "ttft_s" and row.params["loop"] == "open"}
    # 40 requests arrive almost together, and 8 are answered at the same time, so the last ones wait for four others.
    assert opened[95].value > 0.7 and all(holds for holds, _ in value_claims("server_load", rows))


@pytest.mark.long
@pytest.mark.process
def test_a_load_has_percentiles_over_runs(toy, tmp_path):
    toy(first_s=0.02, gap_s=0.01)
    rows = perform(toy_context("server_load", LOAD, tmp_path), tmp_path).rows
    assert [row.value_reason for row in rows if row.variant == "vllm"] == [BACKENDS["vllm"].why_absent()]
    ttft = {
        (row.params.get("users", "open"), row.params["percentile"]): row
        for row in rows
        if row.metric == "ttft_s" and row.variant == "toy"
    }
    assert ttft[2, 50].value >= 0.02 and ttft[2, 50].n == 3
    assert ttft[2, 50].value <= ttft[2, 95].value <= ttft[2, 99].value
    assert ttft[1, 99].value_reason == "not computed: the 99th percentile needs 100 requests in a run, and there are 4"
    assert ttft["open", 50].value >= 0.02


def rows_of_replies(tmp_path, monkeypatch, *runs: list[Reply]) -> dict:
    """The values of a loop with the given replies in each run, by (metric, percentile)."""
    context = toy_context("server_load", LOAD, tmp_path)
    options, model = server_load.ServerLoadOptions.of(context), ServedModel("toy", tmp_path, "synthetic")
    monkeypatch.setattr(server_load, "decoding_limit", lambda *arguments: (None, "no limit: toy"))
    measured = server_load.Measured({"users": 2}, len(runs[0]), list(runs))
    rows = server_load._rows(context, options, "toy", model, measured, measured.reason)
    return {(row.metric, row.params.get("percentile")): row.value for row in rows}


def test_each_latency_has_the_percentiles_of_its_own_times(tmp_path, monkeypatch):
    # The first token after 1, 2, … 100 s, each of the two other tokens after as many ms, and the end after as many s.
    run = [Reply(7.0, 7 + 2.0 * n, first_s=7.0 + n, last_s=7 + n + 2 * n / 1e3, tokens=3) for n in range(100, 0, -1)]
    values = rows_of_replies(tmp_path, monkeypatch, run, run, run)
    for metric, unit in (("ttft_s", 1.0), ("tpot_s", 1e-3), ("request_time_s", 2.0)):
        assert [values[metric, percent] for percent in (50, 95, 99)] == pytest.approx([50 * unit, 95 * unit, 99 * unit])


def test_a_percentile_is_that_of_each_run_and_the_median_over_runs(tmp_path, monkeypatch):
    # The percentiles of all requests together are others.
    runs = [
        [Reply(0.0, scale * n, first_s=scale * n, last_s=scale * n, tokens=3) for n in range(1, 101)] for scale in (1, 10, 100)
    ]
    values = rows_of_replies(tmp_path, monkeypatch, *runs)
    assert [values["ttft_s", percent] for percent in (50, 95, 99)] == [500.0, 950.0, 990.0]


def test_a_percentile_has_no_value_with_fewer_requests_than_it_needs(tmp_path, monkeypatch):
    run = [Reply(0.0, 2.0, first_s=1.0, last_s=1.5, tokens=3) for _ in range(19)]
    values = rows_of_replies(tmp_path, monkeypatch, run, run, run)
    assert [values["ttft_s", percent] for percent in (50, 95, 99)] == [1.0, None, None]


@pytest.mark.parametrize(
    ("answer", "lost"),
    [(Reply(0.0, 2.0, 1.0, 1.0, tokens=1), {"tpot_s"}), (Reply(0.0, 2.0, tokens=1), {"tpot_s", "ttft_s"})],
    ids=["one token", "no text"],
)
def test_an_answer_without_a_time_costs_the_values_of_this_time_alone(answer, lost, tmp_path, monkeypatch):
    run = [*(Reply(0.0, 2.0, first_s=1.0, last_s=1.5, tokens=3) for _ in range(99)), answer]
    values = rows_of_replies(tmp_path, monkeypatch, run, run, run)
    assert {metric for (metric, _), value in values.items() if value is None} == lost
    assert values["request_time_s", 99] == 2.0 and values["requests_per_s", None] == 50.0


def test_a_load_counts_requests_and_their_tokens(tmp_path, monkeypatch):
    # Four requests with five tokens each, in 2 s from the first due time to the last end.
    run = [Reply(7.0 + n / 2, 7.5 + n / 2, first_s=7.1 + n / 2, last_s=7.4 + n / 2, tokens=5) for n in range(4)]
    values = rows_of_replies(tmp_path, monkeypatch, run, run, run)
    assert (values["requests_per_s", None], values["output_tokens_per_s", None]) == (2.0, 10.0)


@pytest.fixture
def sent(toy, tmp_path, monkeypatch):
    """What a load sends: the loops with their replies, and the arguments of all calls of the two kinds of loops."""
    toy()
    closed, opened = [], []

    def replies(prompts) -> list[Reply]:
        return [Reply(0.0, 1.0, 0.5, 0.9, tokens=3, prompt=prompt) for prompt in prompts]

    async def closed_loop(endpoint, prompts, tokens, users):
        closed.append(SimpleNamespace(prompts=prompts, users=users))
        return replies(prompts)

    async def open_loop(endpoint, prompts, tokens, requests_per_s, seed):
        opened.append(SimpleNamespace(prompts=prompts, seed=seed, requests_per_s=requests_per_s))
        return replies(prompts)

    monkeypatch.setattr(server_load, "closed_loop", closed_loop)
    monkeypatch.setattr(server_load, "open_loop", open_loop)
    context = toy_context("server_load", LOAD, tmp_path)
    options, model = server_load.ServerLoadOptions.of(context), ServedModel("toy", tmp_path, "synthetic")
    server = SimpleNamespace(endpoint=Endpoint("", "key", "toy"))
    loops = server_load._loops(context, options, server, model, lambda done, note: None)
    return SimpleNamespace(loops=loops, closed=closed, opened=opened)


def test_the_runs_of_an_open_loop_have_different_arrivals(sent):
    assert len(sent.opened) == LOAD["runs"] == len({run.seed for run in sent.opened})


def test_the_arrivals_of_an_open_loop_have_a_share_of_the_rate_of_the_last_closed_loop(sent):
    # All replies of a run are due at 0 s and end at 1 s. The last closed loop has 100 of them.
    assert {run.requests_per_s for run in sent.opened} == {0.5 * 100}


def test_the_first_requests_warm_the_server_up_with_the_most_users_and_are_in_no_run(sent):
    warm_up = sent.closed[0]
    assert warm_up.users == 2 and len(warm_up.prompts) == 4
    measured = [reply.prompt for loop in sent.loops for run in loop.runs for reply in run]
    assert len(measured) == len(set(measured)) == LOAD["runs"] * (4 + 100 + 5)
    assert not set(warm_up.prompts) & set(measured)


def test_a_loop_with_a_failed_request_has_no_values(toy, tmp_path, monkeypatch):
    toy()
    with served_in_this_process(fail_every=50) as server:
        monkeypatch.setattr(server_load, "running_server", lambda *properties: server)
        rows = perform(toy_context("server_load", LOAD, tmp_path), tmp_path).rows
    failed = [row for row in rows if row.params.get("users") == 2]
    assert failed and all(row.value is None and "requests succeeded" in row.value_reason for row in failed)
    # The log does not prove that the server batches requests, so the loops without a failed request have no values either.
    refused = [row.value_reason for row in rows if row.params.get("users") == 1]
    assert refused and all("does not batch continuously" in reason for reason in refused)


@pytest.mark.process
def test_a_server_that_ends_or_stays_silent_is_an_error_with_its_log(toy, tmp_path, monkeypatch):
    broken = Backend("broken", "tests.experiments.serving.no_such_module", (), lambda *arguments: [])
    with pytest.raises(ServerError, match=r"(?s)the backend ended.*no_such_module"):
        start_server(broken, tmp_path, "fp32", "cpu", ServerSizes(**SIZES))
    silent = toy(first_s=60.0)
    answer = servers._require_answer
    # The time limit of the start must be long enough for a busy machine. That of the first answer needs not be.
    monkeypatch.setattr(servers, "_require_answer", lambda server, until_s: answer(server, time.perf_counter() + 0.1))
    begin = time.monotonic()
    with pytest.raises(ServerError, match="not finished after"):
        start_server(silent, tmp_path, "fp32", "cpu", ServerSizes(**SIZES))
    assert time.monotonic() - begin < 45


@pytest.mark.process
def test_a_server_ends_with_its_launcher(tmp_path):
    code = f"""
import json, sys, time
from pathlib import Path
from hyperion.experiments.serving.backends import Backend, ServerSizes
from hyperion.experiments.serving.server import start_server
options = lambda folder, port, dtype, device, sizes: [str(port), "{{}}"]
toy = Backend("toy", "tests.experiments.serving.toy_backend", (), options)
server = start_server(toy, Path({str(tmp_path)!r}), "fp32", "cpu", ServerSizes(**{SIZES!r}))
print(server.front.pid, server.backend_pid, flush=True)
time.sleep(60)
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pids = [int(text) for text in launcher.stdout.readline().split()]
    assert len(pids) == 2 and not any(has_ended(pid) for pid in pids)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    until = time.monotonic() + 20
    while not all(has_ended(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert all(has_ended(pid) for pid in pids)


def test_what_is_missing_is_named():
    serve, vllm = BACKENDS["transformers serve"], BACKENDS["vllm"]
    assert serve.why_absent(lambda name: True) == ""
    reason = serve.why_absent(lambda name: name not in ("openai", "uvicorn"))
    assert reason == "unavailable: uvicorn, openai not installed; next step: install uvicorn openai"
    assert "vllm" in vllm.why_absent(lambda name: name != "vllm")


def test_command_lines(tmp_path):
    sizes = ServerSizes(max_requests=4, blocks=64, block_tokens=16, batch_tokens=256, max_tokens=512)
    vllm = BACKENDS["vllm"].options(tmp_path, 8001, "bf16", "cuda:0", sizes)
    pairs = dict(zip(vllm[::2], vllm[1::2], strict=True))
    assert pairs["--model"] == pairs["--served-model-name"] == str(tmp_path) and pairs["--port"] == "8001"
    assert (pairs["--dtype"], pairs["--num-gpu-blocks-override"], pairs["--block-size"]) == ("bfloat16", "64", "16")
    # vLLM refuses fewer tokens in a batch than a request may have.
    assert int(pairs["--max-num-batched-tokens"]) >= int(pairs["--max-model-len"]) == 512
    serve = BACKENDS["transformers serve"].options(tmp_path, 8001, "fp32", "cpu", sizes)
    assert serve[:3] == ["serve", str(tmp_path), "--continuous-batching"]
    pairs = dict(zip(serve[3::2], serve[4::2], strict=True))
    assert (pairs["--host"], pairs["--device"], pairs["--dtype"]) == ("127.0.0.1", "cpu", "float32")
    assert pairs["--cb-num-blocks"] == "64"


def test_the_packages_of_the_default_server_are_those_that_are_installed_with_the_library():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = project["dependencies"] + project["optional-dependencies"]["serving"]
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in installed}
    assert not BACKENDS["transformers serve"].why_absent(lambda package: package in names)


def test_without_the_packages_the_rows_have_the_reason(tmp_path, monkeypatch):
    missing = "unavailable: made up"
    monkeypatch.setattr(Backend, "why_absent", lambda self, is_installed=None: missing)
    sizes = {"dtypes": ["fp32"], "prompts": 1} | {key: LOAD[key] for key in ("model", "backends", "server")}
    sizes |= {"backends": ["transformers serve"], "prompt_tokens": 4, "output_tokens": 2}
    for name, options in (("server_answers", sizes), ("server_load", LOAD | {"backends": ["vllm"]}), ("server_soak", SOAK)):
        context = toy_context(name, options | ({"backend": "vllm"} if name == "server_soak" else {}), tmp_path)
        assert experiment_named(name).forecast(context) == []
        assert [row.value_reason for row in perform(context, tmp_path).rows] == [missing]


@pytest.mark.parametrize(
    ("answer", "decided", "differing"),
    [
        (("a", "b", "c"), 3, 0),
        (("a", "x", "c"), 3, 1),
        (("a", "b"), 3, 1),
        (("a", "b", "c", "d"), 3, 1),
        (("a", "x", "y"), 1, 0),
        (("x", "b", "c"), 1, 1),
        ((), 1, 1),
    ],
)
def test_pieces_are_compared_up_to_the_first_undecided_position(answer, decided, differing):
    reference = Reference(pieces=("a", "b", "c"), decided=decided, tokens=3, decided_tokens=decided, error=0.1)
    assert differing_pieces(answer, reference) == differing


def test_the_rows_count_tokens_and_not_the_texts_that_a_server_sends(tmp_path, monkeypatch):
    """A token within a character has no text of its own."""
    sizes = {"model": "toy", "dtypes": ["bf16"], "backends": ["transformers serve"], "server": SIZES}
    context = toy_context("server_answers", sizes | {"prompts": 3, "prompt_tokens": 4, "output_tokens": 2}, tmp_path)
    model = ServedModel("toy", tmp_path, "synthetic")
    reference = Reference(pieces=(" 0", " 1"), decided=2, tokens=8, decided_tokens=5, error=0.1)
    monkeypatch.setattr(server_answers, "served_model", lambda *args: model)
    monkeypatch.setattr(server_answers, "prompts_of", lambda *args: ["a", "b", "c"])
    monkeypatch.setattr(server_answers, "reference_answers", lambda *args: [reference] * 3)
    with served_in_this_process() as server:
        server.log_text = lambda: "CB: True"
        monkeypatch.setattr(server_answers, "running_server", lambda *args: server)
        rows = experiment_named("server_answers").run(context, lambda *progress: None).rows
    compared = next(row for row in rows if row.params.get("what") == server_answers.COMPARED)
    assert compared.value == 3 * 5 and compared.check_error == 0
    assert by_variant(rows, "share")["transformers serve"].value == 5 / 8


def test_a_position_is_undecided_if_its_gap_is_at_most_the_bound():
    assert first_undecided([1.0, 0.21, 0.2, 5.0], 0.2) == 2
    assert first_undecided([1.0, 2.0], 0.2) == 2


def test_a_position_is_undecided_if_its_gap_is_at_most_twice_the_error_after_the_prompt(tmp_path, monkeypatch):
    import transformers

    # The gaps between the two largest logits are 1, 3, 0.3, 5, 9. The prompt has two tokens, so positions 1 to 3 choose tokens.
    exact = torch.zeros(1, 5, 3)
    exact[0, :, 1] = torch.tensor([1.0, 3.0, 0.3, 5.0, 9.0])
    rounded = exact.clone()
    rounded[0, 1, 2] += 0.2
    rounded[0, [0, 4], 2] += 7.0  # outside of the answer

    class Model:
        def __init__(self, logits):
            self.logits = logits

        def __call__(self, ids):
            return SimpleNamespace(logits=self.logits)

        def generate(self, ids, **options):
            return torch.cat([ids, torch.ones(1, 3, dtype=torch.long)], 1)

    tokenizer = lambda prompt, return_tensors: SimpleNamespace(input_ids=torch.tensor([[0, 0]]))  # noqa: E731
    monkeypatch.setattr(transformers, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda folder: tokenizer))
    monkeypatch.setattr(server_answers, "pieces_of", lambda folder, ids: tuple(map(str, ids)))
    model = SimpleNamespace(folder=tmp_path, load=lambda dtype, device: Model(exact if dtype == "fp32" else rounded))
    (reference,) = server_answers.reference_answers(model, ["p"], 3, "bf16", "cpu")
    assert reference.error == pytest.approx(0.2) and (reference.decided_tokens, reference.tokens) == (1, 3)


@pytest.mark.parametrize(("tied", "elements"), [(True, 8 * 4 + 6), (False, 6 + 8 * 4)], ids=["tied", "untied"])
def test_a_step_reads_all_weights_but_those_of_an_embedding_that_is_not_the_head(tied, elements, tmp_path):
    tensors = {"model.embed_tokens.weight": torch.zeros(8, 4), "model.norm.weight": torch.zeros(6)}
    tensors |= {} if tied else {"lm_head.weight": torch.zeros(8, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    model = ServedModel("toy", tmp_path, "synthetic")
    assert (model.weight_bytes("bf16"), model.weight_bytes("fp32")) == (2 * elements, 4 * elements)


def test_n_users_are_predicted_to_get_n_tokens_in_the_time_of_a_step(toy, tmp_path):
    toy()
    step = SimpleNamespace(metric="tpot_s", value=0.01)
    forecasts = server_load.forecast(toy_context("server_load", LOAD | {"backends": ["toy"]}, tmp_path, [step]))
    predicted = [(forecast.metric, forecast.params["users"], forecast.estimate) for forecast in forecasts]
    assert predicted == [("tpot_s", 1, 0.01), ("output_tokens_per_s", 1, 100.0), ("output_tokens_per_s", 2, 200.0)]


def test_the_slope_of_a_leak_and_of_noise():
    random = np.random.default_rng(0)
    requests = np.arange(200)
    noise = 1e9 + random.normal(0, 1e5, 200)
    leak = slope_estimate(requests, noise + 4e4 * requests)
    assert leak.ci_low < 4e4 < leak.ci_high and leak.ci_low > 3e4
    level = slope_estimate(requests, noise)
    assert level.ci_low < 0 < level.ci_high
    assert slope_estimate(requests, np.full(200, 5.0)).ci_high == 0


def test_the_interval_of_the_growth_contains_that_of_a_random_walk():
    """A fitted line has an interval that contains the true growth, which is 0 here, in 39 % of the cases."""
    random = np.random.default_rng(0)
    walks = np.cumsum(random.normal(0, 1e3, (400, 500)), axis=1)
    slopes = [slope_estimate(np.arange(500), walk) for walk in walks]
    # The coverage of 95 % intervals in 400 cases is below 90 % with a probability of 1e-5. Medians of segments cost 3 %.
    assert np.mean([slope.ci_low < 0 < slope.ci_high for slope in slopes]) > 0.87


def test_a_constant_rate_is_the_rate_of_every_segment():
    # The first 20 answers are not used. Each later one has 2 tokens and takes 0.5 s.
    fitted = np.arange(100) >= 20
    readings = pd.DataFrame({"fitted": fitted, "time_s": np.cumsum(np.where(fitted, 0.5, 3.0))})
    rates = server_soak._rates([Reply(0.0, 0.5, tokens=2)] * 100, readings)
    assert len(rates) == 10 and rates == pytest.approx([4.0] * 10)


def test_a_step_of_decoding_takes_at_least_the_time_of_reading_the_weights_in_their_format():
    context = SimpleNamespace(device=detect(facts("H100 SXM")))
    model = SimpleNamespace(weight_bytes=lambda dtype: 10**9 * {"bf16": 2, "fp32": 4}[dtype])
    (half_s, source), (whole_s, _) = (kv_cache_memory.decoding_limit(context, model, dtype) for dtype in ("bf16", "fp32"))
    # 2 GB at 3.35 TB/s.
    assert half_s == pytest.approx(0.597e-3, rel=0.01) and whole_s == 2 * half_s and source.startswith("2 GB of weights")


@pytest.mark.slow
def test_the_bytes_of_a_cache_are_those_of_the_formula(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path))
    sizes = {"model": "random_llama_d64_l2", "dtype": "fp32", "lengths": [3, 8], "time_limit_s": 0.05}
    context = toy_context("kv_cache_memory", sizes, tmp_path)
    predicted = [forecast.estimate for forecast in experiment_named("kv_cache_memory").forecast(context)]
    rows = perform(context, tmp_path).rows
    tensors = [row.value for row in rows if row.metric == "kv_cache_bytes" and row.value is not None]
    assert tensors == predicted[:2] == [2 * 2 * 2 * 16 * 4 * length for length in (3, 8)]
    # One key-value head less than there is: the row must be refused.
    halved = ServedModel.cache_bytes
    monkeypatch.setattr(ServedModel, "cache_bytes", lambda self, tokens, dtype: halved(self, tokens, dtype) // 2)
    with pytest.raises(RowError, match="predicted bytes"):
        perform(context, tmp_path / "wrong")


def test_memory_that_libraries_keep_does_not_count_as_cache(tmp_path, monkeypatch):
    caches, kept = weakref.WeakSet(), []

    class Cache:
        def __init__(self, length):
            self.layers = [SimpleNamespace(keys=torch.zeros(length), values=torch.zeros(length))]

    class Model:
        config = SimpleNamespace(vocab_size=10)

        def __call__(self, ids, **options):
            kept[:] = [32 * 2**20]  # the first product allocates a workspace
            cache = Cache(ids.shape[1])
            caches.add(cache)
            return SimpleNamespace(past_key_values=cache)

    served = SimpleNamespace(load=lambda dtype, device: Model(), cache_bytes=lambda length, dtype: 8 * length, source="random")
    gpu = dataclasses.replace(detect_cpu(), kind="cuda")
    sizes = {"model": "random_llama_d64_l2", "dtype": "fp32", "lengths": [300, 800], "time_limit_s": 0.05}
    context = toy_context("kv_cache_memory", sizes, tmp_path)
    monkeypatch.setattr(type(context), "device", gpu)
    monkeypatch.setattr(kv_cache_memory, "served_model", lambda context, name: served)
    monkeypatch.setattr(
        kv_cache_memory, "_allocated", lambda device: sum(kept) + sum(8 * len(cache.layers[0].keys) for cache in caches)
    )
    absent = context.absent_row(kv_cache_memory.STEP, "tpot_s", "not timed in this test", dtype="fp32")
    monkeypatch.setattr(kv_cache_memory, "_time_step", lambda *args: (absent, pd.DataFrame()))
    rows = kv_cache_memory.run(context, lambda *progress: None).rows
    device_rows = [row for row in rows if row.variant == kv_cache_memory.DEVICE]
    assert [(row.value, row.check_error) for row in device_rows] == [(2400, 0), (6400, 0)]


@pytest.mark.parametrize("serial", [False, True])
def test_a_server_that_answers_one_request_after_another_is_refused(serial, tmp_path):
    context = toy_context("server_answers", {}, tmp_path)
    with served_in_this_process(gap_s=0.01, serial=serial) as server:
        row = server_answers.overlap_row(context, server, "toy", [f"p{i}" for i in range(5)], [20, 40], "fp32")
    assert row.value == (0 if serial else 4) and row.without_failed_value().is_unexpected is serial


def test_a_server_that_ends_the_long_answer_before_the_short_requests_arrive_is_asked_for_a_longer_one(tmp_path):
    context = toy_context("server_answers", {}, tmp_path)
    with served_in_this_process(gap_s=0.002) as server:  # two tokens take less time than the head start
        too_short = server_answers.overlap_row(context, server, "toy", ["a", "b", "c"], [2], "fp32")
        row = server_answers.overlap_row(context, server, "toy", ["a", "b", "c"], [2, 300], "fp32")
    assert too_short.value == 0 and row.value == 2 and row.check_error == 0


@pytest.mark.slow
@pytest.mark.process
def test_the_real_server_gives_the_answers_of_generate(tmp_path, monkeypatch):
    if reason := BACKENDS["transformers serve"].why_absent():
        pytest.skip(reason)
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path))
    sizes = {
        "model": "random_llama_d64_l2",
        "dtypes": ["fp32"],
        "backends": ["transformers serve"],
        # The cache holds the longest answer that `server_answers` may request, 256 tokens, and the short ones.
        "server": SIZES | {"blocks": 32, "start_timeout_s": 120.0},
        "prompts": 3,
        "prompt_tokens": 6,
        "output_tokens": 8,
    }
    context = toy_context("server_answers", sizes, tmp_path)
    try:
        rows = perform(context, tmp_path).rows
        compared = by_variant(rows, "count")["transformers serve"]
        assert compared.value == experiment_named("server_answers").forecast(context)[0].estimate == 3 * 8
        assert [row.value for row in rows if row.params.get("what") == server_answers.OVERLAPPED] == [sizes["prompts"] - 1]
        # A server that shifted all answers by one token would be refused.
        monkeypatch.setattr(server_answers, "pieces_of", lambda folder, ids: pieces_of(folder, [*ids[1:], ids[0]]))
        wrong = experiment_named("server_answers").run(context, lambda *progress: None).rows
        assert by_variant(wrong, "count")["transformers serve"].without_failed_value().is_unexpected
    finally:
        close_servers()
    assert served_model(context, "random_llama_d64_l2").source == "synthetic"


def test_the_sizes_of_the_profiles_share_a_server():
    for profile in ("smoke", "full", "study"):
        sizes = load_profile(profile).sizes
        load = server_load.ServerLoadOptions.parse(sizes("server_load"), "server_load")
        soak = server_soak.ServerSoakOptions.parse(sizes("server_soak"), "server_soak")
        assert (load.model, load.dtype, load.server, load.backends[0]) == (soak.model, soak.dtype, soak.server, soak.backend)
        most = max(level.users for level in load.levels)
        assert max(most, soak.users) <= load.server.max_requests
        assert profile == "smoke" or most == 64  # the end of the documented range
        # A request must fit, and so must all requests at the same time.
        tokens = load.server.max_requests * (soak.prompt_tokens + max(load.output_tokens, soak.long_tokens))
        assert tokens <= load.server.blocks * load.server.block_tokens
        counts = {level.users: level.requests for level in load.levels} | {"open": load.open_requests}
        assert all(count >= 20 for count in counts.values()), "a 95th percentile needs 20 requests"
        larger = [most] if profile == "smoke" else [16, most, "open"]
        assert all(counts[loop] >= 100 for loop in larger), "a 99th percentile needs 100 requests"
        assert load.runs >= LEAST_FOR_AN_INTERVAL
        assert soak.requests >= (200 if profile == "smoke" else 1000)
    assert Reply(due_s=0, end_s=1).error == ""


def _answers(*gaps_s: float, tokens: int = 5) -> list[Reply]:
    """Return answers of `tokens` tokens, each with a time between its tokens."""
    return [Reply(0.0, 1.0, first_s=0.5, last_s=0.5 + gap * (tokens - 1), tokens=tokens) for gap in gaps_s]


@pytest.mark.parametrize(
    ("gaps_s", "limit_s", "step_s", "observed"),
    [
        ([2e-3] * 20, None, 1e-3, True),
        ([16e-6] * 20, None, 1e-3, False),  # measured on two CPU cores: the server's event loop waits for the model
        ([16e-6] + [2e-3] * 19, None, 1e-3, True),  # one answer in twenty
        ([16e-6] * 2 + [2e-3] * 18, None, 1e-3, False),
        ([0.6e-3] * 20, None, 1e-3, True),  # a server may be faster than the measured step
        ([0.6e-3] * 20, 0.5e-3, 10e-3, True),  # with graphs, by far; the limit of the device counts
        ([0.4e-3] * 20, 0.5e-3, 10e-3, False),
        ([16e-6] * 20, None, None, True),  # nothing is known about the step
    ],
)
def test_tokens_that_arrive_faster_than_a_step_of_decoding_are_no_time_per_token(gaps_s, limit_s, step_s, observed):
    reason = tokens_sent_together([_answers(*gaps_s)], limit_s, step_s)
    assert (reason == "") is observed
    if not observed:
        slow = sum(gap >= (limit_s or step_s / 2) for gap in gaps_s)
        assert f"{len(gaps_s) - slow} of {len(gaps_s)} answers together" in reason
    assert tokens_sent_together([_answers(1e-6, tokens=1)], limit_s, step_s) == ""  # one token has no next one
