"""Fine-tune a Llama on instructions, with LoRA or in full.

The functions load the data and the base model, add and check LoRA adapters, and compute the bytes and FLOPs of a step from the
model's shape. In this module, an instruction row (or row) is one training example: a prompt and its completion.
"""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperion.chapter.context import Context, Options
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
from hyperion.models import (
    LlamaLM,
    LlamaShape,
    ModelFlops,
    llama_flops_per_token,
    llama_folder,
    llama_lora_parameter_count,
    llama_parameter_count,
    load_llama,
    local_llama,
    random_llama_shape,
    require_vocabulary,
    verify_llama_folder,
)
from hyperion.paths import expanded
from hyperion.results import Row
from hyperion.training import (
    LanguageEngine,
    Precision,
    WarmupCosine,
    adamw,
    add_lora,
    frozen_sha256,
    load_adapter,
    seed_everything,
)
from hyperion.training.lora import ATTENTION
from hyperion.training.lora import CONFIG as ADAPTER

# Names of the data sets that fine-tuning loads, as in `hyperion.data.prepare.catalog`.
DATA = ("instructions", "gpt2", "llama")
RANK, ALPHA = 16, 32  # rank and scale of the LoRA adapters
LORA, FULL = "LoRA", "full fine-tuning"
LOADED_TOLERANCE = 1e-5  # tolerance for logits after saving and loading adapters, which copies float32 values exactly
_TRAINED_BYTES = 16  # bytes per trained parameter, for the weight, the gradient and the two AdamW moments, all in float32
_WARMUP_SHARE = 0.1
_PROBE_ROWS = 4


class FineTuningOptions(Options):
    """Options for the fine-tuning experiments.

    Args:
        model: name of a random configuration, for example "random_llama_1b".
        real_weights: if True, and if the mirror or the cache has a folder llama/, use its weights instead of `model`.
        sequence_length: maximum number of tokens in a row.
        batch_size: number of rows in one optimizer step, summed over all ranks.
        held_out_rows: number of held-out rows to use. None uses all of them.
        steps: number of optimizer steps.
        learning_rate: peak learning rate, reached after a warm-up over a tenth of the steps.
        precision: number format of the training. "auto" is bf16 if the device has matrix units for it, otherwise fp32.
        steady_time_limit_s: timing budget in seconds for the step after warm-up.
    """

    model: str
    real_weights: bool
    sequence_length: int
    batch_size: int
    held_out_rows: int | None = None
    steps: int
    learning_rate: float
    precision: str
    steady_time_limit_s: float

    def data(self, context: Context) -> "FineTuningData":
        """Return the tokenized instruction rows, as loaded by `fine_tuning_data`."""
        return fine_tuning_data(
            context, self.model, self.sequence_length, real_weights=self.real_weights, held_out_rows=self.held_out_rows
        )


@dataclass(frozen=True)
class FineTuningData:
    """Tokenized instruction rows, and the model for which they were tokenized.

    Attributes:
        rows: instruction rows as text.
        tokenizer: tokenizer of the model.
        train: tokenized rows for training.
        held_out: tokenized rows for evaluation.
        model: name of the model in the result rows: that of a random configuration or of a folder.
        weights: first argument of `load_llama`: the name of a random configuration or the path of a folder.
    """

    rows: InstructionSet
    tokenizer: Tokenizer
    train: Completions
    held_out: Completions
    model: str
    weights: str | Path


def fine_tuning_data(
    context: Context, model: str, sequence_length: int, *, real_weights: bool = False, held_out_rows: int | None = None
) -> FineTuningData:
    """Load the instruction rows of the context's data source and tokenize them for a model.

    If the model is a folder or a model of the Hugging Face Hub, its own tokenizer is used.

    Args:
        context: context of the experiment.
        model: name of a random configuration, path of a folder, or name of a model of the Hugging Face Hub.
        sequence_length: maximum number of tokens in a row.
        real_weights: if True, and if the mirror or the cache has a folder llama/, use its weights instead of `model`.
        held_out_rows: number of held-out rows. None uses all of them.
    """
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


