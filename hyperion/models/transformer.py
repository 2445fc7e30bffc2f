"""A minimal causal Transformer language model with GPT-2's architecture.

Shape suffixes: B batch, T positions of a sequence, D width, N heads, H width of a head (D = N * H), V vocabulary, M
tokens of a batch or of one chunk of it; L is the number of layers.

The model consists of token embeddings and learned position embeddings, L pre-norm blocks, a final LayerNorm, and a head
that shares the token embedding's weight. A block adds causal self-attention, then a GELU MLP, to the residual stream.
Dropout is at the same places as in GPT-2, with one exception: there is no dropout inside attention, so that fused attention
kernels can be used. `gpt2_124m` has GPT-2's 124,439,808 parameters and computes the same logits as `transformers.GPT2LMHeadModel`
(tested).
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hyperion.data.packing import IGNORE_INDEX
from hyperion.errors import HyperionError, require_number
from hyperion.kernels import block_gradients
from hyperion.kernels.token_loss import token_loss
from hyperion.models.layout import Layout, ModelFlops

# Maximum number of tokens whose logits are in memory at once, in training and in evaluation. In training these logits take 6.6 GB
# in bfloat16 at V = 50257. In evaluation nothing is recomputed, so smaller chunks take no additional time.
LOSS_CHUNK_TOKENS, EVALUATED_TOKENS = 65536, 16384


@dataclass(frozen=True)
class TransformerConfig:
    """Dimensions of a TransformerLM. The MLP has 4 D hidden features.

    Attributes:
        vocab_size: V.
        context: maximum sequence length in tokens.
        width: D.
        heads: N; the width must be a multiple of it.
        layers: L.
        dropout: dropout probability in training, for the embeddings and the outputs of attention and the MLP.
    """

    vocab_size: int
    context: int
    width: int
    heads: int
    layers: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "width", "heads", "layers"):
            require_number(name, getattr(self, name), "TransformerConfig", whole=True, at_least=1)
        require_number("dropout", self.dropout, "TransformerConfig", at_least=0, below=1)
        if self.width % self.heads:
            raise HyperionError(
                f"width {self.width} is not a multiple of heads {self.heads}",
                where="TransformerConfig",
                next_step="choose a width that is a multiple of heads",
            )

    @property
    def head_width(self) -> int:
        """H: features of one attention head."""
        return self.width // self.heads

    @property
    def parameter_count(self) -> int:
        """Number of parameters, D (V + T + 2) + L (12 D^2 + 13 D), where T is the context.

        The weight that the token embedding and the head share is counted once.
        """
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
    """Return the configuration with this name.

    Args:
        name: a name in NAMED_CONFIGS.
        changes: fields to replace, such as vocab_size=256.

    Raises:
        HyperionError: there is no configuration with this name.
    """
    if name not in NAMED_CONFIGS:
        raise HyperionError(
            f"no Transformer configuration is named {name!r}",
            where="hyperion/models/transformer.py",
            next_step=f"choose one of {', '.join(NAMED_CONFIGS)}",
        )
    return replace(NAMED_CONFIGS[name], **changes)


class TransformerLM(nn.Module):
    """Causal language model over token ids (see the module's docstring).

    Args:
        config: shape of the model.
        loss_chunk_tokens: maximum number of tokens whose training loss is computed at once. The loss of a larger batch is
            computed in chunks of this size, and the backward pass recomputes the logits of each chunk.
    """

    def __init__(self, config: TransformerConfig, loss_chunk_tokens: int = LOSS_CHUNK_TOKENS):
        super().__init__()
        self.config, self.loss_chunk_tokens = config, loss_chunk_tokens
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        blocks = (TransformerBlock(config.width, config.heads, config.dropout) for _ in range(config.layers))
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = LayerNorm(config.width)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Initialise as GPT-2 does: weights are normal with standard deviation 0.02, biases are zero.

        The outputs of 2 L layers are added to the residual stream. The weights of these layers have the standard deviation 0.02 /
        sqrt(2 L), so that the variance of the residual stream does not grow with depth.
        """
        blocks = [module for module in self.modules() if isinstance(module, TransformerBlock)]
        # Each block adds two terms to the residual stream, 2·L in total. Their variances add up.
        residual = {id(layer) for block in blocks for layer in (block.attention.output, block.mlp.down)}
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = 0.02 / math.sqrt(2 * self.config.layers) if id(module) in residual else 0.02
                module.weight.normal_(0.0, std)
            if isinstance(module, nn.Linear):
                module.bias.zero_()

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return the logits of the next token or, if targets are given, the negative log-likelihood of each target.

        Training and evaluation both call this method, so that the hooks of wrappers (DDP, FSDP) always run.

        Args:
            inputs_BT: int64 token ids, T <= context.
            targets_BT: int64 ids of the next tokens. Targets equal to IGNORE_INDEX are not scored.

        Returns:
            Without targets: logits_BTV in the dtype of the head. With targets: nll_BT in nats, in float32, and zero where
            the target is IGNORE_INDEX.

        Raises:
            HyperionError: the sequence is longer than the context.
        """
        T = inputs_BT.shape[1]
        if self.config.context < T:
            raise HyperionError(
                f"a sequence of {T} tokens is longer than the model's context of {self.config.context}",
                where="TransformerLM.forward",
                next_step="shorten the sequence or build the model with a longer context",
            )
        positions_T = torch.arange(T, device=inputs_BT.device)
        x_BTD = block_gradients.add_positions(self.token_embedding(inputs_BT), self.position_embedding(positions_T))
        x_BTD = _dropout(x_BTD, self.config.dropout, self.training)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        x_BTD = self.final_norm(x_BTD)
        if targets_BT is None:
            # The head has no weight of its own, as in GPT-2.
            return F.linear(x_BTD, self.token_embedding.weight)
        # Return a copy and not a view. FSDP2 puts hooks on the output, and a view would lose them if a caller modified it in
        # place.
        return self._nll(x_BTD.flatten(0, 1), targets_BT.flatten()).view_as(targets_BT).clone()

    def _nll(self, x_MD: Tensor, targets_M: Tensor) -> Tensor:
        """Return the negative log-likelihood per token in float32, computed chunk by chunk.

        In training with more than one chunk, the backward pass recomputes the logits of each chunk.
        """
        weight_VD = self.token_embedding.weight
        size = self.loss_chunk_tokens if torch.is_grad_enabled() else EVALUATED_TOKENS
        chunks = list(zip(x_MD.split(size), targets_M.split(size), strict=True))
        if len(chunks) == 1 or not torch.is_grad_enabled():
            # With one chunk, do not recompute, because a recomputation would need as much memory as the saved logits.
            return torch.cat([token_loss(x, weight_VD, targets) for x, targets in chunks])
        # preserve_rng_state=False: the loss uses no random numbers, and the state of a generator cannot be read during the
        # capture of a CUDA graph.
        return torch.cat(
            [
                checkpoint(token_loss, x, weight_VD, targets, use_reentrant=False, preserve_rng_state=False)
                for x, targets in chunks
            ]
        )

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean negative log-likelihood in nats (float32 scalar) over all targets that are not IGNORE_INDEX."""
        return self(inputs_BT, targets_BT).sum() / (targets_BT != IGNORE_INDEX).sum()

    def layout(self) -> Layout:
        """Return the names of the stem, the blocks and the head. The head uses the weight of the token embedding."""
        return Layout(
            stem=("token_embedding", "position_embedding"),
            blocks=tuple(f"blocks.{i}" for i in range(self.config.layers)),
            head=("final_norm",),
            tied=(("head", "token_embedding"),),
        )


def flops_per_token(config: TransformerConfig, sequence_length: int | None = None) -> ModelFlops:
    """Return the FLOPs per token for the given sequence length (default: the context).

    forward = L (24 D^2 + 4 T D) + 2 V D. The terms are the linear layers of the blocks, the two matrix products of attention,
    and the head. Attention is counted for all T x T pairs of positions, as in the appendix of the PaLM paper, although a
    causal kernel may skip half of them. For each matrix product (GEMM) of the forward pass the backward pass computes two.
    Norms, GELU, softmax and embedding lookups are not counted. The result equals torch's FlopCounterMode (tested).
    """
    D, T = config.width, sequence_length or config.context
    forward = config.layers * (24 * D * D + 4 * T * D) + 2 * config.vocab_size * D
    return ModelFlops(forward, 3 * forward)


class TransformerBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)), with dropout after attention and after the MLP.

    If the fused operations of hyperion.kernels.block_gradients are used, the block reads the weights of its layers directly.
    Hooks on these layers do not run then. Hooks on the block itself always run.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout
        self.attention_norm = LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads)
        self.mlp_norm = LayerNorm(width)
        self.mlp = FeedForward(width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        # The outputs of these two layers are added to the residual stream.
        last = self.attention.output, self.mlp.down
        # The backward kernel of the norm computes the gradient of a bias as a sum over tokens. With dropout, this sum is wrong.
        plain = all(type(layer) is nn.Linear for layer in last) and not (self.dropout and self.training)
        detached = plain and block_gradients.applies_to(x_BTD)
        x_BTD, normed_BTD = self.attention_norm.fork(x_BTD)
        x_BTD = x_BTD + _dropout(self.attention(normed_BTD, detached), self.dropout, self.training)
        # The backward pass of this norm computes the gradients of both biases. So the layers before and after the norm use them
        # detached.
        x_BTD, normed_BTD = self.mlp_norm.fork(x_BTD, *[layer.bias for layer in last if detached])
        return x_BTD + _dropout(self.mlp(normed_BTD, detached), self.dropout, self.training)


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which position t attends to positions 0..t only.

    Query, key and value are separate layers, and the number of heads follows from the width of their outputs. So tensor
    parallelism can give each rank a part of the heads.

    In compiled code the three layers are computed as one matrix product with concatenated weights, because one large product
    uses a GPU better than three small ones. Hooks on the three layers do not run then. Layers that were replaced (fp8, LoRA)
    stay separate.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor, detached_bias: bool = False) -> Tensor:
        """Return the attention output [B, T, D].

        Args:
            detached_bias: whether to detach the bias of the output layer, because `LayerNorm.fork` computes the gradient of this
                bias.
        """
        layers = self.query, self.key, self.value
        if torch.compiler.is_compiling() and all(type(layer) is nn.Linear for layer in layers):
            weight_ED, bias_E = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
            if block_gradients.applies_to(x_BTD):
                projected = block_gradients.joint_projection(x_BTD, weight_ED, bias_E)
            else:
                projected = F.linear(x_BTD, weight_ED, bias_E).chunk(3, -1)
        else:
            projected = (layer(x_BTD) for layer in layers)
        q_BNTH, k_BNTH, v_BNTH = (part_BTD.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part_BTD in projected)
        # Use is_causal instead of a mask tensor, because some fused kernels do not accept a mask.
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
        y_BTD = y_BNTH.transpose(1, 2).flatten(-2)
        return block_gradients.projection(y_BTD, self.output) if detached_bias else self.output(y_BTD)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm whose output has the dtype of the input, also under autocast (see block_gradients.layer_norm)."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return block_gradients.layer_norm(x_BTD, self)

    def fork(self, x_BTD: Tensor, *biases_D: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pair (x, LayerNorm(x)): x for the residual stream, and LayerNorm(x) for attention or the MLP.

        Args:
            x_BTD: residual stream before the norm.
            biases_D: no arguments, or two biases. The first one is the bias of the layer whose output was added to x before the
                norm. The second one is the bias of the layer whose output is added to x after the norm. The backward pass of this
                norm computes the gradients of both biases.
        """
        # The two layers use these biases detached, so the gradients of the biases are computed only here.
        if biases_D or block_gradients.applies_to(x_BTD):
            return block_gradients.forked_norm(x_BTD, self, *biases_D)
        return x_BTD, self(x_BTD)


class FeedForward(nn.Module):
    """MLP with GELU. D features are mapped to 4 D and back to D."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor, detached_bias: bool = False) -> Tensor:
        """Return the MLP output [B, T, D].

        Args:
            detached_bias: whether to detach the bias of the last layer, because `LayerNorm.fork` computes the gradient of this
                bias.
        """
        if type(self.up) is nn.Linear and block_gradients.applies_to(x_BTD):
            hidden_BTE = block_gradients.gelu_projection(x_BTD, self.up)
        else:
            hidden_BTE = block_gradients.gelu(self.up(x_BTD))
        return block_gradients.projection(hidden_BTE, self.down) if detached_bias else self.down(hidden_BTE)


def _dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    # Skip F.dropout for a probability of 0, because it draws random numbers even then.
    return F.dropout(x, probability) if probability and training else x
