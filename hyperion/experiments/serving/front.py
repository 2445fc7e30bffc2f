"""The front: a reverse proxy that protects a backend. It requires a key, limits requests, and drains after SIGTERM.

`transformers serve` has no keys and no limits. The front adds them, and forwards all other requests unchanged:

    401  no key, or a wrong key                    413  a body that is too large, or too many tokens for the KV cache
    400  a body that is not a JSON object          503  too many requests at once, with Retry-After
    408  a body that does not arrive in time       502  the backend does not answer

A request whose prompt and answer do not fit into the KV cache must not reach `transformers serve`: it ends the generation for all
requests, and the server has to be restarted. The front has no tokenizer, so it counts each byte of a prompt as a token. This
refuses some prompts that would fit.

After SIGTERM, the front accepts no new connections, finishes the running answers, ends the backend, and exits with code 0. If a
client disconnects, the front closes its connection to the backend, so that the backend stops generating. This also applies to a
client that waits for a whole answer (`"stream": false`).

This module is also the program of the front. The launcher passes the key in the environment variable named by `KEY`, because
command lines are visible to all users.
"""

import asyncio
import contextlib
import hmac
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
import typer
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from hyperion.experiments.serving.tether import tethered_command
from hyperion.processes.child_process import die_with, do_not_outlive

KEY = "HYPERION_SERVING_KEY"
PATHS = ("/v1/completions", "/v1/chat/completions")
_DONE = b"data: [DONE]"
# The front gives up an answer if the backend sends nothing for SILENCE_S seconds. The backend has END_S seconds to exit. A body
# must arrive within BODY_S seconds, because its request already occupies a place.
SILENCE_S, END_S, BODY_S = 120.0, 5.0, 10.0
# The front keeps idle connections of clients open for longer than clients reuse them (httpx: 5 s). Otherwise a client might send
# its request on a connection that the front is closing.
CLIENT_IDLE_S = 75
DEFAULT_TOKENS = 1024  # length of an answer in `transformers serve` if the request does not state it

Answer = TypeVar("Answer")


