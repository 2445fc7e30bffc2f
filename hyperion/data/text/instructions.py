"""Load and tokenize instruction rows for fine-tuning. A row has an instruction, an optional input, and a completion.

The real rows are the 1,100 rows of Sebastian Raschka's "Build a Large Language Model (From Scratch)", chapter 7
(github.com/rasbt/LLMs-from-scratch, Apache License 2.0). The synthetic rows are generated. Each synthetic completion follows
from its prompt, so that a perfect model reaches a loss of 0.

The loss is computed only for completions. A row consists of the prompt, the completion and the end of text, in this order.
`targets` are shifted by one token relative to `inputs`:

    inputs      p1      p2      p3   c1   c2   (padding)
    targets     IGNORE  IGNORE  c1   c2   end  IGNORE

Padding is on the right. With causal attention, no real token attends to the padding after it, so no attention mask is needed.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hyperion.data.packing import IGNORE_INDEX
from hyperion.data.store.arrays import narrowed
from hyperion.data.store.folders import DataError, DataUnavailable, read_manifest, staged, write_manifest
from hyperion.data.store.sources import Checksums, PublishedSet, compare_checksums, download, take
from hyperion.data.text.corpus import EchoLanguage, TextCorpus
from hyperion.data.text.tokenizer import Tokenizer
from hyperion.untrusted import printable, read_json

FOLDER, FILE = "instructions", "instructions.json"
COUNT = 1100
_TRAIN = 990  # rows of the train split of the synthetic set, as in the real set
URL = "https://raw.githubusercontent.com/rasbt/LLMs-from-scratch/main/ch07/01_main-chapter-code/instruction-data.json"
SHA256 = "7e09a9af353722ca15c18bc580f093f9c39d3178335a75177319cb1e1d163944"
HELD_OUT_EVERY = 10  # one in this many prompts is held out
KEYS = ("instruction", "input", "output")


@dataclass(frozen=True)
class Instruction:
    """One row. `input` is "" if the instruction needs no input. `output` is the completion."""

    instruction: str
    input: str
    output: str

    @property
    def prompt(self) -> str:
        """Prompt for the model: the instruction, the input and the heading of the response, formatted with a fixed template."""
        given = f"### Input:\n{self.input}\n\n" if self.input else ""
        return f"### Instruction:\n{self.instruction}\n\n{given}### Response:\n"


@dataclass(frozen=True)
class InstructionSet:
    """Instruction rows in two splits without common prompts.

    Attributes:
        name: 'instructions' or 'synthetic-instructions'; a synthetic set never has the name of the real one.
        source: 'mirror', 'cache', 'download' or 'synthetic'.
        detail: description of the source, without local paths.
        train, held_out: the rows.
        least_loss_nats: loss of a perfect model in nats per completion token; None if it is unknown.
        checksums: result of the comparison with the published checksum; None for synthetic rows.
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
        """Return the train rows as a corpus, on which a tokenizer can be trained."""
        lines = [row.prompt + row.output + "\n" for row in self.train]
        return TextCorpus(self.name, self.source, self.detail, {"train": lines, "valid": [], "test": []})


def load_instructions(source: str = "auto", *, allow_synthetic: bool = True, seed: int = 0, url: str = URL) -> InstructionSet:
    """Load the instruction rows, or synthetic ones if they are requested or allowed as a fallback.

    Args:
        source: 'auto', 'mirror', 'cache', 'download' or 'synthetic'.
        allow_synthetic: if True, 'auto' uses synthetic rows if no other source has the data.
        seed: seed of the synthetic rows.
        url: address from which the file is downloaded.

    Raises:
        DataError: the file is unreadable, a record is invalid (the error states its number), or no source has the data.
    """
    suppliers = {**published(url).suppliers(), "synthetic": lambda: synthetic_instructions(seed=seed)}
    return take(FOLDER, source, suppliers, allow_synthetic)


def published(url: str = URL) -> PublishedSet[InstructionSet]:
    """Return the published rows, downloaded from `url` if necessary. In a mirror, the file is at the top level."""

    def fetch(target: Path) -> None:
        with staged(target) as work:
            download(url, work / FILE, sha256=SHA256)
            write_manifest(work, name=FOLDER, source="download", detail="downloaded from github.com/rasbt/LLMs-from-scratch")

    return PublishedSet(FOLDER, _read, lambda folder: [folder / FILE], fetch, at_top=True)


