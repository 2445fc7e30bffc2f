"""A minimalist causal Transformer language model: GPT-2's architecture.

Shape suffixes: B batch, T positions of a sequence, D width, N heads, H width of a head (D = N * H), V vocabulary, M
tokens of a batch or of one chunk of it; L is the number of layers.

Token and learned position embeddings, L pre-norm blocks (causal self-attention, then a GELU MLP, each added to the
residual stream), a last LayerNorm, and a head that shares the token embedding's weight. Dropout, where there is any, stands
where GPT-2 has it, except within attention: every kernel for that stays as fast as it is. With `gpt2_124m` it has GPT-2's
124,439,808 parameters and computes what `transformers.GPT2LMHeadModel` computes (a test compares their logits).
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hyperion.data.batches.packing import IGNORE_INDEX
from hyperion.errors import HyperionError, require_number
from hyperion.models import block_gradients
from hyperion.models.block_layers import CausalSelfAttention, FeedForward, LayerNorm, autocasts_to_bf16, dropped
from hyperion.models.layout import Layout, ModelFlops
from hyperion.models.token_loss import token_loss

# Logits exist for at most this many tokens at once: 6.6 GB in bfloat16 at V = 50257. Without gradients smaller pieces cost
# nothing.
LOSS_CHUNK_TOKENS, EVALUATED_TOKENS = 65536, 16384
# A loss draws nothing at random; a generator that is asked for its state cannot be part of a recorded step.
_RECOMPUTED = {"use_reentrant": False, "preserve_rng_state": False}


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a TransformerLM: `context` is the longest sequence in tokens, `width` is D; the MLP is 4 D wide. `dropout` is
    the share of numbers that training zeroes in the embeddings and in what each branch adds to the residual stream.
    """

    vocab_size: int
    context: int
    width: int
    heads: int
    layers: int
    dropout: float = 0.0

    def __post_init__(self):
        for name in ("vocab_size", "context", "width", "heads", "layers"):
            require_number(name, getattr(self, name), "TransformerConfig", whole=True, at_least=1)
        require_number("dropout", self.dropout, "TransformerConfig", at_least=0, below=1)
        if self.width % self.heads:
            raise HyperionError(
                f"width {self.width} is not a multiple of heads {self.heads}",
                where="TransformerConfig",
                next_step="choose a width that every head gets an equal part of",
            )

    @property
    def head_width(self) -> int:
        """H: features of one attention head."""
        return self.width // self.heads

    @property
    def parameter_count(self) -> int:
        """Parameters of the model, the tied head counted once: D (V + T + 2) + L (12 D^2 + 13 D)."""
        D = self.width
        return D * (self.vocab_size + self.context + 2) + self.layers * (12 * D * D + 13 * D)


NAMED_CONFIGS = {
    "lm_d64_h4_l2": TransformerConfig(vocab_size=50257, context=128, width=64, heads=4, layers=2),
    "lm_d64_h4_l12": TransformerConfig(vocab_size=50257, context=128, width=64, heads=4, layers=12),
    "lm_d128_h4_l2": TransformerConfig(vocab_size=50257, context=128, width=128, heads=4, layers=2),
    "lm_d256_h4_l2": TransformerConfig(vocab_size=50257, context=256, width=256, heads=4, layers=2),
    "lm_d512_h8_l6": TransformerConfig(vocab_size=50257, context=256, width=512, heads=8, layers=6),
    "lm_d768_h12_l4": TransformerConfig(vocab_size=50257, context=128, width=768, heads=12, layers=4),
    "gpt2_124m": TransformerConfig(vocab_size=50257, context=1024, width=768, heads=12, layers=12),
    "lm_d2048_h16_l18": TransformerConfig(vocab_size=50257, context=1024, width=2048, heads=16, layers=18),
}


