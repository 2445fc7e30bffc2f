"""Instruction rows for fine-tuning: a task in words, an input where it needs one, and the completion to learn.

The real ones are the 1,100 rows of Sebastian Raschka's "Build a Large Language Model (From Scratch)", chapter 7
(github.com/rasbt/LLMs-from-scratch, Apache License 2.0); the synthetic ones are made by code, and each of their
completions follows from its prompt, so that a perfect model reaches a loss of 0.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hyperion.data.batches.packing import IGNORE_INDEX
from hyperion.data.errors import DataError, DataUnavailable
from hyperion.data.store.arrays import narrowed
from hyperion.data.store.manifest import read_manifest, write_manifest
from hyperion.data.store.network import download
from hyperion.data.store.sources import Checksums, compare_checksums, mirror_root, take
from hyperion.data.store.staging import cache_root, staged
from hyperion.data.text.corpus import TextCorpus
from hyperion.data.text.synthetic_text import EchoLanguage
from hyperion.data.text.tokenizer import Tokenizer
from hyperion.untrusted import printable, read_bounded, read_json

FOLDER, FILE = "instructions", "instructions.json"
COUNT = 1100
URL = "https://raw.githubusercontent.com/rasbt/LLMs-from-scratch/main/ch07/01_main-chapter-code/instruction-data.json"
SHA256 = "7e09a9af353722ca15c18bc580f093f9c39d3178335a75177319cb1e1d163944"
HELD_OUT_EVERY = 10  # every tenth prompt is held out
KEYS = ("instruction", "input", "output")


@dataclass(frozen=True)
class Instruction:
    """One row; `input` is "" where the instruction says it all."""

    instruction: str
    input: str
    output: str

    @property
    def prompt(self) -> str:
        """What the model is given: the template's headings around instruction and input, up to where it is to answer."""
        given = f"### Input:\n{self.input}\n\n" if self.input else ""
        return f"### Instruction:\n{self.instruction}\n\n{given}### Response:\n"


@dataclass(frozen=True)
class InstructionSet:
    """Instruction rows in two splits that have no prompt in common.

    Attributes:
        name: 'instructions' or 'synthetic-instructions'; a synthetic set never carries the real one's name.
        source: 'mirror', 'cache', 'download' or 'synthetic'.
        detail: what the source says of itself, without machine paths.
        train, held_out: the rows.
        least_loss_nats: loss per completion token that a perfect model reaches, None where unknown.
        checksums: whether the file is its publisher's; None for synthetic rows.
    """

    name: str
    source: str
    detail: str
    train: tuple[Instruction, ...] = field(repr=False)
    held_out: tuple[Instruction, ...] = field(repr=False)
    least_loss_nats: float | None = None
    checksums: Checksums | None = None

    @property
    def sha256(self) -> str:
        """Hash of all rows."""
        rows = [[[getattr(row, key) for key in KEYS] for row in part] for part in (self.train, self.held_out)]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def as_corpus(self) -> TextCorpus:
        """The train rows as text, for a tokenizer to be trained on."""
        lines = [row.prompt + row.output + "\n" for row in self.train]
        return TextCorpus(self.name, self.source, self.detail, {"train": lines, "valid": [], "test": []})


def load_instructions(source: str = "auto", *, allow_synthetic: bool = True, seed: int = 0, url: str = URL) -> InstructionSet:
    """The instruction rows, or the synthetic ones that take their place where that is allowed or asked for.

    Args:
        source: 'auto', 'mirror', 'cache', 'download' or 'synthetic'.
        allow_synthetic: whether 'auto' may end at the synthetic rows.
        seed: of the synthetic rows.
        url: where a download comes from.

    Raises:
        DataError: the file is unreadable or a record is not of this form (named); no source has it.
    """
    suppliers = {
        "mirror": lambda: _read(mirror_root() / FILE, "mirror", "the mirror"),
        "cache": cached_instructions,
        "download": lambda: _downloaded(url),
        "synthetic": lambda: synthetic_instructions(seed=seed),
    }
    return take(FOLDER, source, suppliers, allow_synthetic)


def stage_instructions(url: str = URL) -> str:
    """Put the rows into the cache, from the mirror where one is named, else from their publisher.

    Returns:
        'present' when the cache already had them, else where they came from.

    Raises:
        DataError: neither can be had, or what came is wrong; the cache is as it was.
    """
    target = cache_root() / FOLDER
    if target.is_dir():
        cached_instructions()
        return "present"
    try:
        path = mirror_root() / FILE
        _read(path, "mirror", "the mirror")
    except DataUnavailable:
        _stage_download(target, url)
        return "downloaded"
    with staged(target) as work:
        (work / FILE).write_bytes(read_bounded(path, DataError, _AGAIN))
        write_manifest(work, name=FOLDER, source="mirror", detail="copied from the mirror")
    return "copied from the mirror"


