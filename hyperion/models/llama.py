"""transformers' Llama (Touvron et al. 2023) with the interface of TransformerLM, and its random configurations by name.

Names of configurations with random weights start with `random_`: their losses say nothing about a pretrained Llama, but
their shapes, bytes and FLOPs are real.

Letters: L layers, D width, N heads, H = D / N width of a head, K key-value heads, F width of the MLP, V vocabulary,
T length of a sequence, r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.data.batches.packing import IGNORE_INDEX
from hyperion.errors import HyperionError
from hyperion.models.layout import Layout, ModelFlops

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

UNUSED_ROWS = 1024  # embeddings are often padded to a round number of rows; more unused rows mean another tokenizer


@dataclass(frozen=True)
class LlamaShape:
    """Fields of transformers' LlamaConfig that determine a Llama's parameters, bytes and FLOPs."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int = 0
    tie_word_embeddings: bool = False


RANDOM_LLAMAS = {
    "random_llama_d64_l2": LlamaShape(64, 2, 4, 2, 176),
    "random_llama_d512_l8": LlamaShape(512, 8, 8, 4, 1408),
    # The shape of TinyLlama-1.1B (Zhang et al. 2024): 1,100,048,384 parameters at its vocabulary of 32,000.
    "random_llama_1b": LlamaShape(2048, 22, 32, 4, 5632),
}


def random_llama_shape(name: str, vocab_size: int) -> LlamaShape:
    """Return the shape of a randomly initialised Llama. Does not need transformers.

    Raises:
        HyperionError: no configuration has that name, or vocab_size is below 1.
    """
    if name not in RANDOM_LLAMAS:
        raise HyperionError(
            f"no random Llama is named {name!r}",
            where="hyperion/models/llama.py",
            next_step=f"choose one of {', '.join(RANDOM_LLAMAS)}, or name a folder of real weights",
        )
    if vocab_size < 1:
        raise HyperionError(f"vocab_size is {vocab_size}", where=name, next_step="give the tokenizer's vocab_size")
    return replace(RANDOM_LLAMAS[name], vocab_size=vocab_size)


def random_llama_config(name: str, vocab_size: int) -> LlamaConfig:
    """Return the configuration of a randomly initialised Llama.

    Weights have a standard deviation of D^-0.5, so that a layer preserves the magnitude of its input. At small widths
    transformers' constant 0.02 gives logits so small that a frozen head cannot distinguish tokens.

    Raises:
        HyperionError: see random_llama_shape.
    """
    shape = random_llama_shape(name, vocab_size)
    from transformers import LlamaConfig

    return LlamaConfig(
        name_or_path=name,  # pyright: ignore[reportCallIssue] - an argument of its base class
        initializer_range=shape.hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        **asdict(shape),
    )


