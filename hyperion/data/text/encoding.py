"""Encode text of any length to token ids, fast, in this process or in several worker processes.

Each distinct word is encoded once and then looked up. GPT-2's rule always cuts text before a space that follows a visible
character, and BPE never merges across such a cut. So the ids of a word with its leading space do not depend on the words
around it. WikiText-2's train split has 2.1 million words but only 33 thousand distinct ones, and a dictionary is faster than
BPE. Lines with other white space between words are encoded whole.

Source of the rule: Radford et al. 2019, gpt-2/src/encoder.py.
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
from hyperion.processes.child_process import child_environment

CHUNK_CHARACTERS = 1 << 16
WAITING_CHUNKS = 2  # queued in addition to those being encoded: no worker waits, and memory stays bounded
WORTH_A_WORKER = 1 << 25  # characters; one encoder needs seconds for them, a worker needs most of a second to start
REMEMBERED_BYTES = 1 << 24  # approximate limit on the memory of the dictionary, whatever the length of the text
_PIECE_BYTES = 160  # approximate memory of a dictionary entry besides its characters
_MARK = "\0"  # prefix of the key of a piece that does not follow a space; a line that contains it is encoded whole


@dataclass(frozen=True)
class Encoded:
    """Token ids of some lines.

    Attributes:
        ids: uint32 [tokens], the ids of all lines, concatenated.
        sizes: int64 [lines], number of tokens of each line.
        blank: bool [lines], True for a line of white space only.
        words_with_eos: number of words separated by white space, plus one per line.
        lost: the first text that decoding does not reproduce; "" if decoding reproduces everything.
    """

    ids: np.ndarray = field(repr=False)
    sizes: np.ndarray = field(repr=False)
    blank: np.ndarray = field(repr=False)
    words_with_eos: int
    lost: str


class LineEncoder:
    """Encode lines exactly as their tokenizer does, and check that decoding reproduces them.

    A byte-level tokenizer decodes piece by piece, so a text is reproduced if each of its pieces is. A piece is checked when it
    first occurs.
    """

    def __init__(self, bpe: tokenizers.Tokenizer):
        self._bpe = bpe
        self._by_words = _cuts_at_spaces(bpe)
        self._lost = ""
        self._forget()

    def encode(self, lines: Sequence[str]) -> Encoded:
        """Return the token ids of the lines, each encoded by itself, without special tokens."""
        if self._bytes > REMEMBERED_BYTES:
            self._forget()
        split = [line.split() for line in lines]
        blank = np.array([not plain for plain in split], dtype=bool)
        pieces = [self._pieces(line, plain) for line, plain in zip(lines, split, strict=True)]
        counts = np.array([len(keys) for keys in pieces], dtype=np.int64)
        places = np.fromiter(map(self._place.__getitem__, chain.from_iterable(pieces)), np.int64, int(counts.sum()))
        self._learn()
        starts, lengths = self._starts[places], self._lengths[places]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        ids = self._ids[np.repeat(starts - (ends - lengths), lengths) + np.arange(total)]
        sizes = np.diff(np.append(0, ends)[np.append(0, np.cumsum(counts))])
        return Encoded(ids, sizes, blank, sum(map(len, split)) + len(lines), self._lost)

    def _pieces(self, line: str, plain: list[str]) -> list[str]:
        """Return the keys of a line: its words, or the whole line. The key of a piece without a leading space has a mark."""
        words = _words(line, plain) if self._by_words else None
        if words is None:
            return [_MARK + line] if line else []
        if words[0]:
            words[0] = _MARK + words[0]
            return words
        return words[1:]

    def _learn(self) -> None:
        """Encode the pieces that occurred for the first time."""
        new = list(self._place)[len(self._starts) :]
        if not new:
            return
        texts = [key[1:] if key[:1] == _MARK else " " + key for key in new]
        ids = [encoding.ids for encoding in self._bpe.encode_batch_fast(texts, add_special_tokens=False)]
        lengths = np.array([len(piece) for piece in ids], dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(ids), np.uint32, int(lengths.sum()))
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
        self._ids = np.empty(0, np.uint32)  # of all known pieces, concatenated


class EncoderPool:
    """Encode text in worker processes; a context manager that ends them. The ids do not depend on the number of workers.

    Args:
        workers: number of processes; 1 encodes in this process.
    """

    def __init__(self, bpe: tokenizers.Tokenizer, workers: int = 1):
        self._bpe, self._workers = bpe, workers

    def encode(self, lines: Iterable[str]) -> Iterator[Encoded]:
        """Encode lines chunk by chunk, in order. Memory holds a few chunks, whatever the length of the text.

        Args:
            lines: read once, as needed.

        Raises:
            DataError: a worker ended.
        """
        chunks = in_chunks(lines, CHUNK_CHARACTERS)
        if self._workers == 1:
            yield from map(LineEncoder(self._bpe).encode, chunks)
            return
        pending: deque[Future[Encoded]] = deque()
        for chunk in chunks:
            pending.append(self._threads.submit(self._encode_chunk, chunk))
            if len(pending) >= self._workers + WAITING_CHUNKS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _encode_chunk(self, chunk: list[str]) -> Encoded:
        worker = self._free.get()  # there are as many threads as workers, so one is free
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
    """A process that runs `serve`, with requests and answers on its pipes; it ends when they close."""

    def __init__(self, bpe: tokenizers.Tokenizer):
        # Not forked: this process may have threads and a device in use.
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {serve.__module__} import {serve.__name__}; {serve.__name__}()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment() | {"TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # so that Ctrl-C reaches the parent only
        )
        self._requests = cast(BinaryIO, self._process.stdin)
        self._answers = cast(BinaryIO, self._process.stdout)
        self._definition: str | None = bpe.to_str()

    def encode(self, lines: list[str]) -> Encoded:
        try:
            if self._definition is not None:
                self._send(self._definition)
                self._definition = None
            self._send(lines)
            return pickle.load(self._answers)  # safe: the sender is this process's own child
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self._process.kill()
            raise DataError(
                f"a tokenizing worker ended with exit code {self._process.wait()}",
                where=f"the worker process {self._process.pid}",
                next_step="read its error message above; if memory is short, use fewer workers (workers=1 starts none)",
            ) from error

    def _send(self, content: object) -> None:
        pickle.dump(content, self._requests)
        self._requests.flush()

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # it has no state to save
        with contextlib.suppress(BrokenPipeError):  # close() flushes what the worker has not read
            self._requests.close()
        self._answers.close()
        self._process.wait()


def serve() -> None:
    """Encode in a worker process: read a tokenizer and then chunks of lines from stdin, write an Encoded each to stdout.

    Returns when stdin ends, which it also does when the parent process ends.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # printed text must not mix with the answers
    requests = sys.stdin.buffer
    encoder = LineEncoder(tokenizers.Tokenizer.from_str(pickle.load(requests)))
    # These errors mean that the parent ended, so there is nothing left to do.
    with contextlib.suppress(EOFError, BrokenPipeError, pickle.UnpicklingError):
        while True:
            pickle.dump(encoder.encode(pickle.load(requests)), answers)
            answers.flush()


