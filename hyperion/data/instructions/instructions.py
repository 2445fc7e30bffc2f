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

from hyperion.data.store.faults import DataError, DataUnavailable
from hyperion.data.store.manifest import read_manifest, write_manifest
from hyperion.data.store.network import download
from hyperion.data.store.sources import Checksums, compare_checksums, mirror_root, take
from hyperion.data.store.staging import cache_root, staged
from hyperion.data.text.corpus import TextCorpus
from hyperion.data.text.synthetic_text import EchoLanguage
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
