"""A scripted server: it streams tokens at known times, stalls, fails or cuts streams, and remembers what clients did."""

import asyncio
import contextlib
import json
import threading
import time
from dataclasses import dataclass, field


@dataclass
class Script:
    """What the server does.

    `first_s` and `gap_s`: seconds before the first token and between tokens. `headers_first`: send the headers at once, before
    `first_s`. `serial`: answer one request after another. `stall_s`: additional time of the first request. `fail_every`: every
    so many requests fail with `status`. `cut`: close the stream after its first token. `work_s`: CPU time of each token.
    `ballast_bytes`: memory that each request leaves behind. `linger_s`: seconds for which the connection stays open after the
    event [DONE]. `stops`: whether the server stops when a client hangs up; otherwise it computes as long as for the whole answer.
    `event`: the first event, instead of a token; the stream then ends.
    `texts`: the texts of the events and the seconds before each, instead of one token in each event. The last one ends the
    answer, which has `counted` tokens.
    `blocks`: number of blocks of a server that keeps one for each client that hangs up, or 0 for a server that frees them.
    Without a free block, it sends no token.
    """

    first_s: float = 0.0
    gap_s: float = 0.0
    headers_first: bool = True
    serial: bool = False
    stall_s: float = 0.0
    fail_every: int = 0
    status: int = 500
    cut: bool = False
    work_s: float = 0.0
    ballast_bytes: int = 0
    linger_s: float = 0.0
    blocks: int = 0
    event: str = ""
    stops: bool = True
    usage: bool = True
    texts: tuple[tuple[str, float], ...] = ()
    counted: int = 0
    requests: list[dict] = field(default_factory=list)
    ballast: list[bytes] = field(default_factory=list)
    finished: int = 0
    hung_up: int = 0


@contextlib.contextmanager
def scripted_server(script: Script, port: int = 0):
    """Run the server in a thread and yield its address."""
    started, ended, address = threading.Event(), [], []
    loop = asyncio.new_event_loop()

    async def main() -> None:
        stop = asyncio.Event()
        ended.append(stop)
        turn = asyncio.Lock()

        async def handle(reader, writer) -> None:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await _answer(script, turn, reader, writer)
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", port)
        address.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        started.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(ended[0].set)
        thread.join(10)


async def _answer(script: Script, turn: asyncio.Lock, reader, writer) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if head.startswith("get"):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        await writer.drain()
        return
    length = int(head.split("content-length:")[1].split("\r\n")[0])
    body = json.loads(await reader.readexactly(length))
    script.requests.append(body)
    script.ballast.append(b"x" * script.ballast_bytes)
    number = len(script.requests)
    async with turn if script.serial else contextlib.AsyncExitStack():
        if script.fail_every and number % script.fail_every == 0:
            writer.write(f"HTTP/1.1 {script.status} No\r\nContent-Length: 4\r\nConnection: close\r\n\r\nfail".encode())
            await writer.drain()
            return
        start = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        if script.headers_first:
            writer.write(start)
            await writer.drain()
        while script.blocks and script.hung_up >= script.blocks:
            await asyncio.sleep(0.05)
        await asyncio.sleep(script.first_s + (script.stall_s if number == 1 else 0.0))
        if not script.headers_first:
            writer.write(start)
        if script.event:
            writer.write(f"data: {script.event}\n\n".encode())
            await writer.drain()
            return
        for place, (text, wait_s) in enumerate(script.texts, 1):
            await asyncio.sleep(wait_s)
            last = place == len(script.texts)
            event = {"choices": [{"text": text, "finish_reason": "stop" if last else None}]}
            event |= {"usage": {"completion_tokens": script.counted}} if last else {}
            writer.write(f"data: {json.dumps(event)}\n\n".encode())
            await writer.drain()
        if script.texts:
            return
        for token in range(body["max_tokens"]):
            await asyncio.sleep(script.gap_s if token else 0.0)
            # A client that closes a connection with unread data resets it, and the reader then has an error instead of an end.
            hung_up = reader.at_eof() or reader.exception() is not None
            if hung_up and script.stops:
                script.hung_up += 1
                return
            busy_until_s = time.process_time() + script.work_s
            while time.process_time() < busy_until_s:
                pass
            if hung_up:
                continue  # the token is computed for a client that has gone
            event = {"choices": [{"text": f" {token}", "finish_reason": None}]}
            writer.write(f"data: {json.dumps(event)}\n\n".encode())
            with contextlib.suppress(ConnectionError):  # the next token finds that the client has gone
                await writer.drain()
            if script.cut:
                return
        last = {"choices": [{"text": "", "finish_reason": "length"}]}
        last |= {"usage": {"completion_tokens": body["max_tokens"]}} if script.usage else {}
        writer.write(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode())
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        await asyncio.sleep(script.linger_s)
        script.finished += 1