class Forward:
    """The ASGI application of the front.

    Args:
        backend: address of the backend, such as "http://127.0.0.1:8000".
        key: the key that clients must send as `Authorization: Bearer <key>`.
        max_requests: largest number of requests that are forwarded at once. Further requests get the status 503.
        max_body_bytes: largest size of a request body.
        max_tokens: largest number of tokens in a prompt and its answer together: the number of tokens in the KV cache.
        body_s: time in seconds in which a body must arrive.
    """

    def __init__(self, backend: str, key: str, max_requests: int, max_body_bytes: int, max_tokens: int, body_s: float = BODY_S):
        self.client = httpx.AsyncClient(
            base_url=backend,
            timeout=httpx.Timeout(SILENCE_S, connect=5.0),
            # `max_requests` already limits the connections. A second limit here would hide a queue. Each request has a connection
            # of its own: the backend closes an idle connection after 5 s, and a request sent at that moment would fail.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )
        self.key, self.max_requests, self.max_body_bytes = key, max_requests, max_body_bytes
        self.max_tokens, self.body_s = max_tokens, body_s
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        if refusal := self._refuse_at_once(request):
            await refusal(scope, receive, send)
            return
        # Count before the first `await`. Otherwise requests that arrive together would all be accepted.
        place = _Place(self)
        try:
            with contextlib.suppress(ClientDisconnect):
                body = await self._body(request)
                if isinstance(body, Response):
                    await body(scope, receive, send)
                elif refusal := _refuse_body(body, self.max_tokens):
                    await refusal(scope, receive, send)
                else:
                    await self._forward(body, place, request, scope, receive, send)
        finally:
            place.leave()

    async def health(self, request: Request) -> Response:
        """Return the state of the backend and the number of active requests. This path needs no key."""
        try:
            answer = await self.client.get("/health", timeout=2.0)
            status = answer.status_code
        except httpx.HTTPError:
            status = 503
        return JSONResponse({"backend": status, "active": self.active}, 200 if status == 200 else 503)

    def _refuse_at_once(self, request: Request) -> Response | None:
        """Return the response that refuses a request without reading its body, or None."""
        sent = request.headers.get("authorization", "").encode()
        # The comparison takes the same time for all wrong keys, so that its time does not reveal the key.
        if not hmac.compare_digest(sent, f"Bearer {self.key}".encode()):
            return _refusal(401, "the key is missing or wrong", {"WWW-Authenticate": "Bearer"})
        if self.active >= self.max_requests:
            return _refusal(503, f"{self.active} requests are running; try again later", {"Retry-After": "1"})
        return None

    async def _body(self, request: Request) -> bytes | Response:
        """Return the body, or the response that refuses it because it is too large or does not arrive in time.

        Bytes are counted, because clients may send no length or a wrong one.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(self.body_s):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self.max_body_bytes:
                        return _refusal(413, "the body is too large")
        except TimeoutError:
            return _refusal(408, f"the body did not arrive within {self.body_s:g} s", {"Connection": "close"})
        return bytes(body)

    async def _forward(self, body: bytes, place: "_Place", request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"Content-Type": "application/json"}
        forwarded = self.client.build_request("POST", request.url.path, content=body, headers=headers)
        try:
            # A backend may send its headers only when the whole answer is computed.
            answer = await _unless_disconnected(self.client.send(forwarded, stream=True), receive)
        except httpx.TransportError as error:
            message = f"the backend does not answer: {type(error).__name__}: {error}"
            await _refusal(502, message)(scope, receive, send)
            return
        if answer is None:
            return
        try:
            content = _until_done(answer.aiter_raw(), place)
            response = StreamingResponse(content, answer.status_code, media_type=answer.headers.get("content-type"))
            # Returns early if the client disconnects.
            await response(scope, receive, send)
        finally:
            await answer.aclose()  # closes the connection to the backend if the answer is not complete


class _Place:
    """Place of a request in the front's count of active requests. The first call of `leave` frees it; later calls do nothing."""

    def __init__(self, front: Forward):
        self._front = front
        front.active += 1

    def leave(self) -> None:
        if self._front is not None:
            self._front.active -= 1
            self._front = None


async def _unless_disconnected(work: Coroutine[Any, Any, Answer], receive: Receive) -> Answer | None:
    """Return the result of `work`. If the client disconnects first, cancel `work` and return None.

    The body of the request must have been read, so that the next message of the client is its disconnection.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_done(chunks: AsyncIterator[bytes], place: _Place) -> AsyncIterator[bytes]:
    """Yield the chunks of an answer, and free the place of the request before the client receives the end of the answer.

    Clients stop reading at the event [DONE] and may send their next request at once. The next request needs the freed place.
    """
    # An event starts at the beginning of a line. Newlines within a JSON string are escaped, so no generated text looks like it.
    tail = b"\n"
    async for chunk in chunks:
        # The event may be divided between two chunks.
        if b"\n" + _DONE in tail + chunk:
            place.leave()
        tail = (tail + chunk)[-len(_DONE) :]
        yield chunk
    place.leave()


def _refusal(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status, headers)


def _refuse_body(body: bytes, max_tokens: int) -> Response | None:
    """Return the response that refuses a body that is not a JSON object or may need more tokens, or None for a valid body."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        return _refusal(400, "the body is no JSON object")
    try:
        tokens = _most_tokens(content)
    except (TypeError, ValueError, OverflowError):
        return _refusal(400, "the number of tokens in the answer is not stated as a number")
    if tokens > max_tokens:
        return _refusal(413, f"the prompt and its answer may need {tokens} tokens, and the cache has {max_tokens}")
    return None


def _most_tokens(content: dict) -> int:
    """Return an upper bound on the number of tokens in a prompt and its answer. Each byte of a text counts as a token.

    Raises:
        TypeError, ValueError, OverflowError: the length of the answer is no number, or only part of `generation_config`.
    """
    text = content.get("prompt") or content.get("messages") or ""
    prompt = len((text if isinstance(text, str) else json.dumps(text)).encode(errors="surrogatepass"))
    stated = [content[name] for name in ("max_tokens", "max_completion_tokens") if content.get(name) is not None]
    if not stated and content.get("generation_config") is not None:
        raise ValueError
    return prompt + max((int(value) for value in stated), default=DEFAULT_TOKENS)


def application(forward: Forward) -> Starlette:
    """Return the web application with the routes of the front."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await forward.client.aclose()

    routes = [Route(path, forward, methods=["POST"]) for path in PATHS]
    return Starlette(routes=[*routes, Route("/health", forward.health)], lifespan=lifespan)


def serve_until_signal(app: Starlette, listener: socket.socket, drain_timeout_s: float) -> None:
    """Serve until SIGTERM or SIGINT. Then close the listener, and return when all answers are finished.

    Args:
        app: the application.
        listener: a socket that is bound to the address of the front.
        drain_timeout_s: time in seconds after which unfinished answers are cut off.
    """
    # uvicorn handles both signals. When it has finished, it raises them again for the handlers that were installed before. The
    # default handlers would end this process before it has ended the backend.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)
    server(app, drain_timeout_s).run(sockets=[listener])


def server(app: Starlette, drain_timeout_s: float) -> uvicorn.Server:
    """Return the HTTP server of the front. It cuts off answers that are not finished `drain_timeout_s` after a signal."""
    timeout = max(1, round(drain_timeout_s))
    return uvicorn.Server(
        uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=timeout, timeout_keep_alive=CLIENT_IDLE_S)
    )


def free_port() -> int:
    """Return a port that is free now. The backend opens it later, so another process could take it first."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def main(
    launcher: Annotated[int, typer.Option(help="process number of the launcher")],
    state: Annotated[Path, typer.Option(help="JSON file with the port and the process of the backend")],
    max_requests: Annotated[int, typer.Option()],
    max_body_bytes: Annotated[int, typer.Option()],
    max_tokens: Annotated[int, typer.Option(help="number of tokens in the KV cache")],
    drain_timeout_s: Annotated[float, typer.Option()],
    backend_port: Annotated[int, typer.Option()],
    module: Annotated[str, typer.Option(help="module of the backend")],
    options: Annotated[list[str] | None, typer.Argument(help="command line of the backend, after --")] = None,
) -> None:
    """Start a backend and serve in front of it. The front's port and the backend's process ID are written to `--state`."""
    die_with(launcher)
    do_not_outlive(launcher)
    key = os.environ.pop(KEY)  # the backend needs no key
    backend = subprocess.Popen(tethered_command(module, options or []), stdin=subprocess.DEVNULL)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            addresses = {"port": listener.getsockname()[1], "backend": backend.pid}
            partial = state.with_suffix(".part")
            partial.write_text(json.dumps(addresses), encoding="utf-8")
            partial.replace(state)  # the launcher sees the complete file or none
            forward = Forward(f"http://127.0.0.1:{backend_port}", key, max_requests, max_body_bytes, max_tokens)
            serve_until_signal(application(forward), listener, drain_timeout_s)
    finally:
        backend.terminate()
        try:
            backend.wait(END_S)
        except subprocess.TimeoutExpired:
            backend.kill()
            backend.wait()


if __name__ == "__main__":
    typer.run(main)
