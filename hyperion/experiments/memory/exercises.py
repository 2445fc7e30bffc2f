"""Exercises of the chapters on precision and memory that mark themselves: a step with a loss scale, a saving of memory."""

from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hyperion.hardware import detect_cpu
from hyperion.measure import TensorMemory

Step = Callable[[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, Tensor], object]
Saving = Callable[[nn.Module, nn.Module, Tensor], float]
CLIP_NORM = 1.0
_OVERFLOWS = 1e35  # times a scale of 65536 it is beyond float32
_BLOCKS, _WIDTH, _BATCH = 8, 32, 64


def judge_scaled_step(my_step: Step) -> pd.DataFrame:
    """Judge a training step with a loss scale, on gradients whose right effect is known.

    Args:
        my_step: takes model, optimizer, torch.amp.GradScaler and loss; does backward, clips the true gradient to norm 1
            (`CLIP_NORM`), updates the weights and the scale, and leaves no gradient behind.

    Returns:
        One line a fault: whether the step is free of it, and what was seen.
    """
    (large, left), (small, _) = _one_step(my_step, 5.0), _one_step(my_step, 0.5)
    stayed, scales = _overflow(my_step)
    faults = {
        "a gradient of norm 5 is not clipped to 1": (_near(large, CLIP_NORM), f"moved by {large:.3g}"),
        "a gradient of norm 0.5 is changed": (_near(small, 0.5), f"moved by {small:.3g}"),
        "an overflow changes the weights": (stayed, "they stayed" if stayed else "they changed"),
        "the scale stays after an overflow": (scales[1] == scales[0] / 2, f"{scales[0]:g}, then {scales[1]:g}"),
        "gradients are left behind": (left == 0, f"norm {left:.3g} after the step"),
    }
    return pd.DataFrame([{"fault": name, "right": bool(free), "seen": seen} for name, (free, seen) in faults.items()])


def judge_saving(my_saving: Saving) -> pd.DataFrame:
    """Judge a measurement of what activation checkpointing saves.

    Args:
        my_saving: takes a model, the same model checkpointed, and a batch; returns by how many bytes the fullest moment of
            forward and backward pass is lower in the second.

    Returns:
        One line a pair of models: what the measurement said, what is true, and whether it is within 5 %.
    """
    pairs = {"every block checkpointed": _BLOCKS, "every second block checkpointed": _BLOCKS // 2, "none checkpointed": 0}
    batch = torch.randn(_BATCH, _WIDTH)
    lines = []
    for name, checkpointed in pairs.items():
        plain, changed = _Deep(0), _Deep(checkpointed)
        said, true = (float(my_saving(plain, changed, batch)), _fullest(_Deep(0), batch) - _fullest(_Deep(checkpointed), batch))
        right = abs(said - true) <= 0.05 * abs(true)
        lines.append({"second model": name, "you measured": said, "true": true, "right": right})
    return pd.DataFrame(lines)


def _one_step(my_step: Step, size: float) -> tuple[float, float]:
    """How far a step moves the weights when the true gradient has this norm, and the norm of what is left of it."""
    weights, optimizer, scaler, model = _one_layer()
    my_step(model, optimizer, scaler, (weights * torch.tensor([[0.6, 0.8]])).sum() * size)
    left = 0.0 if weights.grad is None else weights.grad.norm().item()
    return weights.detach().norm().item(), left


def _overflow(my_step: Step) -> tuple[bool, tuple[float, float]]:
    """Whether the weights stay when a gradient overflows, and the scale before and after."""
    weights, optimizer, scaler, model = _one_layer()
    scale = scaler.get_scale()
    my_step(model, optimizer, scaler, (weights * _OVERFLOWS).sum())
    return not weights.detach().any(), (scale, scaler.get_scale())


def _one_layer() -> tuple[nn.Parameter, torch.optim.Optimizer, torch.amp.GradScaler, nn.Module]:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model.weight, torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu"), model


def _near(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= 1e-3 * wanted


class _Deep(nn.Module):
    """Eight blocks, of which `checkpointed` are checkpointed, spread evenly."""

    def __init__(self, checkpointed: int):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)) for _ in range(_BLOCKS)
        )
        self.checkpointed = {index * _BLOCKS // checkpointed for index in range(checkpointed)}

    def forward(self, x_BD: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x_BD = checkpoint(block, x_BD, use_reentrant=False) if index in self.checkpointed else block(x_BD)
        return x_BD


def _fullest(model: nn.Module, batch: Tensor) -> int:
    """Bytes of new tensors at the fullest moment of forward and backward."""
    with TensorMemory(detect_cpu()) as memory:
        model(batch).sum().backward()
    return memory.peak_bytes