def build_random_llama(
    name: str, vocab_size: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> LlamaForCausalLM:
    """Return a Llama with random weights from torch's generator of the device; seed it first.

    Raises:
        HyperionError: see random_llama_shape.
    """
    from transformers import AutoModelForCausalLM

    config = random_llama_config(name, vocab_size)
    with torch.device(device):
        # Pass dtype instead of casting afterwards: the angles of the rotary embedding must stay float32.
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def require_vocabulary(tokenizer_size: int, model: LlamaForCausalLM, where: object = None) -> None:
    """Check that a tokenizer belongs to the model, before training on its ids.

    Args:
        tokenizer_size: the tokenizer's largest id + 1.
        where: named in the error.

    Raises:
        HyperionError: the embedding does not have config.vocab_size rows, an id is outside of it, or more rows are unused
            than padding explains.
    """
    embedding: Any = model.get_input_embeddings()
    rows, stated = embedding.weight.shape[0], model.config.vocab_size
    remedy = "use the tokenizer from the folder of the model's weights"
    if rows != stated:
        raise HyperionError(f"the embedding has {rows} rows, but the configuration says {stated}", where=where, next_step=remedy)
    if tokenizer_size > rows:
        raise HyperionError(
            f"the tokenizer's largest id is {tokenizer_size - 1}, but the model's embedding has {rows} rows",
            where=where,
            next_step=remedy,
        )
    if rows - tokenizer_size > UNUSED_ROWS:
        raise HyperionError(
            f"the tokenizer has {tokenizer_size} ids, but the embedding has {rows} rows: it was trained with another tokenizer",
            where=where,
            next_step=remedy,
        )


class LlamaLM(nn.Module):
    """A LlamaForCausalLM, or a peft model around one, with the interface of TransformerLM.

    Rows are padded on the right. With causal attention no token sees the padding after it, so no mask is needed, and the
    fast causal attention kernels apply.
    """

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return logits_BTV in the dtype of the model or, with targets, float32 nll_BT in nats, 0 for IGNORE_INDEX."""
        logits_BTV = self.lm(input_ids=inputs_BT, use_cache=False).logits
        if targets_BT is None:
            return logits_BTV
        nll = F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        return nll.view_as(targets_BT)

    def layout(self) -> Layout:
        """Return the names of the embedding, the decoder layers, the last norm and the head, also inside a peft model."""
        inside = "lm.base_model.model" if hasattr(self.lm, "peft_config") else "lm"
        config: Any = self.get_submodule(inside).config
        return Layout(
            stem=(f"{inside}.model.embed_tokens",),
            blocks=tuple(f"{inside}.model.layers.{i}" for i in range(config.num_hidden_layers)),
            head=(f"{inside}.model.norm", f"{inside}.lm_head"),
            tied=((f"{inside}.lm_head", f"{inside}.model.embed_tokens"),) if config.tie_word_embeddings else (),
        )


def layer_shapes(config: LlamaShape | LlamaConfig) -> dict[str, tuple[int, int]]:
    """Return (d_in, d_out) of the linear layers of one decoder layer, by name."""
    D, wide = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or D // config.num_attention_heads
    key_value_heads = config.num_key_value_heads or config.num_attention_heads
    queries, keys = config.num_attention_heads * head, key_value_heads * head
    return {
        "q_proj": (D, queries),
        "k_proj": (D, keys),
        "v_proj": (D, keys),
        "o_proj": (queries, D),
        "gate_proj": (D, wide),
        "up_proj": (D, wide),
        "down_proj": (wide, D),
    }


def llama_parameter_count(config: LlamaShape | LlamaConfig) -> int:
    """Return the parameters of the model: embedding, head (not counted if tied), L layers with two norms each, last norm."""
    D, L = config.hidden_size, config.num_hidden_layers
    matrices = config.vocab_size * D * (1 if config.tie_word_embeddings else 2)
    return matrices + L * (sum(d_in * d_out for d_in, d_out in layer_shapes(config).values()) + 2 * D) + D


def llama_lora_parameter_count(config: LlamaShape | LlamaConfig, rank: int, targets: Sequence[str]) -> int:
    """Return the trainable parameters of LoRA: L times the sum over target layers of r (d_in + d_out)."""
    shapes = layer_shapes(config)
    return config.num_hidden_layers * sum(rank * sum(shapes[target]) for target in targets)


def llama_flops_per_token(
    config: LlamaShape | LlamaConfig, sequence_length: int, lora_rank: int = 0, targets: Sequence[str] = ()
) -> ModelFlops:
    """Return the FLOPs per token at that sequence length, for full training or for LoRA on a frozen base.

    forward = 2 (L sum d_in d_out + V D) + 4 L T N H, plus 2 r (d_in + d_out) for each adapter. Attention is counted in full
    by convention. The backward pass computes two products for each one of the forward pass: the gradient of its input and
    that of its weight. A frozen matrix needs only the first; q, k and v of the first layer need neither, because nothing
    below them is trained. So a step of LoRA costs about two thirds of a full one. Equals torch's FlopCounterMode (tested) if
    q, k or v are among the targets.

    Args:
        lora_rank: 0 for full training.
        targets: names of the layers with adapters.
    """
    shapes, L = layer_shapes(config), config.num_hidden_layers
    linear = 2 * (L * sum(d_in * d_out for d_in, d_out in shapes.values()) + config.vocab_size * config.hidden_size)
    attention = 4 * L * sequence_length * shapes["o_proj"][0]
    if not lora_rank:
        forward = linear + attention
        return ModelFlops(forward, 3 * forward)
    adapters = 2 * llama_lora_parameter_count(config, lora_rank, targets)
    entry = ("q_proj", "k_proj", "v_proj")
    # Inputs of the first layer need no gradient, neither through its frozen q, k and v nor through their adapters' A.
    spared = sum(2 * shapes[name][0] * shapes[name][1] for name in entry)
    spared += sum(2 * lora_rank * shapes[name][0] for name in entry if name in targets)
    forward = linear + attention + adapters
    return ModelFlops(forward, forward + linear + 2 * (attention + adapters) - spared)
