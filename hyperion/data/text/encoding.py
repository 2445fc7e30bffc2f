"""Encode text of any length to token ids, either in this process or in several worker processes.

Each distinct word is encoded once, and its ids are stored in a dict, because a lookup is faster than BPE. This is correct because
GPT-2 splits text before every space that follows a visible character, and BPE never merges tokens across such a split, so the ids
of a word with its leading space do not depend on the surrounding words. The train split of WikiText-2 has 2.1 million words, but
only 33 thousand distinct ones. A line in which words are not separated by single spaces is encoded as a whole.

Source of GPT-2's rule: Radford et al. 2019, gpt-2/src/encoder.py.
"""

import contextlib
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from queue import SimpleQueue
from typing import BinaryIO, cast

import numpy as np
import tokenizers

from hyperion.data.store.folders import DataError
from hyperion.hardware.cpu import usable_cpus
from hyperion.processes.child_process import child_environment

CHUNK_CHARACTERS = 1 << 16
WAITING_CHUNKS = 2  # number of chunks in the queue, in addition to the chunks that workers are encoding
WORTH_A_WORKER = 1 << 25  # characters per worker; encoding them takes seconds, and starting a worker takes almost a second
REMEMBERED_BYTES = 1 << 24  # approximate limit on the memory of the dict, for text of any length
_PIECE_BYTES = 160  # approximate memory of a dict entry in bytes, without its characters
_MARK = "\0"  # prefix of the key of a piece without a leading space; a line that contains this character is encoded as a whole


@dataclass(frozen=True)
class Encoded:
    """Token ids of some lines.

    Attributes:
        ids: uint32 [tokens], the ids of all lines, concatenated.
        sizes: int64 [lines], number of tokens of each line.
        blank: bool [lines], True for a line that contains only white space.
        words_with_eos: number of words, separated by white space, plus one <eos> per line.
        lost: the first piece of text that decoding does not reproduce; "" if decoding reproduces all text.
    """

    ids: np.ndarray = field(repr=False)
    sizes: np.ndarray = field(repr=False)
    blank: np.ndarray = field(repr=False)
    words_with_eos: int
    lost: str


