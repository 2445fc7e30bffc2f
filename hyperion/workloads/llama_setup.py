"""What fine-tuning a Llama starts from: instruction rows, their tokenizer, and a model whose vocabulary is the tokenizer's."""

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hyperion.chapter.context import Context
from hyperion.checkpoints.adapters import CONFIG as ADAPTER
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
from hyperion.parallel import add_lora
from hyperion.parallel.lora import ATTENTION
from hyperion.paths import expanded
from hyperion.training import Precision, seed_everything

# What the experiments load, by the names of `hyperion.data.prepare.catalog`.
DATA = ("instructions", "gpt2", "llama")
RANK, ALPHA = 16, 32


@dataclass(frozen=True)
class Material:
    """Rows as tokens, and which model they are for.

    Attributes:
        model: name for rows: a random configuration's, or a folder's.
        weights: what load_llama is given: that name, or the folder.
    """

    rows: InstructionSet
    tokenizer: Tokenizer
    train: Completions
    held_out: Completions
    model: str
    weights: str | Path


def material(context: Context, quiet: bool = False) -> Material:
    """The instruction rows of the context's data source, tokenized for the model that the profile names.

    Where the profile says `real_weights`, the folder llama/ of the mirror or the cache takes the place of the random
    configuration. Where it names a folder or a model of the hub, that is it. Either brings its own tokenizer.

    Args:
        quiet: do not say which source was taken, because it has been said.
    """
    with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
        return _material(context)


def _material(context: Context) -> Material:
    sizes = context.sizes
    rows = load_instructions(context.data_source, allow_synthetic=context.allow_synthetic, seed=context.seed)
    folder = (local_llama(context.data_source) if sizes["real_weights"] else None) or llama_folder(sizes["model"])
    if folder is not None:
        tokenizer = read_tokenizer(folder)
    else:
        asked = "auto" if rows.source == "synthetic" else context.data_source
        tokenizer = load_tokenizer(asked, rows.as_corpus())
    train, held_out = (
        tokenize_completions(part, tokenizer, sizes["sequence_length"])
        for part in (rows.train, rows.held_out[: sizes.get("held_out_rows")])
    )
    name = folder.resolve().name if folder is not None else sizes["model"]
    return Material(rows, tokenizer, train, held_out, name, folder or sizes["model"])


def require_llama(model: str) -> None:
    """Refuse weights that no training can begin with, before one is loaded; a model of the hub is looked at when it came.

    Raises:
        HyperionError: no such random configuration, an adapter in the place of a model, an incomplete folder, or a
            tokenizer that is not the model's.
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
        f"an adapter of rank {rank} and no model: training begins with whole weights, and adapters of rank {RANK}",
        where=folder,
        next_step=f"name the weights that it was trained on{f' ({base})' if base else ''}",
    )


def base_model(context: Context, found: Material, dtype: torch.dtype) -> nn.Module:
    """The model before any training, the same at each call, on the context's device; its vocabulary is checked.

    Raises:
        HyperionError: incomplete weights, or a tokenizer that is not the model's.
    """
    seed_everything(context.seed)
    vocabulary, device = found.tokenizer.vocab_size, context.device.torch_device
    model = load_llama(found.weights, vocab_size=vocabulary, dtype=dtype, device=device)
    require_vocabulary(vocabulary, model, where=found.weights)
    return model


def with_lora(base: nn.Module, seed: int, rank: int = RANK, alpha: float = ALPHA) -> LlamaLM:
    """The base with adapters on the projections of attention, drawn from the seed."""
    seed_everything(seed)
    return LlamaLM(add_lora(base, rank, alpha))


def lora_model(
    name: str, vocabulary: int, sequence_length: int, device: Device, dtype: torch.dtype = torch.float32
) -> tuple[LlamaLM, ModelFlops]:
    """A random-initialised Llama with LoRA adapters, drawn from torch's generators as they stand, and its FLOPs a token."""
    model = load_llama(name, vocab_size=vocabulary, dtype=dtype, device=device.torch_device)
    flops = llama_flops_per_token(model.config, sequence_length, RANK, ATTENTION)
    return LlamaLM(add_lora(model, RANK, ALPHA)), flops


def frozen_dtype(precision: Precision) -> torch.dtype:
    """What a frozen base is stored in: nothing updates it, so the type that it is computed in is enough."""
    return torch.bfloat16 if precision.dtype == "bf16" else torch.float32
