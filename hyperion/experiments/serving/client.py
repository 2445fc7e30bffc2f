"""Load client: sends streamed completion requests, times the tokens of the answers, and tells valid runs from invalid ones.

In a *closed loop*, a fixed number of users send requests. Each user sends its next request when its previous one is answered. So
a slow server gets fewer requests. In an *open loop*, requests arrive at times that do not depend on the server. Their latency is
measured from the time at which they were due, even if the client sent them later. If it were measured from the time of sending,
the waiting time of delayed requests would be missing when the server stalls (coordinated omission).
"""

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    import httpx

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Reply:
    """The answer to one request. All times are in seconds on a monotonic clock.

    Args:
        due_s: time at which the request was due. In a closed loop, this is the time at which it was sent.
        first_s, last_s: times at which the first and the last text arrived. NaN if no text arrived.
        end_s: time at which the answer was complete, or at which the request failed.
        tokens: number of tokens in the answer, as counted by the server.
        pieces: the received texts, in order of arrival. `transformers serve` sends one piece for each token.
        status: HTTP status of the response, or 0 without a response.
        prompt: text of the prompt.
        error: why the request failed, or "" if it succeeded.
    """

    due_s: float
    end_s: float
    first_s: float = math.nan
    last_s: float = math.nan
    tokens: int = 0
    pieces: tuple[str, ...] = ()
    status: int = 0
    prompt: str = ""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to first token in seconds: from the due time of the request to its first text."""
        return self.first_s - self.due_s

    @property
    def tpot_s(self) -> float:
        """Mean time per output token in seconds, over the tokens after the first one. NaN for an answer of one token."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else math.nan

    @property
    def request_time_s(self) -> float:
        """Time from the due time of the request to its end, in seconds."""
        return self.end_s - self.due_s


@dataclass(frozen=True)
class Endpoint:
    """Address of a server, and settings for requests to it.

    Args:
        address: address of the server, such as "http://127.0.0.1:8000".
        key: key that is sent as a bearer token.
        model: name of the model that is sent in requests.
        deadline_s: time in seconds after which an unfinished request counts as failed.
        connections: largest number of connections, or None for no limit. With a limit, requests wait in the client.
        until_s: time on the clock of `time.perf_counter` at which all unfinished requests count as failed.
    """

    address: str
    key: str = field(repr=False)
    model: str
    deadline_s: float = 60.0
    connections: int | None = None
    until_s: float = math.inf

    def within(self, seconds: float) -> "Endpoint":
        """Return a copy of this endpoint with a deadline: all requests together must end within `seconds` from now."""
        return replace(self, until_s=time.perf_counter() + seconds)

    def limit_s(self) -> float:
        """Return how long a request that starts now may take, in seconds."""
        return max(0.0, min(self.deadline_s, self.until_s - time.perf_counter()))

    def session(self) -> "httpx.AsyncClient":
        """Return a new httpx.AsyncClient for this endpoint."""
        import httpx  # imported here, so that rows of another machine can be shown if httpx is not installed

        return httpx.AsyncClient(
            base_url=self.address,
            headers={"Authorization": f"Bearer {self.key}"},
            # The deadline limits the total time of a request.
            timeout=None,
            limits=httpx.Limits(max_connections=self.connections, max_keepalive_connections=self.connections),
            trust_env=False,
        )

    def body(self, prompt: str, tokens: int) -> dict:
        """Return the body of a streaming request for a greedy answer of at most `tokens` tokens."""
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            # vLLM reports the number of tokens only on request. `transformers serve` always reports it.
            "stream_options": {"include_usage": True},
        }


