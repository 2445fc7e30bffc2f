"""transformers' Llama (Touvron et al. 2023) as this book's models are: by name, on a device, called with targets for a loss.

A configuration of random weights says so in its name: what it learns tells nothing about a Llama that was pretrained,
but its shapes, bytes and FLOPs are the real ones.

Letters: L layers, D width, N heads, H = D / N width of a head, K key-value heads, F width of the MLP, V vocabulary,
T length of a sequence, r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.data.batches.packing import IGNORE_INDEX
from hyperion.errors import HyperionError
from hyperion.models.layout import Layout, ModelFlops

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

UNUSED_ROWS = 1024  # embeddings are often padded to a round number of rows; more than this is another model's tokenizer


@dataclass(frozen=True)
class LlamaShape:
    """What decides a Llama's parameters, bytes and FLOPs, by the names that transformers' LlamaConfig has for it."""

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
    """Shape of a random-initialised Llama; transformers is not needed for it.

    Raises:
        HyperionError: no configuration has that name, or the vocabulary is empty.
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
    """Configuration of a random-initialised Llama.

    Weights are drawn with a standard deviation of D^-0.5, at which a layer keeps the size of what it is given; at small
    widths transformers' constant 0.02 leaves logits so small that a frozen head could not tell tokens apart.

    Raises:
        HyperionError: see random_llama_shape.
    """
    shape = random_llama_shape(name, vocab_size)
    from transformers import LlamaConfig

    return LlamaConfig(
        name_or_path=name,
        initializer_range=shape.hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        **asdict(shape),
    )


def build_random_llama(
    name: str, vocab_size: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> LlamaForCausalLM:
    """A Llama with weights drawn from torch's generator of the device: seed it before.

    Raises:
        HyperionError: see random_llama_shape.
    """
    from transformers import AutoModelForCausalLM

    config = random_llama_config(name, vocab_size)
    with torch.device(device):
        # dtype, and no cast afterwards: the angles of the rotary embedding stay float32.
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def require_vocabulary(tokenizer_size: int, model: LlamaForCausalLM, where: object = None) -> None:
    """Refuse a tokenizer that is not the model's, before anything is trained on its ids.

    Args:
        tokenizer_size: the tokenizer's largest id + 1.

    Raises:
        HyperionError: the embedding does not have config.vocab_size rows, an id lies outside of it, or more rows than a
            round number explains are never used.
    """
    rows, stated = model.get_input_embeddings().weight.shape[0], model.config.vocab_size
    remedy = "use the tokenizer that lies beside the model's weights"
    if rows != stated:
        raise HyperionError(f"the embedding has {rows} rows, the configuration states {stated}", where=where, next_step=remedy)
    if tokenizer_size > rows:
        raise HyperionError(
            f"the tokenizer's largest id is {tokenizer_size - 1}, the model's embedding has {rows} rows",
            where=where,
            next_step=remedy,
        )
    if rows - tokenizer_size > UNUSED_ROWS:
        raise HyperionError(
            f"the tokenizer has {tokenizer_size} ids, the model's embedding {rows} rows: it was trained with another one",
            where=where,
            next_step=remedy,
        )


class LlamaLM(nn.Module):
    """A LlamaForCausalLM, or a peft model around one, called as TransformerLM is: so that engine, evaluation and loaders
    of the book serve it too.

    Rows are padded on the right; causal attention keeps padding out of sight of every token before it, so no mask is
    needed, and the attention kernel may be the fast causal one.
    """

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """logits_BTV in the model's precision, or with targets float32 nll_BT in nats, 0 where a target is IGNORE_INDEX."""
        logits_BTV = self.lm(input_ids=inputs_BT, use_cache=False).logits
        if targets_BT is None:
            return logits_BTV
        nll = F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        return nll.view_as(targets_BT)

    def layout(self) -> Layout:
        """The embedding, the decoder layers, the last norm and the head, also inside a peft model."""
        inside = "lm.base_model.model" if hasattr(self.lm, "peft_config") else "lm"
        config = self.get_submodule(inside).config
        return Layout(
            stem=(f"{inside}.model.embed_tokens",),
            blocks=tuple(f"{inside}.model.layers.{i}" for i in range(config.num_hidden_layers)),
            head=(f"{inside}.model.norm", f"{inside}.lm_head"),
            tied=((f"{inside}.lm_head", f"{inside}.model.embed_tokens"),) if config.tie_word_embeddings else (),
        )


def layer_shapes(config: LlamaShape | LlamaConfig) -> dict[str, tuple[int, int]]:
    """(d_in, d_out) of the linear layers of one decoder layer by name."""
    D, wide = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or D // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
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
    """Parameters of the model: embedding, head (counted once when tied), L layers with two norms each, the last norm."""
    D, L = config.hidden_size, config.num_hidden_layers
    matrices = config.vocab_size * D * (1 if config.tie_word_embeddings else 2)
    return matrices + L * (sum(d_in * d_out for d_in, d_out in layer_shapes(config).values()) + 2 * D) + D


def llama_lora_parameter_count(config: LlamaShape | LlamaConfig, rank: int, targets: Sequence[str]) -> int:
    """Trainable parameters of LoRA: L times the sum over target layers of r (d_in + d_out)."""
    shapes = layer_shapes(config)
    return config.num_hidden_layers * sum(rank * sum(shapes[target]) for target in targets)


def llama_flops_per_token(
    config: LlamaShape | LlamaConfig, sequence_length: int, lora_rank: int = 0, targets: Sequence[str] = ()
) -> ModelFlops:
    """FLOPs per token at that sequence length, for all parameters trained or for LoRA on a frozen base.

    forward = 2 (L sum d_in d_out + V D) + 4 L T N H, plus 2 r (d_in + d_out) for each adapter. Attention is counted whole,
    as the field does. The backward pass forms two products for each one of the forward pass: the gradient of its input and
    that of its weight. Of a frozen matrix only the first is needed, and not even that one in the first layer's q, k and v,
    below which nothing is trained. So LoRA's step costs about two thirds of a full one. Agrees with torch's
    FlopCounterMode (tested) where q, k or v are among the targets.

    Args:
        lora_rank: 0 for training all parameters.
    """
    shapes, L = layer_shapes(config), config.num_hidden_layers
    linear = 2 * (L * sum(d_in * d_out for d_in, d_out in shapes.values()) + config.vocab_size * config.hidden_size)
    attention = 4 * L * sequence_length * shapes["o_proj"][0]
    if not lora_rank:
        forward = linear + attention
        return ModelFlops(forward, 3 * forward)
    adapters = 2 * llama_lora_parameter_count(config, lora_rank, targets)
    entry = ("q_proj", "k_proj", "v_proj")
    # The first layer's inputs need no gradient: neither through its frozen q, k and v nor through their adapters' A.
    spared = sum(2 * shapes[name][0] * shapes[name][1] for name in entry)
    spared += sum(2 * lora_rank * shapes[name][0] for name in entry if name in targets)
    forward = linear + attention + adapters
    return ModelFlops(forward, forward + linear + 2 * (attention + adapters) - spared)