def synthetic_instructions(train: int = 990, held_out: int = 110, seed: int = 0) -> InstructionSet:
    """Made-up tasks over made-up words, no two prompts alike; as many rows as the real set has unless asked otherwise."""
    generator, words = np.random.default_rng(seed), EchoLanguage().words
    rows: dict[str, Instruction] = {}
    while len(rows) < train + held_out:
        text, solve = _TASKS[generator.integers(len(_TASKS))]
        given = [words[i] for i in generator.integers(len(words), size=generator.integers(2, 6))]
        row = Instruction(text, " ".join(given), solve(given))
        rows.setdefault(row.prompt, row)
    made = tuple(rows.values())
    detail = f"made-up tasks on made-up words, seed {seed}, {train} + {held_out} rows, each answer follows from its prompt"
    return InstructionSet("synthetic-instructions", "synthetic", detail, made[:train], made[train:], 0.0)


_TASKS: tuple[tuple[str, Callable[[list[str]], str]], ...] = (
    ("Repeat the words.", " ".join),
    ("Write the words in reverse order.", lambda words: " ".join(words[::-1])),
    ("Sort the words by the alphabet.", lambda words: " ".join(sorted(words))),
    ("Name the first word.", lambda words: words[0]),
    ("Name the last word.", lambda words: words[-1]),
    ("How many words are there?", lambda words: f"There are {len(words)} words."),
)


def _read(path: Path, source: str, label: str, origin: str = "") -> InstructionSet:
    if not path.is_file():
        raise DataUnavailable(f"{label} has no {path.name}", where=path, next_step=f"put {FILE} there, or run `make fetch`")
    rows = _records(path)
    if len(rows) != COUNT:
        raise DataError(f"{path.name} has {len(rows)} records, expected {COUNT}", where=path, next_step=_AGAIN)
    train, held_out = split_by_prompt(rows)
    found = checksums(path)
    detail = f"{COUNT} rows{origin}, {len(held_out)} held out, {found}"
    return InstructionSet(FOLDER, source, detail, train, held_out, checksums=found)


def checksums(path: Path) -> Checksums:
    """Compare the file of rows with the hash of the publisher's file."""
    return compare_checksums({path: SHA256}, "sha256", _UNPROVEN)


_UNPROVEN = "the rows' form is checked, not their content"
_AGAIN = "copy the file again from where it came, or remove it and run `make fetch`"


def _records(path: Path) -> list[Instruction]:
    """The rows of a JSON list of objects with the three keys.

    Raises:
        DataError: no regular file, no UTF-8, no JSON, no list, or a record (named by number) that lacks a key, an
            instruction or an answer, or has another key.
    """
    try:
        records = read_json(path, DataError, _AGAIN)
    except OSError as error:
        raise DataError(f"cannot read {path.name}: {error.strerror}", where=path, next_step=_AGAIN) from error
    if not isinstance(records, list):
        raise DataError(f"{path.name} holds no list of records", where=path, next_step=_AGAIN)
    for number, record in enumerate(records):
        if not isinstance(record, dict) or any(not isinstance(record.get(key), str) for key in KEYS):
            fault = f"record {number} lacks one of the texts {', '.join(KEYS)}"
        elif record.keys() - set(KEYS):
            fault = f"record {number} has unknown keys {sorted(map(printable, record.keys() - set(KEYS)))[:3]}"
        elif any(_is_torn(record[key]) for key in KEYS):
            fault = f"record {number} holds half of a surrogate pair, which no text has"
        elif not record["instruction"].strip() or not record["output"].strip():
            fault = f"record {number} has an empty instruction or output"
        else:
            continue
        raise DataError(fault, where=f"{path}, record {number}", next_step=_AGAIN)
    return [Instruction(*(record[key] for key in KEYS)) for record in records]


