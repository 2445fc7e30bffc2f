"""A text of any length through several encoders, in its own order: what comes out does not depend on how many there are."""

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue

import tokenizers

from hyperion.data.store.faults import DataError
from hyperion.data.text.encoder import Encoded, Encoder, in_chunks
from hyperion.processes.child_process import child_environment

CHUNK_CHARACTERS = 1 << 16
WAITING_CHUNKS = 2  # a worker finds its next chunk ready, and no more of the text lies in memory
WORTH_A_WORKER = 1 << 25  # characters that one encoder takes some seconds for; a worker takes most of one to start


def workers_for(characters: int) -> int:
    """As many workers as cores, as long as each has enough to do."""
    return max(1, min(len(os.sched_getaffinity(0)), characters // WORTH_A_WORKER))


class Encoding:
    """Encoders at work, as many as asked for; a context manager that ends them.

    Args:
        workers: processes that encode; 1 encodes in this one.
    """

    def __init__(self, bpe: tokenizers.Tokenizer, workers: int = 1):
        self._bpe, self._workers = bpe, workers

    def encode(self, lines: Iterable[str]) -> Iterator[Encoded]:
        """Encode lines chunk by chunk, in order; memory holds a few chunks, whatever the text's length.

        Args:
            lines: read once, as they are needed.

        Raises:
            DataError: a worker ended.
        """
        chunks = in_chunks(lines, CHUNK_CHARACTERS)
        if self._workers == 1:
            yield from map(Encoder(self._bpe).encode, chunks)
            return
        pending: deque[Future[Encoded]] = deque()
        for chunk in chunks:
            pending.append(self._threads.submit(self._pass_on, chunk))
            if len(pending) >= self._workers + WAITING_CHUNKS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _pass_on(self, chunk: list[str]) -> Encoded:
        worker = self._free.get()  # there are as many threads as workers, so one is free
        try:
            return worker.encode(chunk)
        finally:
            self._free.put(worker)

    def __enter__(self) -> "Encoding":
        self._open = ExitStack()
        if self._workers > 1:
            self._free: SimpleQueue[_Worker] = SimpleQueue()
            for _ in range(self._workers):
                self._free.put(self._open.enter_context(_Worker(self._bpe)))
            self._threads = self._open.enter_context(ThreadPoolExecutor(self._workers))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


class _Worker:
    """A process with an encoder of its own, fed through its pipes; it ends when they close."""

    def __init__(self, bpe: tokenizers.Tokenizer):
        # Not forked: this process may hold threads and a device.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hyperion.data.text.encoding_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment() | {"TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C is the parent's
        )
        self._definition: str | None = bpe.to_str()

    def encode(self, lines: list[str]) -> Encoded:
        try:
            if self._definition is not None:
                self._send(self._definition)
                self._definition = None
            self._send(lines)
            return pickle.load(self._process.stdout)  # from a process that was started here, through its own pipe
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self._process.kill()
            raise DataError(
                f"a tokenizing worker ended with exit code {self._process.wait()}",
                where=Path(__file__).with_name("encoding_worker.py"),
                next_step="see its own words above; with less memory use fewer workers, workers=1 uses none",
            ) from error

    def _send(self, content: object) -> None:
        pickle.dump(content, self._process.stdin)
        self._process.stdin.flush()

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # it holds nothing that could be lost
        with suppress(BrokenPipeError):  # what it did not read any more
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