class LineEncoder:
    """Encodes lines of text to the same token ids as the tokenizer, and checks that decoding reproduces the lines.

    A line is encoded in pieces, which are its words or the whole line. A byte-level tokenizer decodes a text piece by piece, so
    decoding reproduces the text if it reproduces each piece. A piece is checked when it occurs for the first time.
    """

    def __init__(self, bpe: tokenizers.Tokenizer):
        self._bpe = bpe
        self._by_words = _cuts_at_spaces(bpe)
        self._lost = ""
        self._forget()

    def encode(self, lines: Sequence[str]) -> Encoded:
        """Return the token ids of the lines, without special tokens. The ids of a line do not depend on other lines."""
        # If the dict is too large, clear it. This is simpler than removing the least used words, and frequent words are soon
        # stored again.
        if self._bytes > REMEMBERED_BYTES:
            self._forget()
        split = [line.split() for line in lines]
        blank = np.array([not plain for plain in split], dtype=bool)
        pieces = [self._pieces(line, plain) for line, plain in zip(lines, split, strict=True)]
        counts = np.array([len(keys) for keys in pieces], dtype=np.int64)
        # `_Places` gives each new key the next number at its first lookup. So the new keys, which `_learn` encodes, have the last
        # numbers.
        places = np.fromiter(map(self._place.__getitem__, chain.from_iterable(pieces)), np.int64, int(counts.sum()))
        self._learn()
        starts, lengths = self._starts[places], self._lengths[places]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        # Gather without a Python loop: piece i occupies the output positions ends[i] - lengths[i] to ends[i] - 1, and its ids
        # start at starts[i].
        ids = self._ids[np.repeat(starts - (ends - lengths), lengths) + np.arange(total)]
        # Tokens of a line: difference between the cumulative token counts at its end and at its start.
        sizes = np.diff(np.append(0, ends)[np.append(0, np.cumsum(counts))])
        return Encoded(ids, sizes, blank, sum(map(len, split)) + len(lines), self._lost)

    def _pieces(self, line: str, plain: list[str]) -> list[str]:
        """Return the dict keys of the pieces of a line. The key of a piece without a leading space starts with _MARK."""
        words = _words(line, plain) if self._by_words else None
        if words is None:
            return [_MARK + line] if line else []
        if words[0]:
            # Without a leading space, the first word of a line has other ids than the same word after a space.
            words[0] = _MARK + words[0]
            return words
        return words[1:]

    def _learn(self) -> None:
        """Encode the pieces of text that are not in the dict yet, and store their token ids."""
        # A dict keeps the order of insertion, so the new keys are the last ones.
        new = list(self._place)[len(self._starts) :]
        if not new:
            return
        texts = [key[1:] if key[:1] == _MARK else " " + key for key in new]
        ids = [encoding.ids for encoding in self._bpe.encode_batch_fast(texts, add_special_tokens=False)]
        lengths = np.array([len(piece) for piece in ids], dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(ids), np.uint32, int(lengths.sum()))
        # Decoding all new pieces at once is fast. Only if the result differs, each piece is decoded to find the first wrong one.
        if not self._lost and self._bpe.decode(flat.tolist(), skip_special_tokens=False) != "".join(texts):
            decoded = self._bpe.decode_batch(ids, skip_special_tokens=False)
            self._lost = next((text for text, other in zip(texts, decoded, strict=True) if text != other), "".join(texts))
        self._starts = np.append(self._starts, len(self._ids) + np.cumsum(lengths) - lengths)
        self._lengths = np.append(self._lengths, lengths)
        self._ids = np.append(self._ids, flat)
        self._bytes += sum(_PIECE_BYTES + len(text) for text in texts)

    def _forget(self) -> None:
        self._place, self._bytes = _Places(), 0
        self._starts, self._lengths = np.empty(0, np.int64), np.empty(0, np.int64)
        self._ids = np.empty(0, np.uint32)  # ids of all known pieces of text, in one array


class EncoderPool:
    """Context manager with worker processes that encode text. The ids do not depend on the number of workers.

    Args:
        bpe: the tokenizer.
        workers: number of worker processes. With 1, this process encodes the text itself.
    """

    def __init__(self, bpe: tokenizers.Tokenizer, workers: int = 1):
        self._bpe, self._workers = bpe, workers

    def encode(self, lines: Iterable[str]) -> Iterator[Encoded]:
        """Yield the encoded lines chunk by chunk, in order. Only a few chunks are in memory at the same time.

        Args:
            lines: the lines. They are iterated once, and only as far as needed for the next chunk.

        Raises:
            DataError: a worker process ended.
        """
        chunks = in_chunks(lines, CHUNK_CHARACTERS)
        if self._workers == 1:
            yield from map(LineEncoder(self._bpe).encode, chunks)
            return
        pending: deque[Future[Encoded]] = deque()
        for chunk in chunks:
            # The calling thread only reads and submits. One thread per worker waits for its pipe.
            pending.append(self._threads.submit(self._encode_chunk, chunk))
            # The queue is bounded, so that a fast reader does not load the whole corpus. Results are returned in order.
            if len(pending) >= self._workers + WAITING_CHUNKS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _encode_chunk(self, chunk: list[str]) -> Encoded:
        worker = self._free.get()  # a worker is free, because there are as many threads as workers
        try:
            return worker.encode(chunk)
        finally:
            self._free.put(worker)

    def __enter__(self) -> "EncoderPool":
        self._open = contextlib.ExitStack()
        if self._workers > 1:
            self._free: SimpleQueue[_Worker] = SimpleQueue()
            for _ in range(self._workers):
                self._free.put(self._open.enter_context(_Worker(self._bpe)))
            self._threads = self._open.enter_context(ThreadPoolExecutor(self._workers))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


