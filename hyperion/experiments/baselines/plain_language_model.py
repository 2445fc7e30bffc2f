"""GPT-2's shape trained as public scripts do it on a GPU, written down plainly: what our training path is compared with.

Shape suffixes as in hyperion.models.transformer; P is the vocabulary filled up to whole multiples of 64, whose rows are
aligned for matrix units. The classes above V are scored like all others and never right.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.hardware import Device
from hyperion.models import TransformerConfig, TransformerLM
from hyperion.training import Precision, adamw

_ALIGNMENT = 64


def filled_up(classes: int) -> int:
    """P: the least multiple of 64 that is not below V."""
    return -(-classes // _ALIGNMENT) * _ALIGNMENT


class PlainBlock(nn.Module):
    """Attention with one product for query, key and value, then the MLP, each behind its norm and added."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = (
            part.view(B, T, self.heads, D // self.heads).transpose(1, 2) for part in self.qkv(self.norm_1(x_BTD)).split(D, dim=2)
        )
        y_BNTH = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.projection(y_BNTH.transpose(1, 2).contiguous().view(B, T, D))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD)), approximate="tanh"))


class PlainTransformer(nn.Module):
    """Logits of a GPT-2 over P classes, its head tied to the token embedding."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.classes = filled_up(config.vocab_size)
        self.tokens = nn.Embedding(self.classes, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(PlainBlock(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, self.classes, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """logits_BTP, or the mean negative log-likelihood of given targets in nats."""
        positions_T = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)
        x_BTD = self.tokens(inputs_BT) + self.positions(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTP = self.head(self.norm(x_BTD))
        if targets_BT is None:
            return logits_BTP
        return F.cross_entropy(logits_BTP.view(-1, self.classes), targets_BT.reshape(-1))


@torch.no_grad()
def with_weights_of(source: TransformerLM) -> PlainTransformer:
    """A plain model that computes what `source` computes, on its device and in its number format; rows of the embedding
    above V are zero."""
    weight = source.token_embedding.weight
    with torch.device(weight.device):
        plain = PlainTransformer(source.config).to(weight.dtype)
    plain.tokens.weight.zero_()[: len(weight)] = weight
    pairs = [(plain.positions, source.position_embedding), (plain.norm, source.final_norm)]
    for block, theirs in zip(plain.blocks, source.blocks, strict=True):
        attention = theirs.attention
        pairs += [
            (block.norm_1, theirs.attention_norm),
            (block.norm_2, theirs.mlp_norm),
            (block.projection, attention.output),
            (block.up, theirs.mlp.up),
            (block.down, theirs.mlp.down),
        ]
        for name in ("weight", "bias"):
            parts = [getattr(layer, name) for layer in (attention.query, attention.key, attention.value)]
            getattr(block.qkv, name).copy_(torch.cat(parts))
    for layer, other in pairs:
        layer.load_state_dict(other.state_dict())
    return plain


class PlainTraining:
    """Autocast, torch.compile of the whole model, fused AdamW, gradients clipped to a norm of 1; no loss is read.

    Args:
        model: on the device.
        schedule: learning rate of a step counted from 1.
    """

    def __init__(
        self, model: PlainTransformer, schedule: Callable[[int], float], precision: Precision, device: Device, compiled: bool
    ):
        self.model, self.schedule, self.precision, self.device = model.train(), schedule, precision, device
        self.forward = torch.compile(model) if compiled else model
        self.optimizer = adamw(model, schedule(1))
        self.steps = 0

    def train_on(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """One optimizer step; the loss before it."""
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(self.steps)
        with self.precision.autocast(self.device):
            loss = self.forward(inputs_BT, targets_BT)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()
