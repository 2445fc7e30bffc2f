"""The tokens of this chapter: the bytes of WikiText-2. With only 256 tokens, the output layers of toy models are small."""

import numpy as np
import torch
from torch import Tensor

from hyperion.chapter.context import Context
from hyperion.data import load_wikitext2

DATA = ("wikitext-2",)
VOCABULARY = 256


def documents(context: Context, split: str = "train") -> tuple[list[np.ndarray], str]:
    """Return the bytes of each line of a split, uint8, and the name of the data source. Empty lines are left out."""
    corpus = load_wikitext2(
        context.data_source,
        allow_synthetic=context.allow_synthetic,
        synthetic_lines=context.synthetic["lines"],
        seed=context.seed,
    )
    lines = (line.encode() for line in corpus.splits[split])
    return [np.frombuffer(line, np.uint8) for line in lines if line.strip()], corpus.source


def batches(stream: np.ndarray, count: int, batch_size: int, length: int, seed: int) -> Tensor:
    """Return random windows of a stream of tokens.

    Args:
        stream: the tokens.
        count, batch_size, length: number of batches, windows of a batch, and input tokens of a window.
        seed: seed of the positions.

    Returns:
        int64 tokens of shape [count, batch_size, length + 1].
    """
    starts = np.random.default_rng(seed).integers(0, len(stream) - length, (count, batch_size, 1))
    return torch.from_numpy(np.asarray(stream)[starts + np.arange(length + 1)].astype(np.int64))


def unigram_entropy(stream: np.ndarray) -> float:
    """Return the entropy of single tokens in nats: the lowest loss of a model that ignores the context."""
    counts = np.bincount(stream, minlength=VOCABULARY)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