class _Worker:
    """A process that runs `serve`. Requests and answers are sent through pipes. It ends when the pipes are closed."""

    def __init__(self, bpe: tokenizers.Tokenizer):
        # The worker is not forked, because this process may have threads and may use a device.
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {serve.__module__} import {serve.__name__}; {serve.__name__}()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The workers are the parallelism. Threads inside each worker would compete for the same cores.
            env=child_environment() | {"TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # in its own session, the worker does not receive Ctrl-C
        )
        self._requests = cast(BinaryIO, self._process.stdin)
        self._answers = cast(BinaryIO, self._process.stdout)
        # The definition is sent with the first request, so that all workers start at the same time.
        self._definition: str | None = bpe.to_str()

    def encode(self, lines: list[str]) -> Encoded:
        try:
            if self._definition is not None:
                self._send(self._definition)
                self._definition = None
            self._send(lines)
            return pickle.load(self._answers)  # unpickling is safe, because a child of this process sent the data
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            # Kill the worker first. Otherwise, `wait` below would block if the worker is still running.
            self._process.kill()
            raise DataError(
                f"a tokenizing worker ended with exit code {self._process.wait()}",
                where=f"the worker process {self._process.pid}",
                next_step="read the worker's error message above; if memory runs out, use fewer workers (workers=1 starts none)",
            ) from error

    def _send(self, content: object) -> None:
        pickle.dump(content, self._requests)
        self._requests.flush()

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # the worker has no state to save
        with contextlib.suppress(BrokenPipeError):  # closing flushes requests that the worker has not read
            self._requests.close()
        self._answers.close()
        self._process.wait()


def serve() -> None:
    """Main function of a worker process.

    Read a tokenizer from stdin, then chunks of lines. Write an Encoded for each chunk to stdout. Return when stdin is closed,
    which also happens when the parent process ends.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # printed text must not be mixed with the answers
    requests = sys.stdin.buffer
    encoder = LineEncoder(tokenizers.Tokenizer.from_str(pickle.load(requests)))
    # These errors mean that the parent has ended, so there is nothing left to do.
    with contextlib.suppress(EOFError, BrokenPipeError, pickle.UnpicklingError):
        while True:
            pickle.dump(encoder.encode(pickle.load(requests)), answers)
            answers.flush()


def workers_for(characters: int) -> int:
    """Return the number of workers for a text of this length: one per WORTH_A_WORKER characters, at most one per core."""
    return max(1, min(len(usable_cpus()), characters // WORTH_A_WORKER))


def in_chunks(lines: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Yield chunks of consecutive lines. A chunk has about `characters` characters and at least one line."""
    chunk, size = [], 0
    for line in lines:
        chunk.append(line)
        size += len(line)
        if size >= characters:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class _Places(dict[str, int]):
    """A dict that numbers its keys 0, 1, 2, … in the order of their first lookup."""

    def __missing__(self, key: str) -> int:
        self[key] = place = len(self)
        return place


def _words(line: str, plain: list[str]) -> list[str] | None:
    """Split a line at its spaces, or return None if the line must be encoded as a whole.

    If the line begins with a space, the first entry is "".

    Args:
        plain: the words of the line, split at any white space. The line is split at single spaces only if both splits give the
            same words.
    """
    words = line.split(" ")
    body = words if words[0] else words[1:]
    if not body or _MARK in line:
        return None
    last = body[-1].rstrip("\n")
    return words if plain == (body[:-1] + [last] if last else body[:-1]) else None


def _cuts_at_spaces(bpe: tokenizers.Tokenizer) -> bool:
    """Return True if the tokenizer splits text at spaces as GPT-2 does, and no special token contains or removes spaces."""
    rule = bpe.pre_tokenizer
    if bpe.normalizer is not None or not isinstance(rule, tokenizers.pre_tokenizers.ByteLevel):
        return False
    special = bpe.get_added_tokens_decoder().values()
    reaching = any(" " in token.content or token.lstrip or token.rstrip or token.single_word for token in special)
    return rule.use_regex and not rule.add_prefix_space and not reaching
