"""The front before a scripted backend: keys, limits, streams, and clients that hang up."""

import asyncio
import contextlib
import http.client
import json
import socket
import struct
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from hyperion.experiments.serving import front
from hyperion.experiments.serving.client import Endpoint, complete, in_event_loop
from hyperion.experiments.serving.front import Forward, _refuse_body, _until_done, application
from tests.experiments.serving.scripted import Script, scripted_server

KEY = {"Authorization": "Bearer right"}
BODY = {"prompt": "p", "max_tokens": 2}


@contextlib.contextmanager
def front_before(backend, max_requests=4, max_body_bytes=1000, max_tokens=1100, body_s=10.0):
    """Run the front in a thread and yield its address. In a thread, uvicorn installs no signal handlers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = application(Forward(backend, "right", max_requests, max_body_bytes, max_tokens, body_s))
        server = front.server(app, drain_timeout_s=5)
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
        ({"json": BODY | {"max_tokens": 2000}}, 413),
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


def test_the_backend_learns_that_a_client_hung_up_before_the_headers():
    """A client that waits for a whole answer: the backend sends its headers when all is computed."""
    script = Script(headers_first=False, first_s=6.0)
    with scripted_server(script) as backend, front_before(backend, max_requests=1) as address:
        begin = time.monotonic()
        with httpx.Client(base_url=address, headers=KEY, trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=BODY | {"stream": False}, timeout=0.5)
        while httpx.get(f"{address}/health", trust_env=False).json()["active"] and time.monotonic() - begin < 10:
            time.sleep(0.05)
        assert time.monotonic() - begin < 5, "the place is free before the backend answers"
        while script.hung_up == 0 and time.monotonic() - begin < 20:
            time.sleep(0.05)
    assert (script.hung_up, script.finished) == (1, 0)


@contextlib.contextmanager
def broken_backend(fault):
    """A backend that receives each request and then closes the connection, resets it, or stays silent."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as connections:

        def serve():
            with contextlib.suppress(OSError):  # the listener is closed at the end
                while True:
                    connection = connections.enter_context(listener.accept()[0])
                    # A socket that is closed with unread data resets its connection.
                    received = b""
                    while b"}" not in received and (part := connection.recv(65536)):
                        received += part
                    if fault == "resets":
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    if fault != "is silent":
                        connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("fault", "error"), [("closes", "RemoteProtocolError"), ("resets", "ReadError"), ("is silent", "ReadTimeout")]
)
def test_a_backend_that_fails_before_its_headers_is_502(fault, error, monkeypatch):
    monkeypatch.setattr(front, "SILENCE_S", 0.3)
    with broken_backend(fault) as backend, front_before(backend) as address:
        answer = post(address, json=BODY)
        assert answer.status_code == 502 and error in answer.json()["error"]["message"]
        assert post(address, json=BODY).status_code == 502, "the front answers afterwards"


def test_a_backend_that_closes_idle_connections_answers_all_requests():
    """A backend resets a connection when its second request arrives, as it does if it is closing the idle connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):  # the listener is closed at the end
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=answer_once, args=(connection,), daemon=True).start()

        def answer_once(connection):
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
                connection.recv(65536)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        threading.Thread(target=serve, daemon=True).start()
        with front_before(f"http://127.0.0.1:{listener.getsockname()[1]}") as address:
            assert [post(address, json=BODY).status_code for _ in range(3)] == [200, 200, 200]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_the_front_keeps_an_idle_connection_for_longer_than_clients_reuse_it(fast_front):
    client = http.client.HTTPConnection(fast_front.removeprefix("http://"), timeout=20)
    with contextlib.closing(client):
        for pause_s in (0, 6):
            time.sleep(pause_s)
            client.request("GET", "/health")
            answer = client.getresponse()
            assert answer.read() and answer.status == 200


def test_a_body_that_does_not_arrive_is_408_and_leaves_its_place():
    with scripted_server(Script()) as backend, front_before(backend, max_requests=1, body_s=0.5) as address:
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=20) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer right\r\nContent-Length: 50\r\n\r\n{"
            )
            assert client.recv(65536).startswith(b"HTTP/1.1 408")
        assert post(address, json=BODY).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "p" * 10, "max_tokens": 90}, None),
        ({"prompt": "p" * 10, "max_tokens": 91}, 413),
        ({"prompt": "p" * 10, "max_tokens": "91"}, 413),
        ({"prompt": "\u00e9" * 10, "max_tokens": 81}, 413),
        ({"prompt": "\ud800", "max_tokens": 98}, 413),
        ({"prompt": [[1] * 40], "max_tokens": 1}, 413),
        ({"prompt": 5, "max_tokens": 90}, None),
        ({"messages": [{"role": "user", "content": "p" * 90}], "max_tokens": 1}, 413),
        ({"messages": [], "max_completion_tokens": 101, "max_tokens": 1}, 413),
        ({"prompt": "p"}, 413),
        ({"prompt": "p", "max_tokens": "many"}, 400),
        ({"prompt": "p", "max_tokens": [1]}, 400),
        ({"prompt": "p", "max_tokens": float("inf")}, 400),
        ({"prompt": "p", "generation_config": "{}"}, 400),
        ({"prompt": "p", "generation_config": "{}", "max_tokens": 9}, None),
    ],
)
def test_a_request_that_may_be_larger_than_the_cache_is_refused(body, status):
    refusal = _refuse_body(json.dumps(body).encode(), 100)
    assert (refusal and refusal.status_code) == status


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
