"""Text to token ids, fast: each distinct word of a stretch is encoded once, however often it occurs.

GPT-2's rule cuts text before a space that follows a visible character, always: no piece of it crosses that place and none
looks beyond it. So a line is the words between its spaces, each with the space before it, and what BPE makes of a word does
not depend on its neighbours. Text repeats its words (WikiText-2's train split is 2.1 million words of 33 thousand kinds),
and a dictionary is faster than BPE. Lines in which white space does anything else are encoded whole.
Source of the rule: Radford et al. 2019, gpt-2/src/encoder.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import tokenizers

REMEMBERED_BYTES = 1 << 24  # what all known pieces may take, about, however long the text
_PIECE_BYTES = 160  # of a piece: its string, its place in the dictionary, its numbers
_MARK = "\0"  # begins the key of a piece that does not follow a space; text with this character is not cut into words


@dataclass(frozen=True)
class Encoded:
    """Token ids of some lines.

    Attributes:
        ids: uint32 [tokens], of all lines, one after another.
        sizes: int64 [lines], tokens of each line.
        blank: bool [lines], whether a line holds nothing but white space.
        words_with_eos: words, separated by white space, plus one a line.
        lost: the first text that decoding did not give back, "" where all of it came back.
    """

    ids: np.ndarray = field(repr=False)
    sizes: np.ndarray = field(repr=False)
    blank: np.ndarray = field(repr=False)
    words_with_eos: int
    lost: str


class Encoder:
    """Encodes lines exactly as their tokenizer does, and proves that decoding gives them back.

    A byte-level tokenizer decodes piece by piece, so a text comes back when each of its pieces does, and a piece is proven
    when it is first seen.
    """

    def __init__(self, bpe: tokenizers.Tokenizer):
        self._bpe = bpe
        self._by_words = _cuts_at_spaces(bpe)
        self._lost = ""
        self._forget()

    def encode(self, lines: Sequence[str]) -> Encoded:
        """Token ids of the lines, each by itself, nothing added."""
        if self._bytes > REMEMBERED_BYTES:
            self._forget()
        split = [line.split() for line in lines]
        blank = np.array([not plain for plain in split], dtype=bool)
        pieces = [self._pieces(line, plain) for line, plain in zip(lines, split, strict=True)]
        counts = np.array([len(found) for found in pieces], dtype=np.int64)
        places = np.fromiter(map(self._place.__getitem__, chain.from_iterable(pieces)), np.int64, int(counts.sum()))
        self._learn()
        starts, lengths = self._starts[places], self._lengths[places]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        ids = self._ids[np.repeat(starts - (ends - lengths), lengths) + np.arange(total)]
        sizes = np.diff(np.append(0, ends)[np.append(0, np.cumsum(counts))])
        return Encoded(ids, sizes, blank, sum(map(len, split)) + len(lines), self._lost)

    def _pieces(self, line: str, plain: list[str]) -> list[str]:
        """The keys of a line: its words, or the line as one; one that does not follow a space is marked."""
        words = _words(line, plain) if self._by_words else None
        if words is None:
            return [_MARK + line] if line else []
        if words[0]:
            words[0] = _MARK + words[0]
            return words
        return words[1:]

    def _learn(self) -> None:
        """Encode the pieces that were not seen before."""
        new = list(self._place)[len(self._starts) :]
        if not new:
            return
        texts = [key[1:] if key[:1] == _MARK else " " + key for key in new]
        ids = [found.ids for found in self._bpe.encode_batch_fast(texts, add_special_tokens=False)]
        lengths = np.array([len(found) for found in ids], dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(ids), np.uint32, int(lengths.sum()))
        if not self._lost and self._bpe.decode(flat.tolist(), skip_special_tokens=False) != "".join(texts):
            back = self._bpe.decode_batch(ids, skip_special_tokens=False)
            self._lost = next((text for text, got in zip(texts, back, strict=True) if text != got), "".join(texts))
        self._starts = np.append(self._starts, len(self._ids) + np.cumsum(lengths) - lengths)
        self._lengths = np.append(self._lengths, lengths)
        self._ids = np.append(self._ids, flat)
        self._bytes += sum(_PIECE_BYTES + len(text) for text in texts)

    def _forget(self) -> None:
        self._place, self._bytes = _Places(), 0
        self._starts, self._lengths = np.empty(0, np.int64), np.empty(0, np.int64)
        self._ids = np.empty(0, np.uint32)  # of all pieces known, one after another


class _Places(dict):
    """Numbers its keys in the order in which they are first asked for."""

    def __missing__(self, key: str) -> int:
        self[key] = place = len(self)
        return place


def in_chunks(lines: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Runs of whole lines of about so many characters, each at least a line."""
    chunk, size = [], 0
    for line in lines:
        chunk.append(line)
        size += len(line)
        if size >= characters:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _words(line: str, plain: list[str]) -> list[str] | None:
    """What stands before each space, the first "" where the line begins with one; None where the line must stay whole.

    Args:
        plain: the line's words, separated by white space of any kind. Where they are those between the spaces, no white
            space but single spaces stands between them.
    """
    words = line.split(" ")
    body = words if words[0] else words[1:]
    if not body or _MARK in line:
        return None
    last = body[-1].rstrip("\n")
    return words if plain == (body[:-1] + [last] if last else body[:-1]) else None


def _cuts_at_spaces(bpe: tokenizers.Tokenizer) -> bool:
    """Whether a tokenizer has GPT-2's rule, and no special token that reaches beyond a word."""
    rule = bpe.pre_tokenizer
    if bpe.normalizer is not None or not isinstance(rule, tokenizers.pre_tokenizers.ByteLevel):
        return False
    special = bpe.get_added_tokens_decoder().values()
    reaching = any(" " in token.content or token.lstrip or token.rstrip or token.single_word for token in special)
    return rule.use_regex and not rule.add_prefix_space and not reaching