def base_model(context: Context, data: FineTuningData, dtype: torch.dtype) -> nn.Module:
    """Return the untrained model on the context's device. Each call returns the same weights.

    Raises:
        HyperionError: the weights are incomplete, or the tokenizer does not fit the model.
    """
    seed_everything(context.seed)
    vocabulary, device = data.tokenizer.vocab_size, context.device.torch_device
    model = load_llama(data.weights, vocab_size=vocabulary, dtype=dtype, device=device)
    require_vocabulary(vocabulary, model, where=data.weights)
    return model


def with_lora(base: nn.Module, seed: int) -> LlamaLM:
    """Return the base model with new LoRA adapters on the attention projections, with weights drawn from the seed."""
    seed_everything(seed)
    return LlamaLM(add_lora(base, RANK, ALPHA))


def frozen_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype in which the weights of a frozen base model are stored.

    It is the dtype of the computation. Frozen weights are never updated, so they need no float32 copy.
    """
    return torch.bfloat16 if precision.dtype == "bf16" else torch.float32


def fine_tuning_engine(
    context: Context, options: FineTuningOptions, model: nn.Module, precision: Precision, **engine_options: Any
) -> LanguageEngine:
    """Return a training engine with AdamW without weight decay.

    The learning rate first rises in a warm-up and then falls along a cosine. The options define the number of steps.
    """
    rate, steps = options.learning_rate, options.steps
    # The schedule is one step longer than the training, because the warm-up must be shorter than the schedule even if there is a
    # single step.
    schedule = WarmupCosine(rate, math.ceil(_WARMUP_SHARE * steps), steps + 1)
    optimizer = adamw(model, rate, weight_decay=0.0)
    return LanguageEngine(model, optimizer, schedule, precision, context.device, **engine_options)


@dataclass(frozen=True)
class TokenCounts:
    """Token counts of one batch of instruction rows.

    Attributes:
        positions: number of positions that the step computes, including padding.
        tokens: number of prompt and completion tokens.
        completion_tokens: number of tokens with a loss.
        length: mean number of tokens in a row.
    """

    positions: int
    tokens: int
    completion_tokens: int
    length: int


def count_tokens(batch: tuple[Tensor, Tensor]) -> TokenCounts:
    """Count the tokens of a batch (inputs, targets).

    The tokens of a row are counted up to the input whose target is the last one with a loss.
    """
    inputs, targets = (side.cpu() for side in batch)
    scored = targets >= 0  # targets without a loss are IGNORE_INDEX, which is negative
    last = torch.where(scored, torch.arange(targets.shape[1]), 0).max(dim=1).values
    tokens, completion = int((last + 1).sum()), int(scored.sum())
    return TokenCounts(inputs.numel(), tokens, completion, round(tokens / len(inputs)))


def shape_of(model: nn.Module) -> LlamaShape:
    """Return the shape of a transformers Llama model."""
    config = model.config
    return LlamaShape(**{field.name: getattr(config, field.name) for field in fields(LlamaShape)})


def state_bytes(shape: LlamaShape, method: str, dtype: str) -> int:
    """Return the bytes of the weights, gradients and AdamW moments at the end of the backward pass.

    A frozen base model is stored in the compute dtype. Trained weights are stored in float32, because a 16-bit format would round
    the small updates of fine-tuning to zero.

    Args:
        shape: shape of the model.
        method: LORA or FULL.
        dtype: number format of the computation.
    """
    frozen = 0 if method == FULL else llama_parameter_count(shape) * (2 if dtype == "bf16" else 4)
    return frozen + _TRAINED_BYTES * trained_parameters(shape, method)


def trained_parameters(shape: LlamaShape, method: str) -> int:
    """Return the number of parameters that the method (LORA or FULL) trains."""
    return llama_parameter_count(shape) if method == FULL else llama_lora_parameter_count(shape, RANK, ATTENTION)


def step_flops(shape: LlamaShape, method: str, length: int) -> ModelFlops:
    """Return the FLOPs per token of a training step, for rows of `length` tokens. `method` is LORA or FULL."""
    return llama_flops_per_token(shape, length, RANK, ATTENTION) if method == LORA else llama_flops_per_token(shape, length)


def least_flops(shape: LlamaShape, method: str, counts: TokenCounts) -> float:
    """Return the minimum FLOPs per token of a training step, which every implementation must compute.

    Attention is not counted. The head is counted only for tokens with a loss.
    """
    # With length 0, the FLOPs of attention are 0.
    whole = step_flops(shape, method, 0).forward_backward
    # The head has a product in the forward pass and one for the input gradient, with 2 FLOPs per weight each. Full fine-tuning
    # has a third product, for the weight gradient. LoRA freezes the head.
    head = 2 * shape.vocab_size * shape.hidden_size * (2 if method == LORA else 3)
    return whole - head * (1 - counts.completion_tokens / counts.tokens)


def load_base_and_adapter(context: Context, data: FineTuningData, path: Path, dtype: torch.dtype) -> LlamaLM:
    """Return a new base model with the adapters of a checkpoint.

    The model first gets adapters with other weights, which loading must replace. If loading had no effect, the logits would
    differ from the expected ones, and a test would fail.

    Raises:
        CheckpointError: the adapters were trained on another base.
    """
    fresh = with_lora(base_model(context, data, dtype), context.seed + 1)
    load_adapter(fresh, path, frozen_sha256(fresh))
    return fresh


def equality_row(
    context: Context,
    data: FineTuningData,
    variant: str,
    what: str,
    difference: float,
    check: str,
    tolerance: float,
    **params: Any,
) -> Row:
    """Return a row whose value is a relative difference and whose check fails above a tolerance.

    Args:
        context: context of the experiment.
        data: fine-tuning data, which name the model.
        variant: variant of the row.
        what: description of what was compared, for the params of the row.
        difference: value of the row.
        check: name of the check.
        tolerance: largest difference for which the check passes.
        params: additional params of the row.
    """
    return context.error_row(
        variant,
        "relative_difference",
        difference,
        check,
        tolerance,
        dtype="fp32",
        params={"model": data.model, "what": what, **params},
        data_source=data.rows.source,
    )


@torch.no_grad()
def probe_logits(model: nn.Module, data: FineTuningData, device: str) -> Tensor:
    """Return the float32 logits of the first held-out rows. The model is converted to float32 and stays in float32."""
    # Cut the rows to the length of the longest one. All later columns contain only padding.
    width = int(data.held_out.sizes[:_PROBE_ROWS].max())
    inputs = torch.from_numpy(data.held_out.inputs[:_PROBE_ROWS, :width]).long().to(device)
    return model.float().eval()(inputs)


def largest_difference(values: Tensor, expected: Tensor) -> float:
    """Return the relative difference: the largest absolute difference divided by the largest absolute expected value."""
    return float((values - expected).abs().max() / expected.abs().max())


def require_llama(model: str) -> None:
    """Check that training can start from a model, without loading it.

    A model of the Hugging Face Hub is checked only after its download.

    Args:
        model: name of a random configuration, path of a folder, or name of a model of the Hub.

    Raises:
        HyperionError: there is no random configuration with this name, or the folder is incomplete, contains an adapter instead
            of a model, or has a tokenizer that does not fit the model.
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
        raise HyperionError(
            f"{ADAPTER} cannot be read: {error!r}", where=folder, next_step=f"copy {ADAPTER} to this folder again"
        ) from error
    raise HyperionError(
        f"the folder has an adapter of rank {rank} and not a model; training needs full weights and adds adapters of rank {RANK}",
        where=folder,
        next_step=f"use the folder of the weights that the adapter was trained on{f' ({base})' if base else ''}",
    )