def synthetic_instructions(seed: int = 0) -> InstructionSet:
    """Generate tasks on synthetic words. No prompt is repeated. There are as many rows as in the real set."""
    generator, words = np.random.default_rng(seed), EchoLanguage().words
    rows: dict[str, Instruction] = {}
    # Draw tasks until there are enough distinct prompts. A task with a repeated prompt adds no row.
    while len(rows) < COUNT:
        text, solve = _TASKS[generator.integers(len(_TASKS))]
        given = [words[i] for i in generator.integers(len(words), size=generator.integers(2, 6))]
        row = Instruction(text, " ".join(given), solve(given))
        rows.setdefault(row.prompt, row)
    generated = tuple(rows.values())
    detail = f"made-up tasks on made-up words, seed {seed}, {_TRAIN} + {COUNT - _TRAIN} rows, each answer follows from its prompt"
    return InstructionSet("synthetic-instructions", "synthetic", detail, generated[:_TRAIN], generated[_TRAIN:], 0.0)


_TASKS: tuple[tuple[str, Callable[[list[str]], str]], ...] = (
    ("Repeat the words.", " ".join),
    ("Write the words in reverse order.", lambda words: " ".join(words[::-1])),
    ("Sort the words by the alphabet.", lambda words: " ".join(sorted(words))),
    ("Name the first word.", lambda words: words[0]),
    ("Name the last word.", lambda words: words[-1]),
    ("How many words are there?", lambda words: f"There are {len(words)} words."),
)


def _read(folder: Path, source: str, label: str) -> InstructionSet:
    path = folder / FILE
    manifest = None if source == "mirror" else read_manifest(folder)  # the top level of a mirror belongs to its owner
    if manifest is not None:
        manifest.verify(folder)
    if not path.is_file():
        raise DataUnavailable(f"{label} has no {path.name}", where=path, next_step=f"put {FILE} there, or run `make fetch`")
    rows = _records(path)
    if len(rows) != COUNT:
        raise DataError(f"{path.name} has {len(rows)} records, expected {COUNT}", where=path, next_step=_AGAIN)
    train, held_out = split_by_prompt(rows)
    compared = checksums(path)
    origin = f", {manifest.detail}" if manifest is not None else ""
    detail = f"{COUNT} rows{origin}, {len(held_out)} held out, {compared}"
    return InstructionSet(FOLDER, source, detail, train, held_out, checksums=compared)


def checksums(path: Path) -> Checksums:
    """Compare the file with the published hash."""
    return compare_checksums({path: SHA256}, "sha256", _UNPROVEN)


_UNPROVEN = "the rows' form is checked, not their content"
_AGAIN = "copy the file again from its source, or remove it and run `make fetch`"


def _records(path: Path) -> list[Instruction]:
    """Return the rows of a JSON list of objects with the three keys.

    Raises:
        DataError: the path is not a regular file, the content is not UTF-8 or not a JSON list, or a record has a missing key,
            an unknown key, or an empty instruction or output. The error states the number of the record.
    """
    try:
        records = read_json(path, DataError, _AGAIN)
    except OSError as error:
        raise DataError(f"cannot read {path.name}: {error.strerror}", where=path, next_step=_AGAIN) from error
    if not isinstance(records, list):
        raise DataError(f"{path.name} is not a list of records", where=path, next_step=_AGAIN)
    for number, record in enumerate(records):
        if not isinstance(record, dict) or any(not isinstance(record.get(key), str) for key in KEYS):
            fault = f"record {number} lacks one of the texts {', '.join(KEYS)}"
        elif record.keys() - set(KEYS):
            fault = f"record {number} has unknown keys {sorted(map(printable, record.keys() - set(KEYS)))[:3]}"
        elif any(_is_torn(record[key]) for key in KEYS):
            fault = f"record {number} contains half of a surrogate pair, which is not valid text"
        elif not record["instruction"].strip() or not record["output"].strip():
            fault = f"record {number} has an empty instruction or output"
        else:
            continue
        raise DataError(fault, where=f"{path}, record {number}", next_step=_AGAIN)
    return [Instruction(*(record[key] for key in KEYS)) for record in records]


