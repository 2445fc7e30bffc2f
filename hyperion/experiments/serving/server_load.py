"""How fast is a server for one user, for several users, and for requests that arrive at random times?

Percentiles are computed for each run. A row states the median over runs, with the interval of this median between two of the
sorted runs. The requests of one run give no interval, because they are not independent: they wait for each other. A run counts
only if all its requests succeeded.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result, Table
from hyperion.chapter.rows import checked
from hyperion.experiments.serving.backends import BACKENDS, ServerSizes
from hyperion.experiments.serving.client import Endpoint, Reply, closed_loop, in_event_loop, open_loop, throughput, why_invalid
from hyperion.experiments.serving.kv_cache_memory import decoding_limit
from hyperion.experiments.serving.metrics import NOT_OBSERVED
from hyperion.experiments.serving.served_models import DATA, ServedModel, prompts_of, served_model
from hyperion.experiments.serving.server import Server, ServerError, running_server
from hyperion.experiments.serving.server_answers import why_not_batched
from hyperion.results import Row, median_estimate, nearest_rank

LATENCIES = ("ttft_s", "tpot_s", "request_time_s")
RATES = ("output_tokens_per_s", "requests_per_s")
PERCENTILES = (50, 95, 99)
OPEN = "open"
_FEW = 0.05  # fraction of the answers whose tokens may arrive together
_NO_LIMIT = {
    "ttft_s": "no limit: it includes the time of the prompt and of waiting",
    "request_time_s": "no limit: it includes the time of the prompt and of waiting",
    "output_tokens_per_s": "no limit: it depends on the number of users",
    "requests_per_s": "no limit: it depends on the number of users",
}


class Level(Table):
    """A closed loop with a number of users.

    Args:
        users: number of users.
        requests: number of requests in a run.
    """

    users: int
    requests: int


class ServerLoadOptions(Options):
    """Options for the `server_load` experiment.

    Args:
        model: name of the model.
        dtype: number format.
        backends: names of the backends.
        server: capacity limits of the server.
        prompt_tokens, output_tokens: number of tokens in a prompt and in an answer.
        levels: the closed loops, at least one.
        open_load: arrival rate of the open loop, as a share of the requests/s of the last closed loop.
        open_requests: number of requests in a run of the open loop.
        runs: number of runs of each loop. With fewer than 6 runs, not even their range contains the median with 95 %.
        run_limit_s: time in seconds after which the unfinished requests of a run count as failed.
    """

    model: str
    dtype: str
    backends: tuple[str, ...]
    server: ServerSizes
    prompt_tokens: int
    output_tokens: int
    levels: tuple[Level, ...]
    open_load: float
    open_requests: int
    runs: int
    run_limit_s: float


@dataclass(frozen=True)
class Measured:
    """The results of all runs of one loop.

    Args:
        params: params of the rows of this loop.
        requests: number of requests in a run.
        runs: the replies of each run.
    """

    params: dict
    requests: int
    runs: list[list[Reply]]

    @property
    def reason(self) -> str:
        """Why the loop is invalid, or "" if all requests of all runs succeeded."""
        return next((reason for run in self.runs if (reason := why_invalid(run, self.requests))), "")


def forecast(context: Context) -> list[Forecast]:
    """Predict the TPOT for one user from the measured time of a decoding step, and the throughput for each number of users.

    If reading the weights limits a step, it takes the same time for several requests as for one, so N users get N times as many
    tokens. This prediction is too optimistic where the time of a step grows with the number of requests.
    """
    options = ServerLoadOptions.of(context)
    if any(BACKENDS[name].why_absent() for name in options.backends[:1]):
        return []
    step = _decoding_step(context)
    limit, source = decoding_limit(context, served_model(context, options.model), options.dtype)
    backend, forecasts = options.backends[0], []
    for level in options.levels:
        params = _params(options, level)
        known = f"the step of decoding that kv_cache_memory timed, {step.value:.3g} s" if step else f"no step is timed; {source}"
        tpot = step.value if step and level.users == 1 else None
        if level.users == 1:
            forecasts.append(Forecast(backend, "tpot_s", tpot, known, options.dtype, params | {"percentile": 50}, ceiling=limit))
        rate = level.users / step.value if step and step.value else None
        basis = f"{level.users} x one token in {known}; the prompt takes no time"
        forecasts.append(Forecast(backend, "output_tokens_per_s", rate, basis if step else known, options.dtype, params))
    return forecasts


def run(context: Context, report: Report) -> Result:
    """Measure each server: closed loops with increasing numbers of users, then an open loop at a share of the last throughput."""
    options = ServerLoadOptions.of(context)
    rows: list[Row] = []
    lines: list[dict] = []
    source = ""
    for place, name in enumerate(options.backends):
        backend = BACKENDS[name]
        if reason := backend.why_absent():
            rows.append(
                context.absent_row(name, "output_tokens_per_s", reason, dtype=options.dtype, params=_model_params(options))
            )
            continue
        model = served_model(context, options.model)
        source = model.source
        try:
            server = running_server(backend, model.folder, options.dtype, context.device.torch_device, options.server)
        except ServerError as error:
            reason = error.what
            rows.append(
                context.absent_row(name, "output_tokens_per_s", reason, dtype=options.dtype, params=_model_params(options))
            )
            continue
        steps = (len(options.levels) + 1) * options.runs

        def show(done: int, note: str, place=place, steps=steps) -> None:
            report(place * steps + done, len(options.backends) * steps, note)

        for measured in _loops(context, options, server, model, show):
            reason = measured.reason or why_not_batched(server, backend)
            rows += _rows(context, options, name, model, measured, reason)
            lines += _samples(name, measured)
    report(1, 1, "done")
    return Result(rows, pd.DataFrame(lines), source)


EXPERIMENT = Experiment(forecast, run, options=ServerLoadOptions, reads=("kv_cache_memory",), data=DATA)


def _decoding_step(context: Context) -> Row | None:
    """Return the row with the time of a decoding step that kv_cache_memory timed, or None if this run has no such row."""
    return next((row for row in context.upstream if row.metric == "tpot_s" and row.value is not None), None)


def tokens_sent_together(runs: Sequence[Sequence[Reply]], limit_s: float | None, step_s: float | None) -> str:
    """Return why the time per output token was not observed, or "" if it was.

    A server can compute the tokens of an answer one by one and still send them together, for example because its event loop does
    not run while the model computes. Then the time between two tokens at the client says nothing about the server.

    Args:
        runs: the replies of each run.
        limit_s: least time of a decoding step in seconds, or None if the device has no known limit.
        step_s: measured time of a decoding step on a CPU in seconds, or None. If `limit_s` is None, half of this time is used as
            the limit. A server without graphs may be faster than this measurement, but not twice as fast.
    """
    floor_s = limit_s if limit_s is not None else step_s / 2 if step_s is not None else 0.0
    times_s = [reply.tpot_s for run in runs for reply in run if reply.tokens > 1]
    together = [time_s for time_s in times_s if time_s < floor_s]
    if len(together) <= _FEW * len(times_s):
        return ""
    return (
        f"{NOT_OBSERVED}: the server sent the tokens of {len(together)} of {len(times_s)} answers together, "
        f"{statistics.median(together) * 1e6:.3g} us apart, although a token takes at least {floor_s * 1e6:.3g} us"
    )


def _loops(
    context: Context, options: ServerLoadOptions, server: Server, model: ServedModel, show: Callable[[int, str], None]
) -> list[Measured]:
    """Run all loops. Each run has its own prompts. The first prompts warm the server up and are not measured."""
    numbers = itertools.count()
    tokens, most = options.output_tokens, max(level.users for level in options.levels)
    measured = options.runs * (sum(level.requests for level in options.levels) + options.open_requests)
    texts = iter(prompts_of(context, model.folder, 2 * most + measured, options.prompt_tokens, context.seed))

    def all_runs(what: str, count: int, start: Callable[[Endpoint, list[str], int], Coroutine]) -> list[list[Reply]]:
        runs = []
        for _ in range(options.runs):
            number = next(numbers)
            show(number, what)
            endpoint, prompts = server.endpoint.within(options.run_limit_s), list(itertools.islice(texts, count))
            seed = 1000 * context.seed + number  # arrivals differ between runs
            runs.append(in_event_loop(lambda endpoint=endpoint, prompts=prompts, seed=seed: start(endpoint, prompts, seed)))
        return runs

    warm_up = list(itertools.islice(texts, 2 * most))
    in_event_loop(lambda: closed_loop(server.endpoint.within(options.run_limit_s), warm_up, tokens, most))
    loops = []
    for level in options.levels:
        runs = all_runs(
            f"{level.users} users",
            level.requests,
            lambda endpoint, prompts, seed, users=level.users: closed_loop(endpoint, prompts, tokens, users),
        )
        loops.append(Measured(_params(options, level), level.requests, runs))
    if loops[-1].reason:
        return loops
    # Requests that are due while `max_requests` are running wait in the client, because the front would refuse them. Their
    # latency includes this time.
    most_open = options.server.max_requests
    rate = options.open_load * statistics.median(throughput(run)[0] for run in loops[-1].runs)
    runs = all_runs(
        f"{rate:.3g} requests/s",
        options.open_requests,
        lambda endpoint, prompts, seed: open_loop(replace(endpoint, connections=most_open), prompts, tokens, rate, seed),
    )
    return [*loops, Measured(_params(options, None), options.open_requests, runs)]


def _rows(
    context: Context, options: ServerLoadOptions, name: str, model: ServedModel, measured: Measured, reason: str
) -> list[Row]:
    identity = {"dtype": options.dtype, "data_source": model.source}
    if reason:
        metrics = (*LATENCIES, *RATES)
        return [context.absent_row(name, metric, reason, params=measured.params, **identity) for metric in metrics]
    check = checked("failed requests", 0, 0)
    rows = []
    # On a GPU, a server may replay graphs, so that its step is much shorter than the one that was timed.
    step = _decoding_step(context) if context.device.kind == "cpu" else None
    for metric in LATENCIES:
        limit, source = decoding_limit(context, model, options.dtype) if metric == "tpot_s" else (None, _NO_LIMIT[metric])
        missing = tokens_sent_together(measured.runs, limit, step and step.value) if metric == "tpot_s" else ""
        undefined = sum(math.isnan(getattr(reply, metric)) for run in measured.runs for reply in run)
        if undefined and not missing:
            missing = f"not computed: {undefined} answers have no text, or too few tokens for this time"
        for percent in PERCENTILES:
            params = measured.params | {"percentile": percent}
            # With fewer requests than this, the percentile is the largest value, whatever the distribution.
            least = round(100 / (100 - percent))
            why = missing
            if measured.requests < least:
                why = (
                    f"not computed: the {percent}th percentile needs {least} requests in a run, and there are {measured.requests}"
                )
            if why:
                rows.append(context.absent_row(name, metric, why, params=params, **identity))
                continue
            values = [nearest_rank([getattr(reply, metric) for reply in run], percent / 100) for run in measured.runs]
            columns = identity | check | {"params": params, "limit": limit, "limit_source": source}
            rows.append(context.row(name, metric, median_estimate(values), **columns))
    totals = [throughput(run) for run in measured.runs]
    for place, metric in ((1, "output_tokens_per_s"), (0, "requests_per_s")):
        estimate = median_estimate([total[place] for total in totals])
        columns = identity | check | {"params": measured.params, "limit_source": _NO_LIMIT[metric]}
        rows.append(context.row(name, metric, estimate, **columns))
    return rows


def _samples(name: str, measured: Measured) -> list[dict]:
    lines = []
    for number, replies in enumerate(measured.runs):
        for reply in replies:
            times = {metric: getattr(reply, metric) for metric in LATENCIES}
            shown = {key: value for key, value in measured.params.items() if key in ("loop", "users", "load")}
            lines.append({"variant": name, "run": number, **shown, **times, "tokens": reply.tokens, "error": reply.error})
    return lines


def _model_params(options: ServerLoadOptions) -> dict:
    return {"model": options.model, "prompt_tokens": options.prompt_tokens, "output_tokens": options.output_tokens}


def _params(options: ServerLoadOptions, level: Level | None) -> dict:
    if level is None:
        return _model_params(options) | {"loop": OPEN, "load": options.open_load, "requests": options.open_requests}
    return _model_params(options) | {"loop": "closed", "users": level.users, "requests": level.requests}
