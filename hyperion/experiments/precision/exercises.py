"""Self-marking exercise for the chapter on precision: write a training step with a loss scale."""

from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor, nn

from hyperion.chapter.exercises import Question, explains_errors

SMALLEST_GRADIENT = Question(2**-24 / 8192, "each skipped step halves the scale, and the smallest number of fp16 is 2**-24")
GB_OF_ADAMW = Question(7e9 * (4 + 8 + 4) / 1e9, "weights, two moments and gradients: four numbers of 4 bytes each")

Step = Callable[[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, Tensor], object]
CLIP_NORM = 1.0
_OVERFLOWS = 1e35  # a gradient of this size times the initial scale of 65536 overflows float32


@explains_errors
def judge_scaled_step(my_step: Step) -> pd.DataFrame:
    """Test a training step with a loss scale. Its gradients are chosen so that the correct update is known.

    Args:
        my_step: function that takes a model, an optimizer, a torch.amp.GradScaler and a loss. It computes the gradient, clips the
            unscaled gradient to norm 1 (`CLIP_NORM`), updates the weights and the scale, and clears the gradients.

    Returns:
        A table with one line per fault: whether the step is free of the fault, and what was observed.
    """
    (large, left), (small, _) = _one_step(my_step, 5.0), _one_step(my_step, 0.5)
    stayed, scales = _overflow(my_step)
    faults = {
        "a gradient of norm 5 is not clipped to 1": (_near(large, CLIP_NORM), f"moved by {large:.3g}"),
        "a gradient of norm 0.5 is changed": (_near(small, 0.5), f"moved by {small:.3g}"),
        "an overflow changes the weights": (stayed, "unchanged" if stayed else "changed"),
        "the scale is not halved after an overflow": (scales[1] == scales[0] / 2, f"{scales[0]:g}, then {scales[1]:g}"),
        "gradients are not cleared": (left == 0, f"norm {left:.3g} after the step"),
    }
    return pd.DataFrame([{"fault": name, "right": bool(free), "seen": seen} for name, (free, seen) in faults.items()])


def _one_step(my_step: Step, size: float) -> tuple[float, float]:
    """Run the reader's training step once with a gradient of norm `size`.

    Return (norm of the weight update, norm of the gradient after the step).
    """
    weights, optimizer, scaler, model = _one_layer()
    my_step(model, optimizer, scaler, (weights * torch.tensor([[0.6, 0.8]])).sum() * size)
    left = 0.0 if weights.grad is None else weights.grad.norm().item()
    return weights.detach().norm().item(), left


def _overflow(my_step: Step) -> tuple[bool, tuple[float, float]]:
    """Run the reader's training step once with a gradient that overflows after scaling.

    Return (True if the weights are unchanged, (scale before the step, scale after the step)).
    """
    weights, optimizer, scaler, model = _one_layer()
    scale = scaler.get_scale()
    my_step(model, optimizer, scaler, (weights * _OVERFLOWS).sum())
    return not weights.detach().any(), (scale, scaler.get_scale())


def _one_layer() -> tuple[Tensor, torch.optim.Optimizer, torch.amp.GradScaler, nn.Module]:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model.weight, torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu"), model


def _near(value: float, expected: float) -> bool:
    return abs(value - expected) <= 1e-3 * expected
