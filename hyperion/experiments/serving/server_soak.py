"""Does a server survive many requests, faulty clients, and SIGTERM?

The server receives many requests in a row, requests of clients that disconnect, so many that their prompts occupy every block of
the KV cache, requests that are malformed, larger than a body or the KV cache may be, or without the key, more requests than it
accepts, and finally SIGTERM while it is answering. After a client that disconnects and after each invalid request, a normal
request must still be answered.

Optionally, a second backend then answers the first part of these requests. Its memory growth and throughput are reported for
comparison.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import checked
from hyperion.experiments.serving.backends import BACKENDS, ServerSizes
from hyperion.experiments.serving.client import Endpoint, Reply, complete, events_of, in_event_loop, why_invalid
from hyperion.experiments.serving.metrics import GROWTH_CHECK
from hyperion.experiments.serving.served_models import DATA, prompts_of, served_model
from hyperion.experiments.serving.server import DRAIN_S, MAX_BODY_BYTES, Server, ServerError, running_server
from hyperion.results import Estimate, Row, median_estimate
from hyperion.results.statistics import mean_estimate

if TYPE_CHECKING:
    import httpx

SOAK, HANG_UPS, OVERLOAD, DRAIN = "steady requests", "clients that hang up", "overload", "SIGTERM"
LEFT = "CPU time of an answer whose client hung up, over that of a whole answer"
BLOCKS = "long answers after hang-ups whose prompts occupied every block of the KV cache"
REFUSED, FINISHED = "refused requests", "running answers that were finished"
RSS, DEVICE_MEMORY = "resident memory of all processes", "used device memory"
_SEGMENTS = 10  # the growth is computed from the medians of segments, because consecutive readings are not independent
_WARM_SHARE = 0.2  # readings in this first share of the requests are not used, because caches still fill
# Bound on the CPU time of an answer whose client disconnects after the first token, relative to that of a whole answer. A backend
# that stops generating needs far less.
_LEFT_SHARE = 0.5
# A backend is idle if it uses at most one tick of the CPU clock in each of two windows. On a busy machine, a backend that works
# may get no core for one window.
_CLOCK_S, _WINDOW_S, _IDLE_WINDOWS, _SETTLE_S = 0.01, 0.5, 2, 30.0
# Attempts to measure a hang-up, and prompts for each hang-up that must occupy blocks: the front refuses some requests.
_ATTEMPTS = 3
_PAUSE_S = 0.1  # seconds between two of the requests that are sent after SIGTERM until one is refused


class ServerSoakOptions(Options):
    """Options for the `server_soak` experiment.

    Args:
        model: name of the model.
        dtype: number format.
        backend: name of the backend.
        compared_backend: name of another backend that answers some of the requests of the soak test, or "".
        compared_requests: number of these requests.
        server: capacity limits of the server.
        requests: number of requests in the soak test.
        users: number of users in its closed loop.
        prompt_tokens, output_tokens: number of tokens in a prompt and in an answer.
        hang_up_every: number of answered requests after which another client disconnects.
        long_tokens: number of tokens in the answers to clients that disconnect, during the overload, and during the drain.
        growth_bound_bytes: bound on the growth of the server's memory per request, for the upper end of the confidence interval.
            The growth is not zero, because allocators and caches of Python still fill. The bound is above the upper ends that
            were measured for a server without a known leak, and a small part of a leak that was found (see `sizes.toml`).
        time_limit_s: time in seconds after which the unfinished requests of the soak test count as failed.
    """

    model: str
    dtype: str
    backend: str
    compared_backend: str
    compared_requests: int
    server: ServerSizes
    requests: int
    users: int
    prompt_tokens: int
    output_tokens: int
    hang_up_every: int
    long_tokens: int
    growth_bound_bytes: int
    time_limit_s: float


def forecast(context: Context) -> list[Forecast]:
    """Predict that all requests of the soak test succeed, and that the memory does not grow.

    The second prediction assumes that all allocators and caches are full.
    """
    options = ServerSoakOptions.of(context)
    if BACKENDS[options.backend].why_absent():
        return []
    forecasts = []
    for tested in _tested(options):
        basis = "each request is answered"
        forecasts.append(Forecast(SOAK, "count", float(tested.requests), basis, options.dtype, _params(tested)))
        basis = "a server frees all memory of a request, and its caches are full"
        forecasts.append(Forecast(RSS, "growth_bytes", 0.0, basis, options.dtype, _params(tested)))
    return forecasts


def run(context: Context, report: Report) -> Result:
    """Send the requests of the soak test, then the faulty requests, then SIGTERM, which ends the server."""
    options = ServerSoakOptions.of(context)
    backend = BACKENDS[options.backend]
    reason = backend.why_absent()
    if reason:
        return Result([context.absent_row(SOAK, "count", reason, dtype=options.dtype, params=_params(options))], pd.DataFrame())
    model = served_model(context, options.model)

    def server_of(tested: ServerSoakOptions) -> Server:
        device = context.device.torch_device
        return running_server(BACKENDS[tested.backend], model.folder, tested.dtype, device, tested.server)

    def no_server(tested: ServerSoakOptions, error: ServerError) -> Row:
        return context.absent_row(SOAK, "count", error.what, dtype=tested.dtype, params=_params(tested))

    try:
        server = server_of(options)
    except ServerError as error:
        return Result([no_server(options, error)], pd.DataFrame(), model.source)
    others_than_soak = options.requests // options.hang_up_every + options.server.max_requests + 100
    count = options.requests + others_than_soak + _ATTEMPTS * _hang_ups_that_fill(options)
    prompts = prompts_of(context, model.folder, count, options.prompt_tokens, 7000 + context.seed)
    others = _tested(options)[1:]
    steps = 4 + len(others)
    report(0, steps, SOAK)
    replies, readings = _soak(context, options, server, prompts)
    rows = _soak_rows(context, options, replies, readings, options.growth_bound_bytes)
    report(1, steps, HANG_UPS)
    rows += _rows_or_reason(context, options, HANG_UPS, LEFT, lambda: [_hang_up_row(context, options, server, prompts)])
    later = prompts[options.requests :]
    rows += _rows_or_reason(context, options, HANG_UPS, BLOCKS, lambda: [_block_row(context, options, server, later)])
    report(2, steps, REFUSED)
    rows += _rows_or_reason(context, options, OVERLOAD, REFUSED, lambda: _refusal_rows(context, options, server, prompts))
    report(3, steps, DRAIN)
    rows += _rows_or_reason(context, options, DRAIN, FINISHED, lambda: _drain_rows(context, options, server, prompts))
    for place, other in enumerate(others):
        report(4 + place, steps, other.backend)
        try:
            server = server_of(other)
        except ServerError as error:
            rows.append(no_server(other, error))
            continue
        replies, more = _soak(context, other, server, prompts)
        rows += _soak_rows(context, other, replies, more, None)
        readings = pd.concat([readings, more], ignore_index=True)
    report(steps, steps, "done")
    return Result([replace(row, data_source=model.source) for row in rows], readings, model.source)


EXPERIMENT = Experiment(forecast, run, options=ServerSoakOptions, data=DATA)


def _rows_or_reason(
    context: Context, options: ServerSoakOptions, variant: str, what: str, measure: Callable[[], list[Row]]
) -> list[Row]:
    """Return the rows that `measure` returns or, if the server fails, a row with the reason. The rows before it are kept."""
    import httpx

    try:
        return measure()
    except (ServerError, TimeoutError, httpx.HTTPError) as error:
        reason = f"invalid: {error.what if isinstance(error, ServerError) else f'{type(error).__name__}: {error}'}"
        params = {"backend": options.backend, "what": what}
        return [context.absent_row(variant, "count", reason, dtype=options.dtype, params=params)]


def _tested(options: ServerSoakOptions) -> list[ServerSoakOptions]:
    """Return the options for the soak test of each backend."""
    if not options.compared_backend:
        return [options]
    update = {"backend": options.compared_backend, "requests": options.compared_requests}
    return [options, options.model_copy(update=update)]


def slope_estimate(requests: np.ndarray, readings: np.ndarray) -> Estimate:
    """Return the memory growth per request, with a 95 % confidence interval based on Student's t-distribution.

    The readings are divided into consecutive segments. The growth is the mean of the differences between the medians of
    neighbouring segments. Memory that grows in random steps has independent differences, but not independent deviations from a
    line, so the interval of a fitted line would be too narrow. If the readings scatter around a line, the interval is too wide.

    Args:
        requests: number of answered requests at each reading, in ascending order.
        readings: memory at each reading, in bytes.
    """
    segments = np.array_split(np.column_stack([requests, readings]).astype(float), _SEGMENTS)
    x, y = np.array([np.median(segment, axis=0) for segment in segments]).T
    return mean_estimate(np.diff(y) / np.diff(x))


def _soak(context: Context, options: ServerSoakOptions, server: Server, prompts: list[str]) -> tuple[list[Reply], pd.DataFrame]:
    """Send the requests with several users, and read the memory after each answer. Another client regularly disconnects."""
    endpoint = server.endpoint.within(options.time_limit_s)
    replies: list[Reply] = []
    readings: list[dict] = []
    waiting, leaving = iter(prompts[: options.requests]), iter(prompts[options.requests :])

    async def user(session) -> None:
        for prompt in waiting:
            replies.append(await complete(session, endpoint, prompt, options.output_tokens))
            reading = {RSS: server.rss_bytes(), DEVICE_MEMORY: _used_device_memory(context)}
            fitted = len(replies) > _WARM_SHARE * options.requests
            place = {"backend": options.backend, "requests": len(replies), "time_s": time.perf_counter() - start_s}
            readings.append({**place, "fitted": fitted, **reading})
            if len(replies) % options.hang_up_every == 0:
                try:
                    await hang_up(session, endpoint, next(leaving), options.long_tokens)
                except ServerError as error:  # counts as a failed request
                    now_s = time.perf_counter()
                    replies.append(Reply(now_s, now_s, error=error.what))

    async def work() -> None:
        async with endpoint.session() as session:
            await asyncio.gather(*(user(session) for _ in range(options.users)))

    start_s = time.perf_counter()
    in_event_loop(work)
    return replies, pd.DataFrame(readings)


class RequestRefused(ServerError):
    """Raised if the front refuses a request because it has no place for it."""


async def hang_up(session: "httpx.AsyncClient", endpoint: Endpoint, prompt: str, tokens: int) -> None:
    """Start an answer, and close the connection after the first text.

    Raises:
        RequestRefused: the front has no place for the request, so the backend did not receive it.
        ServerError: the server sent another status, an error or no text, closed the connection, or was too slow.
    """
    import httpx

    kind, limit_s = ServerError, endpoint.limit_s()
    try:
        async with (
            asyncio.timeout(limit_s),
            session.stream("POST", "/v1/completions", json=endpoint.body(prompt, tokens)) as response,
        ):
            kind = RequestRefused if response.status_code == 503 else ServerError
            problem = f"status {response.status_code}" if response.status_code != 200 else "the answer ended"
            async for event in events_of(response.aiter_lines()):
                if "error" in event:
                    problem = f"the server reports {event['error']!r:.200}"
                    break
                if any(choice.get("text") for choice in event.get("choices", ())):
                    return
    except TimeoutError:
        problem = f"nothing after {limit_s:.3g} s"
    except (httpx.HTTPError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    what = f"a client that hangs up received no text: {problem}"
    raise kind(what, where=endpoint.address, next_step="read the log of the server")


def _soak_rows(
    context: Context, options: ServerSoakOptions, replies: list[Reply], readings: pd.DataFrame, growth_bound_bytes: int | None
) -> list[Row]:
    """Return the rows of a soak test: answered requests, throughput, and growth of the memory.

    Args:
        context: context of the experiment.
        options: options of this soak test.
        replies: replies to all requests.
        readings: readings of the memory, one after each answer.
        growth_bound_bytes: bound on the growth, or None if the growth is measured for comparison only.
    """
    identity = {"dtype": options.dtype, "params": _params(options)}
    if reason := why_invalid(replies, options.requests):
        return [context.absent_row(SOAK, "count", reason, **identity)]
    answered = checked("failed requests", 0, 0)
    limit = {"limit_source": "no limit: it depends on the number of users"}
    rate = median_estimate(_rates(replies, readings))
    rows = [
        context.row(SOAK, "count", len(replies), **identity, **answered),
        context.row(SOAK, "output_tokens_per_s", rate, **identity, **answered, **limit),
    ]
    for name in (RSS, DEVICE_MEMORY):
        later = readings.loc[readings["fitted"], ["requests", name]].dropna().to_numpy(float)
        if not len(later):
            reason = "the device is the CPU, whose memory is that of the processes"
            rows.append(context.absent_row(name, "growth_bytes", reason, **identity))
            continue
        slope = slope_estimate(later[:, 0], later[:, 1])
        check = answered
        if growth_bound_bytes is not None:
            check = checked(GROWTH_CHECK, slope.ci_high, growth_bound_bytes)
        rows.append(context.row(name, "growth_bytes", slope, **identity, **check))
        rows.append(context.row(name, "server_memory_bytes", float(later[-1, 1]), **identity))
    return rows


def _rates(replies: list[Reply], readings: pd.DataFrame) -> list[float]:
    """Return the output tokens per second in consecutive segments, after the first requests."""
    ends = np.flatnonzero(readings["fitted"].to_numpy())
    times_s, tokens = readings["time_s"].to_numpy(), np.cumsum([reply.tokens for reply in replies])
    edges = [segment[0] - 1 for segment in np.array_split(ends, _SEGMENTS)] + [ends[-1]]
    return [float((tokens[end] - tokens[start]) / (times_s[end] - times_s[start])) for start, end in itertools.pairwise(edges)]


def _hang_up_row(context: Context, options: ServerSoakOptions, server: Server, prompts: list[str]) -> Row:
    """Compare the backend's CPU time for a whole answer and for an answer whose client disconnects after the first token.

    CPU time is compared instead of elapsed time, because other processes may use the cores.
    """

    async def work() -> tuple[float, float, Reply]:
        async with server.endpoint.session() as session:
            # Work that remains from the soak test would count as work of the whole answer.
            await _cpu_until_idle(server, 0.0, _WINDOW_S)
            start_s = server.backend_cpu_s()
            whole = await complete(session, server.endpoint, prompts[-1], options.long_tokens)
            whole_s = await _cpu_until_idle(server, start_s, 0.0)
            start_s = server.backend_cpu_s()
            await hang_up(session, server.endpoint, prompts[-2], options.long_tokens)
            # A backend that ignores the client works about as long as for the whole answer.
            left_s = await _cpu_until_idle(server, start_s, whole.request_time_s)
            after = await complete(session, server.endpoint, prompts[-3], options.output_tokens)
            return whole_s, left_s, after if not whole.error else whole

    # On a busy machine, the server may notice late that the client has gone. A server that ignores it fails every attempt.
    measured = []
    for _ in range(_ATTEMPTS):
        measured.append(in_event_loop(work))
        whole_s, left_s, reply = min(measured, key=lambda one: (bool(one[2].error), one[1] / max(one[0], _CLOCK_S)))
        if not reply.error and left_s <= _LEFT_SHARE * max(whole_s, _CLOCK_S):
            break
    identity = {"dtype": options.dtype, "params": {"what": LEFT, "tokens": options.long_tokens}}
    if reply.error:
        return context.absent_row(HANG_UPS, "share", f"invalid: a request failed: {reply.error}", **identity)
    share = left_s / max(whole_s, _CLOCK_S)
    return context.row(HANG_UPS, "share", share, **identity, **checked("share of the CPU time", share, _LEFT_SHARE))


def _hang_ups_that_fill(options: ServerSoakOptions) -> int:
    """Return the number of hang-ups whose prompts would occupy all blocks of the KV cache if the server kept them.

    Only full blocks of the prompts count, because an answer may end at any token.
    """
    return -(-options.server.blocks // max(1, options.prompt_tokens // options.server.block_tokens))


def _block_row(context: Context, options: ServerSoakOptions, server: Server, prompts: list[str]) -> Row:
    """Let clients disconnect until their prompts have occupied every block of the KV cache, then send a load of long answers.

    The blocks are allocated when the server starts, so its memory does not show whether it frees them. A server that keeps the
    blocks of these requests has none left for the load, which is then not answered in time.
    """
    needed, waiting = _hang_ups_that_fill(options), iter(prompts)
    started = 0

    async def client(session) -> None:
        nonlocal started
        for prompt in waiting:
            if started >= needed:
                return
            try:
                await hang_up(session, server.endpoint, prompt, options.long_tokens)
            except RequestRefused:
                continue  # it occupied no block, so it does not count
            except ServerError:
                return  # the server has no free block left
            started += 1

    async def work() -> None:
        async with server.endpoint.session() as session:
            await asyncio.gather(*(client(session) for _ in range(options.users)))

    in_event_loop(work)
    replies = _at_once(server, prompts[: options.users], options.long_tokens)
    failed = sum(bool(reply.error) for reply in replies)
    params = {"what": BLOCKS, "hang_ups": started, "blocks": options.server.blocks}
    check = checked("failed long answers, and missing hang-ups", failed + max(0, needed - started), 0)
    return context.row(HANG_UPS, "count", len(replies) - failed, dtype=options.dtype, params=params, **check)


async def _cpu_until_idle(server: Server, start_s: float, least_s: float) -> float:
    """Wait for `least_s` seconds and until the backend is idle. Return the CPU time in seconds that it used beyond `start_s`."""
    await asyncio.sleep(least_s)
    used_s, idle = server.backend_cpu_s(), 0
    for _ in range(round(_SETTLE_S / _WINDOW_S)):
        await asyncio.sleep(_WINDOW_S)
        earlier_s, used_s = used_s, server.backend_cpu_s()
        idle = idle + 1 if used_s - earlier_s <= _CLOCK_S else 0
        if idle == _IDLE_WINDOWS:
            break
    return used_s - start_s


def _refusal_rows(context: Context, options: ServerSoakOptions, server: Server, prompts: list[str]) -> list[Row]:
    """Send requests that must be refused, each followed by a request that must be answered."""
    endpoint = server.endpoint
    valid = endpoint.body(prompts[-3], options.output_tokens)
    cases: list[tuple[str, dict, int]] = [
        ("no JSON", {"content": b'{"prompt": "The'}, 400),
        ("too large", {"json": valid | {"prompt": "x" * MAX_BODY_BYTES}}, 413),
        ("prompt larger than the cache", {"json": valid | {"prompt": "x " * options.server.cache_tokens}}, 413),
        ("answer larger than the cache", {"json": valid | {"max_tokens": options.server.cache_tokens}}, 413),
        ("no key", {"json": valid, "headers": {"Authorization": ""}}, 401),
        ("wrong key", {"json": valid, "headers": {"Authorization": "Bearer wrong"}}, 401),
        ("no prompt but a number", {"json": valid | {"prompt": 5}}, 400),
        ("unknown field", {"json": valid | {"ignore_eos": True}}, 422),
        ("unknown model", {"json": valid | {"model": "unknown"}}, 400),
    ]
    if not options.backend.startswith("transformers serve"):
        cases = cases[:6]  # the backend refuses the others, with its own statuses

    async def send(request: dict) -> tuple[int, Reply]:
        async with endpoint.session() as session, asyncio.timeout(endpoint.deadline_s):
            status = (await session.post("/v1/completions", **request)).status_code
            return status, await complete(session, endpoint, prompts[-4], options.output_tokens)

    rows = []
    for name, request, expected in cases:
        status, after = in_event_loop(lambda request=request: send(request))
        params = {"what": REFUSED, "status": status}
        if after.error:
            reason = f"invalid: the next request failed: {after.error}"
            rows.append(context.absent_row(name, "count", reason, dtype=options.dtype, params=params))
            continue
        check = checked(f"statuses other than {expected}", int(status != expected), 0)
        rows.append(context.row(name, "count", 1, dtype=options.dtype, params=params, **check))
    return [*rows, _overload_row(context, options, server, prompts)]


def _overload_row(context: Context, options: ServerSoakOptions, server: Server, prompts: list[str]) -> Row:
    """Send more requests at the same time than the front accepts. The excess must be refused at once with status 503."""
    most = options.server.max_requests
    extra = max(2, most // 2)
    replies = _at_once(server, prompts[-most - extra :], options.long_tokens)
    served, refused = sum(not reply.error for reply in replies), sum(reply.status == 503 for reply in replies)
    check = checked("requests that were neither served nor refused as expected", abs(served - most) + abs(refused - extra), 0)
    params = {"what": REFUSED, "sent": most + extra, "accepted": most}
    return context.row(OVERLOAD, "count", refused, dtype=options.dtype, params=params, **check)


def _drain_rows(context: Context, options: ServerSoakOptions, server: Server, prompts: list[str]) -> list[Row]:
    """Send SIGTERM while answers are running. They must finish, a new request must be refused, and the exit code must be 0."""
    streams = options.users
    signalled: list[float] = []

    async def ask() -> Reply:
        async with server.endpoint.session() as fresh:  # new connection: open ones may still be served
            return await complete(fresh, server.endpoint, prompts[-2], 1)

    async def work() -> tuple[list[Reply], bool]:
        async with server.endpoint.session() as session:
            running = [
                asyncio.create_task(complete(session, server.endpoint, prompt, options.long_tokens))
                for prompt in prompts[:streams]
            ]
            try:
                # When this additional stream has received its first text, the server is answering.
                await hang_up(session, server.endpoint, prompts[-1], options.long_tokens)
                signalled.append(time.perf_counter())
                server.drain()
                refused = await refused_while(running, ask)
                return await asyncio.gather(*running), refused
            finally:
                # If the server fails, the requests must not outlive the session.
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    replies, refused = in_event_loop(work)
    try:
        code = server.wait(DRAIN_S + 10)
    except ServerError as error:
        return [context.absent_row(DRAIN, "count", f"invalid: {error.what}", dtype=options.dtype, params={"streams": streams})]
    took_s = time.perf_counter() - signalled[0]
    finished = sum(not reply.error for reply in replies)
    params = {"what": FINISHED, "streams": streams}
    identity = {"dtype": options.dtype}
    # A nonzero exit code and answers to all late requests each count as one fault.
    faults = (streams - finished) + int(code != 0) + int(not refused)
    check = checked("faults: unfinished answers, an accepted new request, an exit code other than 0", faults, 0)
    return [
        context.row(DRAIN, "count", finished, params=params, **identity, **check),
        context.row(DRAIN, "drain_time_s", took_s, params=params, **identity, **checked("exit code", code, 0)),
    ]


async def refused_while(running: Sequence[asyncio.Task], ask: Callable[[], Awaitable[Reply]]) -> bool:
    """Send requests until one is refused, or all running answers are finished. Return whether one was refused before that.

    One request would not suffice: on a busy machine, the server may not have received the signal when the request arrives.
    """
    while not all(task.done() for task in running):
        await asyncio.sleep(_PAUSE_S)
        if (await ask()).error and not all(task.done() for task in running):
            return True
    return False


def _at_once(server: Server, prompts: Sequence[str], tokens: int) -> list[Reply]:
    async def work() -> list[Reply]:
        async with server.endpoint.session() as session:
            return await asyncio.gather(*(complete(session, server.endpoint, prompt, tokens) for prompt in prompts))

    return in_event_loop(work)


def _used_device_memory(context: Context) -> float | None:
    """Return the device memory that all processes use, in bytes. None on a CPU."""
    if context.device.kind == "cpu":
        return None
    free, total = torch.cuda.mem_get_info(context.device.torch_device)
    return float(total - free)


def _params(options: ServerSoakOptions) -> dict:
    return {
        "model": options.model,
        "backend": options.backend,
        "requests": options.requests,
        "users": options.users,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
    }
