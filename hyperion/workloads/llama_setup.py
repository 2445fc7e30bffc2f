"""Set up the fine-tuning of a Llama: instruction rows, their tokenizer, and a model with the tokenizer's vocabulary."""

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hyperion.chapter.context import Context
from hyperion.data import (
    Completions,
    InstructionSet,
    Tokenizer,
    load_instructions,
    load_tokenizer,
    read_tokenizer,
    tokenize_completions,
)
from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.models import (
    LlamaLM,
    ModelFlops,
    llama_flops_per_token,
    llama_folder,
    load_llama,
    local_llama,
    random_llama_shape,
    require_vocabulary,
    verify_llama_folder,
)
from hyperion.paths import expanded
from hyperion.training import Precision, add_lora, seed_everything
from hyperion.training.lora import ATTENTION
from hyperion.training.lora import CONFIG as ADAPTER

# Data sets that fine-tuning loads, by the names of `hyperion.data.prepare.catalog`.
DATA = ("instructions", "gpt2", "llama")
RANK, ALPHA = 16, 32  # of the LoRA adapters


@dataclass(frozen=True)
class FineTuningData:
    """Tokenized instruction rows and the name of the model they are for.

    Attributes:
        model: name for rows: that of a random configuration or of a folder.
        weights: argument of `load_llama`: the name of a random configuration, or a folder.
    """

    rows: InstructionSet
    tokenizer: Tokenizer
    train: Completions
    held_out: Completions
    model: str
    weights: str | Path


def fine_tuning_data(
    context: Context,
    model: str,
    sequence_length: int,
    *,
    real_weights: bool = False,
    held_out_rows: int | None = None,
    quiet: bool = False,
) -> FineTuningData:
    """Load the instruction rows of the context's data source and tokenize them for a model.

    A folder or a model of the hub brings its own tokenizer.

    Args:
        model: a random configuration, a folder, or a model of the hub.
        sequence_length: tokens of a row, at most.
        real_weights: prefer the folder llama/ of the mirror or the cache to `model`, if there is one.
        held_out_rows: number of held-out rows, None for all.
        quiet: do not print the data source, for a second call.
    """
    with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
        rows = load_instructions(context.data_source, allow_synthetic=context.allow_synthetic, seed=context.seed)
        folder = (local_llama(context.data_source) if real_weights else None) or llama_folder(model)
        if folder is not None:
            tokenizer = read_tokenizer(folder)
        else:
            source = "auto" if rows.source == "synthetic" else context.data_source
            tokenizer = load_tokenizer(source, rows.as_corpus())
        train, held_out = (
            tokenize_completions(part, tokenizer, sequence_length) for part in (rows.train, rows.held_out[:held_out_rows])
        )
    name = folder.resolve().name if folder is not None else model
    return FineTuningData(rows, tokenizer, train, held_out, name, folder or model)


def require_llama(model: str) -> None:
    """Check that training can start from a model, before it is loaded. A model of the hub is checked after its download.

    Raises:
        HyperionError: no such random configuration, an adapter instead of a model, an incomplete folder, or a tokenizer that
            does not fit the model.
    """
    folder = expanded(model)
    if model.startswith("random_"):
        random_llama_shape(model, 1)
    elif folder.is_dir():
        _require_no_adapter(folder)
        require_vocabulary(read_tokenizer(folder).vocab_size, verify_llama_folder(folder), where=folder)


def _require_no_adapter(folder: Path) -> None:
    if not (folder / ADAPTER).is_file():
        return
    try:
        adapter = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
        rank, base = adapter["r"], adapter.get("base_model_name_or_path")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HyperionError(f"{ADAPTER} cannot be read: {error!r}", where=folder, next_step="copy it again") from error
    raise HyperionError(
        f"an adapter of rank {rank}, not a model: training starts from full weights with new adapters of rank {RANK}",
        where=folder,
        next_step=f"name the weights that it was trained on{f' ({base})' if base else ''}",
    )


def base_model(context: Context, data: FineTuningData, dtype: torch.dtype) -> nn.Module:
    """Return the model before training, on the context's device. Each call returns the same weights.

    Raises:
        HyperionError: incomplete weights, or a tokenizer that does not fit the model.
    """
    seed_everything(context.seed)
    vocabulary, device = data.tokenizer.vocab_size, context.device.torch_device
    model = load_llama(data.weights, vocab_size=vocabulary, dtype=dtype, device=device)
    require_vocabulary(vocabulary, model, where=data.weights)
    return model


def with_lora(base: nn.Module, seed: int, rank: int = RANK, alpha: float = ALPHA) -> LlamaLM:
    """Return the base with new adapters on the attention projections, initialised from the seed."""
    seed_everything(seed)
    return LlamaLM(add_lora(base, rank, alpha))


def lora_model(
    name: str, vocabulary: int, sequence_length: int, device: Device, dtype: torch.dtype = torch.float32
) -> tuple[LlamaLM, ModelFlops]:
    """Return a randomly initialised Llama with LoRA adapters, and its FLOPs per token. Uses torch's current generators."""
    model = load_llama(name, vocab_size=vocabulary, dtype=dtype, device=device.torch_device)
    flops = llama_flops_per_token(model.config, sequence_length, RANK, ATTENTION)
    return LlamaLM(add_lora(model, RANK, ALPHA)), flops


def frozen_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of a frozen base: no update needs more precision than the computation."""
    return torch.bfloat16 if precision.dtype == "bf16" else torch.float32