async def complete(
    session: "httpx.AsyncClient", endpoint: Endpoint, prompt: str, tokens: int, due_s: float | None = None
) -> Reply:
    """Send one request and read its stream. A failure is not raised: it is returned as a reply with an error.

    Args:
        session: the session of the endpoint.
        endpoint: the endpoint.
        prompt: text of the prompt.
        tokens: largest number of tokens in the answer.
        due_s: time at which the request was due, on the clock of `time.perf_counter`. Defaults to now.
    """
    import httpx

    due_s = time.perf_counter() if due_s is None else due_s
    times: list[float] = []
    pieces: list[str] = []
    status, counted, finished, error = 0, 0, False, ""
    limit_s = endpoint.limit_s()
    try:
        async with (
            asyncio.timeout(limit_s),
            session.stream("POST", "/v1/completions", json=endpoint.body(prompt, tokens)) as response,
        ):
            status = response.status_code
            if status != 200:
                error = f"status {status}: {(await response.aread()).decode(errors='replace'):.200}"
            async for event in events_of(response.aiter_lines()):
                if "error" in event:
                    error = f"the server reports {event['error']!r:.200}"
                    break
                for choice in event.get("choices", ()):
                    if choice.get("text"):
                        times.append(time.perf_counter())
                        pieces.append(choice["text"])
                    finished |= choice.get("finish_reason") is not None
                counted = (event.get("usage") or {}).get("completion_tokens", counted)
        if not error and not finished:
            error = "the stream ended without a finish_reason"
        if not error and not counted:
            error = "the server counted no tokens"
    except TimeoutError:
        error = f"not finished after {limit_s:.3g} s"
    except (httpx.HTTPError, ValueError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    first, last = (times[0], times[-1]) if times else (math.nan, math.nan)
    return Reply(due_s, time.perf_counter(), first, last, counted, tuple(pieces), status, prompt, error)


async def events_of(lines: AsyncIterator[str]) -> AsyncIterator[dict]:
    """Yield the JSON objects of a stream of server-sent events, up to the event [DONE].

    Raises:
        ValueError: an event is not a JSON object.
    """
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event is {data!r:.80}, which is no JSON object")
        yield event


async def closed_loop(endpoint: Endpoint, prompts: Sequence[str], tokens: int, users: int) -> list[Reply]:
    """Send all prompts with a fixed number of users. Each user sends its next request when its last one is answered.

    The replies are in order of completion.
    """
    waiting = iter(prompts)
    replies: list[Reply] = []

    async def user(session) -> None:
        for prompt in waiting:  # all users share the iterator
            replies.append(await complete(session, endpoint, prompt, tokens))

    async with endpoint.session() as session:
        await asyncio.gather(*(user(session) for _ in range(users)))
    return replies


async def open_loop(endpoint: Endpoint, prompts: Sequence[str], tokens: int, requests_per_s: float, seed: int) -> list[Reply]:
    """Send each prompt when it is due. The arrivals are a Poisson process, so the gaps between them are exponential."""
    gaps_s = np.random.default_rng(seed).exponential(1 / requests_per_s, len(prompts))
    start_s = time.perf_counter()
    due_s = start_s + np.cumsum(gaps_s)

    async def arrive(session, prompt: str, due_s: float) -> Reply:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        return await complete(session, endpoint, prompt, tokens, due_s)

    async with endpoint.session() as session:
        return await asyncio.gather(*(arrive(session, *pair) for pair in zip(prompts, due_s.tolist(), strict=True)))


def in_event_loop(work: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
    """Run a coroutine in the event loop of a new thread and return its result.

    A new thread is needed in a notebook, because the calling thread already runs an event loop.
    """
    outcome: list[Answer] = []
    problem: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work()))
        except BaseException as error:
            problem.append(error)

    thread = threading.Thread(target=run, name="hyperion-load-client", daemon=True)
    thread.start()
    thread.join()
    if problem:
        raise problem[0]
    return outcome[0]


def why_invalid(replies: Sequence[Reply], requests: int) -> str:
    """Return why a run is invalid, or "" if all its requests succeeded.

    The requests that fail under load are often those that would have been slowest. A percentile over the other requests would be
    too low, so an invalid run has no percentiles.
    """
    failed = [reply for reply in replies if reply.error]
    if not failed and len(replies) == requests:
        return ""
    example = f"; the first error: {failed[0].error}" if failed else ""
    return f"invalid: {len(replies) - len(failed)} of {requests} requests succeeded{example}"


def throughput(replies: Sequence[Reply]) -> tuple[float, float]:
    """Return (requests/s, output tokens/s) of a run.

    The run starts when its first request is due and ends when its last request ends.
    """
    span_s = max(reply.end_s for reply in replies) - min(reply.due_s for reply in replies)
    return len(replies) / span_s, sum(reply.tokens for reply in replies) / span_s
