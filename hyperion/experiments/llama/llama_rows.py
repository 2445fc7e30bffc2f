"""Bytes and FLOPs of a fine-tuning step, foretold from shapes, and the rows that hold measured memory and speed against them."""

from dataclasses import dataclass
from itertools import chain

import pandas as pd

from hyperion.chapter.context import Context
from hyperion.chapter.rows import sample_frame, timed_columns
from hyperion.measure import PeakMemoryRegion, TensorMemory, Timing, state_of
from hyperion.measure.memory_use.peak import GIB
from hyperion.models import LlamaShape, ModelFlops, llama_flops_per_token, llama_lora_parameter_count, llama_parameter_count
from hyperion.parallel.lora import ATTENTION
from hyperion.results import Row
from hyperion.training import LanguageEngine
from hyperion.workloads.llama_setup import RANK
from hyperion.workloads.training_rows import speed_rows

LORA, FULL = "LoRA", "full fine-tuning"
METHODS = (LORA, FULL)
_TRAINED_BYTES = 16  # of a parameter that AdamW trains: weight, gradient and two moments in float32


@dataclass(frozen=True)
class Work:
    """One batch of instruction rows.

    Attributes:
        positions: of the batch, padding included: what is computed.
        tokens: of prompts and completions: what is worth computing.
        completion_tokens: those that carry a loss.
        length: mean tokens of a row.
    """

    positions: int
    tokens: int
    completion_tokens: int
    length: int


def state_bytes(shape: LlamaShape, method: str, dtype: str) -> int:
    """Bytes that outlive a step, or are all there at the end of its backward pass: weights, gradients, moments.

    A frozen base is stored in the type it is computed in. Whatever is trained has float32 weights: in 16 bits the small
    updates of fine-tuning would be rounded away.
    """
    frozen = 0 if method == FULL else llama_parameter_count(shape) * (2 if dtype == "bf16" else 4)
    return frozen + _TRAINED_BYTES * trained_parameters(shape, method)


def step_bytes(shape: LlamaShape, method: str, dtype: str, positions: int) -> dict[str, int]:
    """What a step's peak is made of, by name: the larger of two moments.

    When the backward pass begins, the logits are there and the gradients not yet; when it ends, the gradients are and the
    logits no more. Activations of the decoder layers are left out: small at short rows.
    """
    whole, trained = state_bytes(shape, method, dtype), trained_parameters(shape, method)
    begins = {"weights and moments": whole - 4 * trained, "logits": logits_bytes(shape, dtype, positions)}
    if dtype == "bf16" and method == FULL:
        begins["16-bit copies of the weights"] = 2 * trained
    ends = {"weights, gradients and moments": whole}
    return max(begins, ends, key=lambda parts: sum(parts.values()))


def logits_bytes(shape: LlamaShape, dtype: str, positions: int) -> int:
    """Logits, their logarithms and a gradient: float32, beside 16-bit logits and gradients where the head computes so."""
    return positions * shape.vocab_size * (16 if dtype == "bf16" else 12)


def trained_parameters(shape: LlamaShape, method: str) -> int:
    """Parameters that the method trains."""
    return llama_parameter_count(shape) if method == FULL else llama_lora_parameter_count(shape, RANK, ATTENTION)


def step_flops(shape: LlamaShape, method: str, length: int) -> ModelFlops:
    """FLOPs of one token of a row of that length."""
    return llama_flops_per_token(shape, length, *((RANK, ATTENTION) if method == LORA else ()))


def least_flops(shape: LlamaShape, method: str, work: Work) -> float:
    """FLOPs per token that no implementation can avoid: no attention, and the head only where there is a loss."""
    whole = step_flops(shape, method, 0).forward_backward
    head = 2 * shape.vocab_size * shape.hidden_size * (2 if method == LORA else 3)
    return whole - head * (1 - work.completion_tokens / work.tokens)


def memory_rows(context: Context, engine: LanguageEngine, batch, shape: LlamaShape, method: str, shared: dict) -> list[Row]:
    """Peak of one step on a batch, the optimizer's moments being there: by a count of tensors, and on an accelerator by its
    allocator. On a CPU the resident memory of the process would say more of its past than of the step.

    Args:
        shared: dtype, params and data source of the rows.
    """
    engine.train_step(batch)
    with PeakMemoryRegion(engine.device) as region:
        engine.train_step(batch)
    alive = chain(*state_of(engine.model, engine.optimizer).values(), batch)
    with TensorMemory(engine.device, alive) as counted:
        engine.train_step(batch)
    bound = {
        "limit": state_bytes(shape, method, engine.precision.dtype) / GIB,
        "limit_source": "bytes of weights, gradients and moments, which all exist when the backward pass ends",
    }
    rows = [context.row(method, "tensor_memory_gib", counted.peak_bytes / GIB, **bound, **shared)]
    if engine.device.kind != "cpu":
        rows.append(context.row(method, region.peak.metric, region.peak.gib, **bound, **shared))
    return rows


def throughput_rows(
    context: Context, timing: Timing, work: Work, shape: LlamaShape, method: str, shared: dict
) -> tuple[list[Row], pd.DataFrame]:
    """Time, MFU and two throughputs of a steady step: of all tokens that are read, and of those that are learned from."""
    read = shared | {"params": shared["params"] | {"batch": work.tokens, "tokens": "prompt and completion"}}
    learned = shared | {"params": shared["params"] | {"batch": work.completion_tokens, "tokens": "completion"}}
    rows = speed_rows(
        context,
        method,
        "token",
        work.tokens,
        timing,
        step_flops(shape, method, work.length),
        least_flops(shape, method, work),
        read,
    )
    limit = next(row for row in rows if row.metric == "tokens_per_s")
    share = work.completion_tokens / work.tokens
    rate = timing.estimate.map(lambda seconds: work.completion_tokens / seconds)
    rows.append(
        context.row(
            method,
            "tokens_per_s",
            rate.value,
            limit=None if limit.limit is None else limit.limit * share,
            limit_source=limit.limit_source,
            **learned,
            **timed_columns(rate, timing),
        )
    )
    return rows, sample_frame(timing, method, shared["dtype"], read["params"]).assign(kind="steady step")
