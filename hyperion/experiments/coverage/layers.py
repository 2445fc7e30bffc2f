"""Layers that must work unmodified on every device: layers of PyTorch, and a custom layer with a custom gradient."""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from hyperion.experiments.coverage.rounding import Case


class SquaredReLU(torch.autograd.Function):
    """The function max(x, 0)² with a hand-written gradient, 2·max(x, 0)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp_min(0).square()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x.clamp_min(0) * grads[0]


class ScaledMLP(nn.Module):
    """A custom module: SquaredReLU between two matrix products, with its own parameter and buffer."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.register_buffer("shift", torch.linspace(-1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.down(SquaredReLU.apply(self.up(x))) + self.shift


@dataclass(frozen=True)
class Layer:
    """A layer to check, and a description of its input.

    Args:
        make: function that returns a new layer.
        shape: shape of the input.
        tokens: if not 0, the input consists of random integers below this number. Otherwise it consists of normal random numbers.
        copies: number of arguments of the layer. Each argument is the same input.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int = 0
    copies: int = 1


LAYERS = {
    "custom: ScaledMLP": Layer(lambda: ScaledMLP(16), (3, 5, 16)),
    "nn.Linear": Layer(lambda: nn.Linear(16, 12), (3, 5, 16)),
    "nn.Conv1d": Layer(lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "nn.Conv2d": Layer(lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), (2, 4, 9, 9)),
    "nn.ConvTranspose2d": Layer(lambda: nn.ConvTranspose2d(4, 3, 2, stride=2), (2, 4, 5, 5)),
    "nn.BatchNorm2d": Layer(lambda: nn.BatchNorm2d(4), (3, 4, 5, 5)),
    "nn.LayerNorm": Layer(lambda: nn.LayerNorm(16), (3, 5, 16)),
    "nn.RMSNorm": Layer(lambda: nn.RMSNorm(16), (3, 5, 16)),
    "nn.GroupNorm": Layer(lambda: nn.GroupNorm(2, 4), (3, 4, 5, 5)),
    "nn.Embedding": Layer(lambda: nn.Embedding(11, 16), (3, 7), tokens=11),
    "nn.LSTM": Layer(lambda: nn.LSTM(8, 12, batch_first=True), (2, 5, 8)),
    "nn.GRU": Layer(lambda: nn.GRU(8, 12, batch_first=True), (2, 5, 8)),
    "nn.MultiheadAttention": Layer(lambda: nn.MultiheadAttention(16, 4, batch_first=True), (2, 6, 16), copies=3),
    "nn.TransformerEncoderLayer": Layer(lambda: nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True), (2, 6, 16)),
}


def layer_case(name: str, device: torch.device, dtype: torch.dtype, seed: int) -> Case:
    """Return the call of a layer as a `Case`.

    The input, parameters and buffers are arguments of the call, so that the float64 reference can replace them.
    """
    layer, module = LAYERS[name], _module(name, device, dtype, seed)
    if layer.tokens:
        given = torch.randint(layer.tokens, layer.shape).to(device)
    else:
        given = torch.randn(layer.shape).to(device, dtype).requires_grad_()
    # `functional_call` writes to buffers, for example to running means. Copy them, so that each call starts from the same values.
    state = dict(module.named_parameters()) | {key: one.clone() for key, one in module.named_buffers()}

    def call(x: Tensor, state: dict[str, Tensor]) -> object:
        fresh = {key: one if one.requires_grad else one.clone() for key, one in state.items()}
        return torch.func.functional_call(module, fresh, (x,) * layer.copies)

    return Case(call, (given, state), {}, in_storage=bool(layer.tokens))


def round_trip(name: str, device: torch.device, seed: int) -> tuple[int, int]:
    """Save a layer's state dict, load it into a new layer on the same device, and compare tensors and outputs bit by bit.

    Returns:
        (number of tensors in the state dict, number of tensors and outputs that differ).
    """
    module, other = (_module(name, device, torch.float32, one) for one in (seed, seed + 1))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True, map_location=device))
    saved, loaded = module.state_dict(), other.state_dict()
    differing = sum(not torch.equal(saved[key], loaded[key]) for key in saved)
    case = layer_case(name, device, torch.float32, seed)
    with torch.no_grad():
        inputs = (case.args[0],) * LAYERS[name].copies
        pairs = zip(_tensors(copy.deepcopy(module)(*inputs)), _tensors(other(*inputs)), strict=True)
        differing += sum(not torch.equal(one, again) for one, again in pairs)
    return len(saved), differing


def _tensors(outputs: object) -> list[Tensor]:
    return [one for one in tree_flatten(outputs)[0] if isinstance(one, Tensor)]


def _module(name: str, device: torch.device, dtype: torch.dtype, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return LAYERS[name].make().to(device, dtype)
