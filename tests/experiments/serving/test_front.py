"""The front before a scripted backend: keys, limits, streams, and clients that hang up."""

import asyncio
import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

from hyperion.experiments.serving.client import Endpoint, complete, in_event_loop
from hyperion.experiments.serving.front import Forward, _until_done, application
from tests.experiments.serving.scripted import Script, scripted_server

KEY = {"Authorization": "Bearer right"}
BODY = {"prompt": "p", "max_tokens": 2}


@contextlib.contextmanager
def front_before(backend, max_requests=4, max_body_bytes=1000):
    """Run the front in a thread and yield its address. In a thread, uvicorn installs no signal handlers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = application(Forward(backend, "right", max_requests, max_body_bytes))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)


def post(address, **request):
    with httpx.Client(base_url=address, trust_env=False, timeout=20) as client:
        return client.post("/v1/completions", **({"headers": KEY} | request))


@pytest.fixture(scope="module")
def fast_front():
    with scripted_server(Script()) as backend, front_before(backend) as address:
        yield address


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"json": BODY}, 200),
        ({"json": BODY, "headers": {}}, 401),
        ({"json": BODY, "headers": {"Authorization": "Bearer wrong"}}, 401),
        ({"json": BODY, "headers": {"Authorization": "Bearer righ"}}, 401),
        ({"json": BODY | {"prompt": "x" * 1000}}, 413),
        ({"content": iter([b'{"prompt": "', b"x" * 2000, b'"}'])}, 413),
        ({"content": b'{"prompt": "p'}, 400),
        ({"content": b"[1]"}, 400),
        ({"content": b"[" * 900}, 400),
        ({"content": b"\xff"}, 400),
        ({"content": b""}, 400),
    ],
)
def test_bad_requests_are_refused_and_good_ones_forwarded(fast_front, request_, status):
    answer = post(fast_front, **request_)
    assert answer.status_code == status
    assert post(fast_front, json=BODY).status_code == 200, "the front answers afterwards"


def test_a_stream_passes_unchanged_and_other_paths_do_not_exist(fast_front):
    lines = post(fast_front, json=BODY).text.splitlines()
    assert lines[0] == 'data: {"choices": [{"text": " 0", "finish_reason": null}]}' and lines[-2] == "data: [DONE]"
    with httpx.Client(base_url=fast_front, headers=KEY, trust_env=False) as client:
        assert client.get("/v1/completions").status_code == 405
        assert client.post("/load_model", json={}).status_code == 404, "the front hides the paths that change the backend"
        assert client.get("/health").json() == {"backend": 200, "active": 0}


@pytest.mark.slow
def test_tokens_are_forwarded_when_they_come():
    """A front that collected the answer would deliver all tokens at its end."""
    with scripted_server(Script(gap_s=0.3)) as backend, front_before(backend) as address:
        endpoint = Endpoint(address, "right", "m")

        async def work():
            async with endpoint.session() as session:
                return await complete(session, endpoint, "p", 4)

        reply = in_event_loop(work)
    assert not reply.error and reply.last_s - reply.first_s > 0.6


@pytest.mark.slow
def test_more_requests_than_allowed_are_refused_at_once():
    with scripted_server(Script(first_s=1.0)) as backend, front_before(backend, max_requests=3) as address:
        endpoint = Endpoint(address, "right", "m")

        async def work():
            async with endpoint.session() as session:
                return await asyncio.gather(*(complete(session, endpoint, "p", 2) for _ in range(8)))

        replies = in_event_loop(work)
        refused = [reply for reply in replies if reply.status == 503]
        assert len(refused) == 5 and sum(not reply.error for reply in replies) == 3
        assert max(reply.request_time_s for reply in refused) < 1.0
        assert post(address, json=BODY).status_code == 200, "the places are free again"


def test_a_finished_answer_leaves_its_place_before_the_client_sends_its_next_request():
    """Clients stop reading at the event [DONE]. The front may notice the end of their connection later than the next request."""
    with (
        scripted_server(Script(gap_s=0.02, linger_s=1.0)) as backend,
        front_before(backend, max_requests=1) as address,
        httpx.Client(base_url=address, headers=KEY, trust_env=False) as client,
    ):
        with client.stream("POST", "/v1/completions", json=BODY) as answer:
            lines = answer.iter_lines()  # the connection ends with this iterator
            assert "data: [DONE]" in lines
            assert post(address, json=BODY).status_code == 200
        assert client.get("/health").json()["active"] == 0
        with client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 1000}) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert post(address, json=BODY).status_code == 503, "an answer that is not finished keeps its place"


def test_the_backend_learns_that_a_client_hung_up():
    script = Script(gap_s=0.05)
    with scripted_server(script) as backend, front_before(backend, max_requests=1) as address:
        with (
            httpx.Client(base_url=address, headers=KEY, trust_env=False) as client,
            client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 200}) as answer,
        ):
            next(answer.iter_lines())
        until = time.monotonic() + 8
        while script.hung_up == 0 and time.monotonic() < until:
            time.sleep(0.05)
        assert (script.hung_up, script.finished) == (1, 0)
        assert post(address, json=BODY).status_code == 200, "the place of the client is free again"


def test_a_backend_that_is_gone_is_502():
    with front_before("http://127.0.0.1:1") as address:
        assert post(address, json=BODY).status_code == 502
        assert httpx.get(f"{address}/health", trust_env=False).status_code == 503


@pytest.mark.parametrize(
    ("chunks", "left_at"),
    [
        ([b"data: {}\n\n", b"data: [DONE]\n\n", b""], 1),
        ([b"data: {}\n", b"\ndata: [DO", b"NE]\n\n", b""], 2),
        ([b"data: [DONE]\n\n", b""], 0),
        ([b'data: {"text": "', b"data: [DONE]", b'"}\n\n'], 3),
        ([b'data: {"text": "\\ndata: [DONE]"}\n\n'], 1),
    ],
    ids=["whole", "divided", "alone", "a text in a chunk of its own", "a text with an escaped newline"],
)
def test_the_place_is_left_with_the_event_and_at_the_latest_with_the_stream(chunks, left_at):
    left = []
    place = SimpleNamespace(leave=lambda: left.append(len(seen)))
    seen = []

    async def stream():
        for chunk in chunks:
            yield chunk

    async def work():
        async for chunk in _until_done(stream(), place):
            seen.append(chunk)

    asyncio.run(work())
    assert seen == chunks and left[0] == left_at