def workers_for(characters: int) -> int:
    """Return the number of workers that a text of this length deserves, at most one per core."""
    return max(1, min(len(os.sched_getaffinity(0)), characters // WORTH_A_WORKER))


def in_chunks(lines: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Yield runs of whole lines of about `characters` characters, at least one line each."""
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
    """Numbers its keys in the order in which they are first looked up."""

    def __missing__(self, key: str) -> int:
        self[key] = place = len(self)
        return place


def _words(line: str, plain: list[str]) -> list[str] | None:
    """Return the text before each space, with "" first if the line begins with a space; None if the line must stay whole.

    Args:
        plain: the line split at white space of any kind. If it equals the split at spaces, the words are separated by single
            spaces only.
    """
    words = line.split(" ")
    body = words if words[0] else words[1:]
    if not body or _MARK in line:
        return None
    last = body[-1].rstrip("\n")
    return words if plain == (body[:-1] + [last] if last else body[:-1]) else None


def _cuts_at_spaces(bpe: tokenizers.Tokenizer) -> bool:
    """Return True if a tokenizer uses GPT-2's rule and no special token reaches beyond a word."""
    rule = bpe.pre_tokenizer
    if bpe.normalizer is not None or not isinstance(rule, tokenizers.pre_tokenizers.ByteLevel):
        return False
    special = bpe.get_added_tokens_decoder().values()
    reaching = any(" " in token.content or token.lstrip or token.rstrip or token.single_word for token in special)
    return rule.use_regex and not rule.add_prefix_space and not reaching
