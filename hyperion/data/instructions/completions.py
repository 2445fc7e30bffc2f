"""Instruction rows as token ids with the loss on completions only: prompt and padding are context, never targets.

A row is prompt, completion and the end of text, in this order; `targets` are one token ahead of `inputs`, as everywhere
in this book. The target of the prompt's last token is the completion's first, the last target is the end of text:

    inputs      p1      p2      p3   c1   c2   (padding)
    targets     IGNORE  IGNORE  c1   c2   end  IGNORE

Padding stands on the right, so that causal attention keeps it out of sight of every token that counts, without a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyperion.data.batches.packing import IGNORE_INDEX
from hyperion.data.instructions.instructions import Instruction
from hyperion.data.store.array_files import narrowed
from hyperion.data.store.faults import DataError
from hyperion.data.text.tokenizer import Tokenizer

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