def _is_torn(text: str) -> bool:
    """Return True if a string contains an unpaired surrogate. JSON can represent such a string, but UTF-8 cannot."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def split_by_prompt(rows: Sequence[Instruction]) -> tuple[tuple[Instruction, ...], tuple[Instruction, ...]]:
    """Return a pair (train rows, held-out rows). All rows of every tenth prompt are held out.

    If a prompt occurs twice with different completions, both rows are in the same split. Otherwise, the model would be tested on
    a prompt on which it was trained.
    """
    numbers: dict[str, int] = {}
    for row in rows:
        numbers.setdefault(row.prompt, len(numbers))
    # Prompts are numbered by their first occurrence, so the split does not depend on a random generator.
    held_out = {prompt for prompt, number in numbers.items() if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1}
    return (tuple(row for row in rows if row.prompt not in held_out), tuple(row for row in rows if row.prompt in held_out))


LEAST_PROMPT_SHARE = 4  # a row that is too long keeps at least 1/4 of its positions for the end of the prompt


@dataclass(frozen=True)
class Completions:
    """Tokenized rows of equal length.

    Attributes:
        inputs: token ids, int32 [rows, length]. The padding on the right consists of end-of-text tokens.
        targets: token ids, int32 [rows, length]: the next token if this token belongs to the completion, else IGNORE_INDEX.
        sizes: number of real tokens in each row of inputs, int64 [rows]. All later positions are padding.
        prompts_cut: number of rows whose prompt was truncated at its start.
        completions_cut: number of rows whose completion was truncated at its end. These rows have no end of text.
    """

    inputs: np.ndarray
    targets: np.ndarray
    sizes: np.ndarray
    prompts_cut: int
    completions_cut: int

    @property
    def tokens(self) -> int:
        """Number of input tokens in prompts and completions, without padding."""
        return int(self.sizes.sum())

    @property
    def scored(self) -> np.ndarray:
        """Mask, bool [rows, length], that is True where a target is part of the loss."""
        return self.targets != IGNORE_INDEX

    @property
    def completion_tokens(self) -> int:
        """Number of targets that are part of the loss."""
        return int(self.scored.sum())


def tokenize_completions(rows: Sequence[Instruction], tokenizer: Tokenizer, length: int) -> Completions:
    """Tokenize rows. The prompt and the completion are tokenized separately, so that no token belongs to both.

    If a row has more than length + 1 tokens, the start of its prompt is removed first, because the end of the prompt contains
    the heading of the response. If the row is still too long, the end of its completion is removed. No row is omitted, and at
    least one token of each completion remains. The result contains the numbers of both kinds of truncation.

    Args:
        rows: the rows.
        tokenizer: the tokenizer. If it has a beginning-of-text token, each prompt starts with this token.
        length: number of positions in a row.

    Raises:
        DataError: there are no rows, or the length is below 1.
    """
    if not rows or length < 1:
        raise DataError(
            f"{len(rows)} rows with a length of {length}", next_step="give at least one row and a length of 1 or more"
        )
    prompts = tokenizer.encode([row.prompt for row in rows])
    completions = tokenizer.encode([row.output for row in rows])
    # Any id works as padding, because its targets are IGNORE_INDEX and no real token attends to it. Every tokenizer has an end
    # of text.
    inputs = np.full((len(rows), length), tokenizer.eos_id, dtype=np.int32)
    targets = np.full((len(rows), length), IGNORE_INDEX, dtype=np.int32)
    sizes = np.empty(len(rows), dtype=np.int64)
    cuts = np.zeros(2, dtype=np.int64)
    beginning = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        whole = [*beginning, *prompt], [*completion, tokenizer.eos_id]
        # Inputs and targets are shifted by one token, so length + 1 tokens fill a row.
        prompt, completion = fit(*whole, length + 1, len(beginning))
        cuts += [len(prompt) < len(whole[0]), len(completion) < len(whole[1])]
        ids = narrowed(np.array(prompt + completion), np.int32, tokenizer.name)
        sizes[number] = size = len(ids) - 1
        inputs[number, :size] = ids[:-1]
        # The last prompt token predicts the first completion token.
        targets[number, len(prompt) - 1 : size] = completion
    return Completions(inputs, targets, sizes, *map(int, cuts))


def fit(prompt: list[int], completion: list[int], limit: int, beginning: int = 0) -> tuple[list[int], list[int]]:
    """Truncate a prompt and a completion so that they have at most `limit` tokens in total.

    At least one token of each remains.

    Args:
        prompt: token ids of the prompt.
        completion: token ids of the completion.
        limit: maximum total number of tokens.
        beginning: number of tokens at the start of the prompt that are never removed, such as the beginning-of-text token.
    """
    # Reserve positions for the prompt: its length or a quarter of the row, whichever is smaller.
    most = limit - min(len(prompt), max(1, limit // LEAST_PROMPT_SHARE))
    completion = completion[:most]
    room = limit - len(completion)
    if len(prompt) > room:
        beginning = min(beginning, room)
        prompt = prompt[:beginning] + prompt[len(prompt) - room + beginning :]
    return prompt, completion
