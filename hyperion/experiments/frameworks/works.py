"""The work that all frameworks share: its options, its initial state, and its token file, made from the data of the run."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hyperion.chapter.context import Context
from hyperion.chapter.variants import RankOptions
from hyperion.data import load_wikitext2
from hyperion.engines import Record, Stack, Work
from hyperion.engines.work import distinct_rows, write_work_folder
from hyperion.errors import HyperionError
from hyperion.models.llama import build_random_llama
from hyperion.workloads import datasets

BYTES, GPT2 = "bytes", "gpt2"
DATA = datasets.TEXT
# Bounds are this multiple of the largest difference between the plain loop and its twins, which differ only in rounding. A factor
# above 1 is needed, because another framework rounds in more places than a single twin, and because the maximum over a few twins
# is below the largest possible difference.
TWIN_FACTOR = 4.0
_ROUNDING = 2.0**-24


class WorkOptions(RankOptions):
    """Options that define the work.

    Args:
        model: name of a Llama configuration. Its weights are random.
        tokens: "bytes" (the bytes of the text, as 256 different tokens) or "gpt2" (tokens of the GPT-2 tokenizer).
        sequence_length: number of scored tokens in a row.
        batch_size: number of rows in a step, summed over all ranks.
        steps: number of optimizer steps.
        dtype: number format of matrix products, "fp32" or "bf16".
        learning_rate: constant learning rate.
    """

    model: str
    tokens: str
    sequence_length: int
    batch_size: int
    steps: int
    dtype: str = "fp32"
    learning_rate: float = 1e-3

    def ranks_of(self, context: Context, stack: Stack) -> int:
        """Return the number of ranks for a framework: that of its stack, but at most `ranks`, and the number of devices."""
        return min(stack.ranks, self.ranks, self.device_count(context))

    def params(self) -> dict[str, Any]:
        """Return the options that rows contain."""
        return self.model_dump(include={"model", "tokens", "sequence_length", "batch_size", "steps"})


def prepare_work(context: Context, options: WorkOptions, micro_batches: int = 1) -> tuple[Work, str]:
    """Write the initial state and the token file. Return the work, and the source of the data.

    The rows are consecutive in the training text. A row whose inputs repeat those of an earlier row is omitted.
    """
    folder = context.workspace / "work"
    folder.mkdir(parents=True, exist_ok=True)
    stream, vocabulary, source = _stream(context, options.tokens)
    rows = distinct_rows(stream, options.steps * options.batch_size, options.sequence_length)
    torch.manual_seed(context.seed)
    model = build_random_llama(options.model, vocabulary)  # on the CPU, so that all machines have the same state
    write_work_folder(folder, model, rows)
    work = Work(
        str(folder),
        options.steps,
        options.batch_size,
        options.sequence_length,
        dtype=options.dtype,
        learning_rate=options.learning_rate,
        micro_batches=micro_batches,
    )
    return work, source


def _stream(context: Context, tokens: str) -> tuple[np.ndarray, int, str]:
    """Return (token ids of the training split, size of the vocabulary, source of the data)."""
    if tokens == GPT2:
        corpus, tokenizer, prepared = datasets.text(context)
        return prepared.tokens["train"], tokenizer.vocab_size, corpus.source
    if tokens != BYTES:
        raise HyperionError(f"no tokens are named {tokens!r}", where="option tokens", next_step=f"choose {BYTES} or {GPT2}")
    corpus = load_wikitext2(
        context.data_source,
        allow_synthetic=context.allow_synthetic,
        synthetic_lines=context.synthetic["lines"],
        seed=context.seed,
    )
    text = "".join(islice(corpus.splits["train"], 1 << 16))
    return np.frombuffer(text.encode("utf-8"), np.uint8), 256, corpus.source


def loss_difference(record: Record, reference: Record) -> float:
    """Return the largest difference between the losses of the same step, over the steps that both runs made. NaN if one is."""
    steps = min(len(record.losses), len(reference.losses))
    return float(np.max(np.abs(np.subtract(record.losses[:steps], reference.losses[:steps]))))


def parameter_difference(record: Record, reference: Record) -> float:
    """Return the largest absolute difference between corresponding elements of the final states.

    Raises:
        HyperionError: the states have different names or shapes.
    """
    from safetensors.torch import load_file

    here, expected = load_file(record.final_file), load_file(reference.final_file)
    if {name: tensor.shape for name, tensor in here.items()} != {name: tensor.shape for name, tensor in expected.items()}:
        raise HyperionError(
            f"the final state of {record.stack} has other tensors than the plain loop's: {sorted(set(here) ^ set(expected))[:4]}",
            where=Path(record.final_file),
            next_step="correct the conversion of the state in its adapter",
        )
    # In contrast to `max`, NumPy's maximum is NaN if any number is.
    return float(np.max([(here[name] - tensor).abs().max().item() for name, tensor in expected.items()]))


def differing_tensors(record: Record, reference: Record) -> int:
    """Return the number of tensors that are not equal in the two final states."""
    from safetensors.torch import load_file

    here, expected = load_file(record.final_file), load_file(reference.final_file)
    return sum(not torch.equal(here[name], tensor) for name, tensor in expected.items())


def loss_tolerance(twins: Sequence[Record], reference: Record) -> float:
    """Return the largest loss difference that is attributed to rounding, computed from twins of the plain loop."""
    # A twin may be bitwise equal, so at least one rounding error is allowed per step.
    least = len(reference.losses) * _ROUNDING * max(reference.losses)
    return max(TWIN_FACTOR * float(np.max([loss_difference(twin, reference) for twin in twins])), least)


def parameter_tolerance(twins: Sequence[Record], reference: Record) -> float:
    """Return the largest parameter difference that is attributed to rounding, computed from twins of the plain loop."""
    return TWIN_FACTOR * float(np.max([parameter_difference(twin, reference) for twin in twins]))