def named_config(name: str, **changes: float) -> TransformerConfig:
    """The configuration of that name, with fields such as vocab_size or context changed.

    Raises:
        HyperionError: no configuration has that name.
    """
    if name not in NAMED_CONFIGS:
        raise HyperionError(
            f"no Transformer configuration is named {name!r}",
            where="hyperion/models/transformer.py",
            next_step=f"choose one of {', '.join(NAMED_CONFIGS)}",
        )
    return replace(NAMED_CONFIGS[name], **changes)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout of what is added.

    Compiled for a GPU under bfloat16 (hyperion.models.block_gradients), hooks of the layers within are passed by; the block's
    own are not.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout
        self.attention_norm = LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads)
        self.mlp_norm = LayerNorm(width)
        self.mlp = FeedForward(width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        last = self.attention.output, self.mlp.down
        # Dropout would come between a bias and the sum that the norm's kernel makes for it.
        plain = all(type(layer) is nn.Linear for layer in last) and not (self.dropout and self.training)
        detached = plain and block_gradients.applies_to(x_BTD)
        x_BTD, normed_BTD = self.attention_norm.fork(x_BTD)
        x_BTD = x_BTD + dropped(self.attention(normed_BTD, detached), self.dropout, self.training)
        x_BTD, normed_BTD = self.mlp_norm.fork(x_BTD, *[layer.bias for layer in last if detached])
        return x_BTD + dropped(self.mlp(normed_BTD, detached), self.dropout, self.training)


class TransformerLM(nn.Module):
    """Causal language model over token ids (see the module's docstring).

    Args:
        loss_chunk_tokens: the loss of more tokens is computed in chunks, whose logits are computed again in the backward
            pass.
    """

    def __init__(self, config: TransformerConfig, loss_chunk_tokens: int = LOSS_CHUNK_TOKENS):
        super().__init__()
        self.config, self.loss_chunk_tokens = config, loss_chunk_tokens
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        blocks = (Block(config.width, config.heads, config.dropout) for _ in range(config.layers))
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = LayerNorm(config.width)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """GPT-2's initialisation: normal(0, 0.02), biases zero.

        The 2 L layers that write to the residual stream get 0.02 / sqrt(2 L), so that its variance does not grow with
        depth.
        """
        residual = {id(layer) for block in self.blocks for layer in (block.attention.output, block.mlp.down)}
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = 0.02 / math.sqrt(2 * self.config.layers) if id(module) in residual else 0.02
                module.weight.normal_(0.0, std)
            if isinstance(module, nn.Linear):
                module.bias.zero_()

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits of the next token, or the negative log-likelihood of given targets.

        Args:
            inputs_BT: int64 token ids, T <= context.
            targets_BT: int64 ids of the tokens that follow; IGNORE_INDEX is not scored.

        Returns:
            logits_BTV in the precision of the head when there are no targets; else float32 nll_BT in nats, zero where
            the target is IGNORE_INDEX. Training and evaluation both pass through this one call, so that wrappers see
            every use.
        """
        T = inputs_BT.shape[1]
        if self.config.context < T:
            raise HyperionError(
                f"a sequence of {T} tokens is longer than the model's context of {self.config.context}",
                where="TransformerLM.forward",
                next_step="cut the sequence or build the model with a longer context",
            )
        positions_T = torch.arange(T, device=inputs_BT.device)
        x_BTD, positions_TD = self.token_embedding(inputs_BT), self.position_embedding(positions_T)
        half = autocasts_to_bf16(x_BTD.device.type)
        if half and block_gradients.applies_to(x_BTD, torch.float32):
            x_BTD = block_gradients.with_positions(x_BTD, positions_TD)
        else:
            x_BTD = x_BTD + positions_TD
            # The residual stream too: sums with float32 would be float32 all along, twice the bytes of every read.
            x_BTD = x_BTD.bfloat16() if half else x_BTD
        x_BTD = dropped(x_BTD, self.config.dropout, self.training)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        x_BTD = self.final_norm(x_BTD)
        if targets_BT is None:
            return F.linear(x_BTD, self.token_embedding.weight)
        # A tensor of its own: a caller may change it in place, and hooks on outputs (FSDP2's) stay with it.
        return self._nll(x_BTD.flatten(0, 1), targets_BT.flatten()).view_as(targets_BT).clone()

    def _nll(self, x_MD: Tensor, targets_M: Tensor) -> Tensor:
        """Negative log-likelihood per token in float32, chunk by chunk.

        More than one chunk in training recomputes each chunk's logits in the backward pass instead of keeping them.
        """
        weight_VD = self.token_embedding.weight
        size = self.loss_chunk_tokens if torch.is_grad_enabled() else EVALUATED_TOKENS
        chunks = list(zip(x_MD.split(size), targets_M.split(size), strict=True))
        if len(chunks) == 1 or not torch.is_grad_enabled():
            return torch.cat([token_loss(x, weight_VD, targets) for x, targets in chunks])
        return torch.cat([checkpoint(token_loss, x, weight_VD, targets, **_RECOMPUTED) for x, targets in chunks])

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean negative log-likelihood in nats over the targets that are not IGNORE_INDEX (float32 scalar)."""
        return self(inputs_BT, targets_BT).sum() / (targets_BT != IGNORE_INDEX).sum()

    def layout(self) -> Layout:
        """Names of the stem, the blocks and the head; the head's matrix is the token embedding's."""
        return Layout(
            stem=("token_embedding", "position_embedding"),
            blocks=tuple(f"blocks.{i}" for i in range(self.config.layers)),
            head=("final_norm",),
            tied=(("head", "token_embedding"),),
        )


def flops_per_token(config: TransformerConfig, sequence_length: int | None = None) -> ModelFlops:
    """FLOPs per token at that sequence length (default: the whole context).

    forward = L (24 D^2 + 4 T D) + 2 V D: the weights of the blocks, two T x T products per head (counted whole,
    as the field does, though a causal kernel may skip half), and the head. The backward pass forms two products for
    each one of the forward pass. Norms, GELU, softmax and lookups are not counted. Agrees with torch's FlopCounterMode
    (tested).
    """
    D, T = config.width, sequence_length or config.context
    forward = config.layers * (24 * D * D + 4 * T * D) + 2 * config.vocab_size * D
    return ModelFlops(forward, 3 * forward)