def _is_torn(text: str) -> bool:
    """Whether a text holds a lone surrogate: JSON can write one, UTF-8 cannot."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def split_by_prompt(rows: Sequence[Instruction]) -> tuple[tuple[Instruction, ...], tuple[Instruction, ...]]:
    """(train, held out): every tenth prompt is held out with all its rows. A prompt may occur twice with two answers;
    were they parted, the model would be tested on a question it was trained on."""
    numbers: dict[str, int] = {}
    for row in rows:
        numbers.setdefault(row.prompt, len(numbers))
    held_out = {prompt for prompt, number in numbers.items() if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1}
    return (tuple(row for row in rows if row.prompt not in held_out), tuple(row for row in rows if row.prompt in held_out))


def cached_instructions(source: str = "cache") -> InstructionSet:
    """The rows of the cache, under the name of the source that filled it.

    Raises:
        DataError: they are not there, or wrong.
    """
    folder = cache_root() / FOLDER
    manifest = read_manifest(folder)
    if manifest is not None:
        manifest.verify(folder)
    return _read(folder / FILE, source, "the cache", f", {manifest.detail}" if manifest is not None else "")


def _downloaded(url: str) -> InstructionSet:
    target = cache_root() / FOLDER
    if target.is_dir():
        return cached_instructions()  # no second download, and the record says so
    _stage_download(target, url)
    return cached_instructions("download")


def _stage_download(target: Path, url: str) -> None:
    with staged(target) as work:
        download(url, work / FILE, sha256=SHA256)
        write_manifest(work, name=FOLDER, source="download", detail="downloaded from github.com/rasbt/LLMs-from-scratch")


LEAST_PROMPT_SHARE = 4  # a row that is too long keeps a quarter of its length for the prompt's end


@dataclass(frozen=True)
class Completions:
    """Rows of one length.

    Attributes:
        inputs: int32 [rows, length], padded on the right with the end of text.
        targets: int32 [rows, length], the next token where it belongs to the completion, else IGNORE_INDEX.
        sizes: int64 [rows], positions of each row that hold a token; the rest is padding.
        prompts_cut: rows whose prompt lost tokens at its beginning, because the row was too long.
        completions_cut: rows whose completion lost tokens at its end, the end of text among them.
    """

    inputs: np.ndarray
    targets: np.ndarray
    sizes: np.ndarray
    prompts_cut: int
    completions_cut: int

    @property
    def tokens(self) -> int:
        """Tokens that a model reads: prompts and completions, padding not counted."""
        return int(self.sizes.sum())

    @property
    def completion_tokens(self) -> int:
        """Tokens that carry a loss."""
        return int((self.targets != IGNORE_INDEX).sum())


def tokenize_completions(rows: Sequence[Instruction], tokenizer: Tokenizer, length: int) -> Completions:
    """Tokenize rows, prompt and completion each by itself, so that no token belongs to both.

    A row longer than length + 1 tokens first loses the beginning of its prompt (the heading that asks for the response
    stands at its end), then, when the completion alone is too long, the end of its completion. No row is dropped and
    none loses its whole completion; both cuts are counted.

    Args:
        tokenizer: puts its beginning-of-text id, where it has one, before each prompt.
        length: positions of a row.

    Raises:
        DataError: no rows, or a length below 1.
    """
    if not rows or length < 1:
        raise DataError(f"{len(rows)} rows at {length} tokens", next_step="give at least one row and a length of 1 or more")
    prompts = tokenizer.encode([row.prompt for row in rows])
    completions = tokenizer.encode([row.output for row in rows])
    inputs = np.full((len(rows), length), tokenizer.eos_id, dtype=np.int32)
    targets = np.full((len(rows), length), IGNORE_INDEX, dtype=np.int32)
    sizes = np.empty(len(rows), dtype=np.int64)
    cuts = np.zeros(2, dtype=np.int64)
    beginning = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        whole = [*beginning, *prompt], [*completion, tokenizer.eos_id]
        prompt, completion = fit(*whole, length + 1, len(beginning))
        cuts += [len(prompt) < len(whole[0]), len(completion) < len(whole[1])]
        ids = narrowed(np.array(prompt + completion), np.int32, tokenizer.name)
        sizes[number] = size = len(ids) - 1
        inputs[number, :size] = ids[:-1]
        targets[number, len(prompt) - 1 : size] = completion
    return Completions(inputs, targets, sizes, *map(int, cuts))


def fit(prompt: list[int], completion: list[int], limit: int, beginning: int = 0) -> tuple[list[int], list[int]]:
    """Prompt and completion cut to `limit` tokens together: at least one token of each is left.

    Args:
        beginning: tokens at the start of the prompt that stay (the beginning of text).
    """
    most = limit - min(len(prompt), max(1, limit // LEAST_PROMPT_SHARE))
    kept = completion[:most]
    room = limit - len(kept)
    if len(prompt) > room:
        beginning = min(beginning, room)
        prompt = prompt[:beginning] + prompt[len(prompt) - room + beginning :]
    return prompt, kept
