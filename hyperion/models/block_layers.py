"""The layers of a Transformer block. Shape suffixes as in hyperion.models.transformer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.models import block_gradients
from hyperion.models.gelu import gelu


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which position t sees positions 0..t only.

    Query, key and value are separate layers and the number of heads is read from their output, as a column-parallel split
    over heads needs it. Compiled, they are one product, whose weights are put together on the fly, past the layers' hooks:
    one product with three times the columns keeps a GPU busier than three. Layers that were replaced, by fp8 or LoRA, stay
    three.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor, detached_bias: bool = False) -> Tensor:
        """Args: detached_bias: the bias of the layer that writes the result gets its gradient elsewhere."""
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
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
        y_BTD = y_BNTH.transpose(1, 2).flatten(-2)
        return block_gradients.projection(y_BTD, self.output) if detached_bias else self.output(y_BTD)


class LayerNorm(nn.LayerNorm):
    """LayerNorm that computes in float32, and reads and writes the type of its input, with weights rounded to that type.

    Under a GPU's autocast PyTorch's own reads and writes float32: its input is copied and kept in twice the bytes, and query,
    key and value layers would each convert its output, and keep that.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        weight, bias = self.weight.to(x_BTD.dtype), self.bias.to(x_BTD.dtype)
        # Compiled, the copies are fused with what reads and writes.
        if torch.compiler.is_compiling() or not _autocasts(x_BTD.device.type):
            return self._normalised(x_BTD, weight, bias).to(x_BTD.dtype)
        with torch.autocast(x_BTD.device.type, enabled=False):
            return self._normalised(x_BTD, weight, bias)

    def fork(self, x_BTD: Tensor, *biases_D: Tensor) -> tuple[Tensor, Tensor]:
        """x, to go on along the residual stream, and its norm for the branch.

        Args:
            biases_D: none, or those of the layers before and after whose gradients are to be made here.
        """
        # Biases that were given have no other place where their gradients are made.
        if biases_D or block_gradients.applies_to(x_BTD):
            return block_gradients.forked_norm(x_BTD, self, *biases_D)
        return x_BTD, self(x_BTD)

    def _normalised(self, x_BTD: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x_BTD, self.normalized_shape, weight, bias, self.eps)


class FeedForward(nn.Module):
    """D -> 4 D -> D with GELU."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor, detached_bias: bool = False) -> Tensor:
        """Args: detached_bias: the bias of the layer that writes the result gets its gradient elsewhere."""
        if type(self.up) is nn.Linear and block_gradients.applies_to(x_BTD):
            hidden_BTE = block_gradients.gelu_projection(x_BTD, self.up)
        else:
            hidden_BTE = gelu(self.up(x_BTD))
        return block_gradients.projection(hidden_BTE, self.down) if detached_bias else self.down(hidden_BTE)


def dropped(x: Tensor, share: float, training: bool) -> Tensor:
    """In training that share of the numbers is zero and the rest larger by as much. Without dropout nothing is drawn."""
    return F.dropout(x, share) if share and training else x


def autocasts_to_bf16(device: str) -> bool:
    """Whether products on this kind of device are made in bfloat16 just now. (float16 has not the range for sums.)"""
    return _autocasts(device) and torch.get_autocast_dtype(device) == torch.bfloat16


def _autocasts(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)
