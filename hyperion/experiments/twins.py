"""Twin trainings: how far apart two trainings end that differ in rounding alone, and the tolerance that follows from it.

A training that visits the same batches again and again is chaotic: two runs of it that round differently part, and after
some hundred steps their losses differ by percents although both are right. No fixed tolerance fits: it is a coin toss late
in the training, and blind early in it. So the scatter is measured. A twin is the baseline again, with the same weights and
batches, whose products have operands and results perturbed at random by up to one spacing of a number format (`RandomRounding`).
A variant computes the same training in that format if its loss lies within the prediction interval of its twins.

The early steps, before the runs part, have a narrow interval: they show whether the variant computes the same. The late
steps have a wide one: they show whether it still learns as well.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Of one check, where twins scatter normally. A tenth of the 1 in 10,000 that is promised: a variant's own rounding may
# shift it by some standard deviations, which its twins, each with other rounding, do not share.
FALSE_ALARM = 1e-5
TWINS = 8
# Trainings that visit each token once do not part. There the checks have fixed tolerances, far above the scatter of twins:
# measured on an H200 with the language model of 2.3, over 200 steps, 8 twins a format (standard deviations, relative).
SCATTER_BF16 = "twins of a language model scatter by 1e-4, so a false alarm is rarer than 1 in 1,000,000"
SCATTER_FP32 = "twins of a language model scatter by 1e-8, so a false alarm is rarer than 1 in 1,000,000"
# Spacing of the numbers just above 1: 2 ** -(bits of the stored mantissa).
SPACING = {"fp32": 2.0**-23, "tf32": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-7, "fp8": 2.0**-3}
_PRODUCTS = frozenset(
    (
        F.linear,
        F.conv2d,
        torch.conv2d,
        torch.matmul,
        Tensor.matmul,
        Tensor.__matmul__,
        torch.bmm,
        F.scaled_dot_product_attention,
    )
)


class RandomRounding(TorchFunctionMode):
    """Context in which products round at random: operands, results and their gradients are multiplied by 1 + spacing * r,
    r uniform in [-1, 1].

    A parameter gets the same r at every step, as a format rounds a value that hardly changes the same way each time; all
    else gets a fresh one.

    Args:
        spacing: relative size of the perturbation, see SPACING.
        seed: of the perturbations; weights, batches and dropout draw from other generators.
    """

    def __init__(self, spacing: float, seed: int):
        super().__init__()
        self.spacing, self.seed = spacing, seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._of_parameters: dict[int, Tensor] = {}

    def __torch_function__(self, function: Callable, types, args=(), kwargs=None):
        if function not in _PRODUCTS:
            return function(*args, **(kwargs or {}))
        rounded = [self.rounded(arg) for arg in args]
        return self.rounded(function(*rounded, **{name: self.rounded(arg) for name, arg in (kwargs or {}).items()}))

    def rounded(self, value: object) -> object:
        """Return a tensor of floating-point numbers perturbed, anything else as it is."""
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        return _Perturbed.apply(value, self)

    def factor(self, tensor: Tensor) -> Tensor:
        """Return 1 + spacing * r for each element of `tensor`."""
        generator = self._generators.get(tensor.device)
        if generator is None:
            generator = torch.Generator(tensor.device).manual_seed(self.seed)
            self._generators[tensor.device] = generator
        drawn = torch.empty(tensor.shape, device=tensor.device)  # float32: 1 + r * 2 ** -10 has no neighbour in bf16
        return drawn.uniform_(-self.spacing, self.spacing, generator=generator).add_(1.0)

    def factor_of_parameter(self, parameter: Tensor) -> Tensor:
        """Return the same factors at every call; the storage tells which parameter it is."""
        key = parameter.data_ptr()
        if key not in self._of_parameters:
            self._of_parameters[key] = self.factor(parameter)
        return self._of_parameters[key]


class _Perturbed(torch.autograd.Function):
    """Multiply by a random factor, the gradient by another one; nothing is saved for the backward pass."""

    @staticmethod
    def forward(ctx, tensor: Tensor, rounding: RandomRounding) -> Tensor:
        ctx.rounding = rounding
        factor = (
            rounding.factor_of_parameter(tensor) if isinstance(tensor, torch.nn.Parameter) else rounding.factor(tensor)
        )
        return (tensor * factor).to(tensor.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient * ctx.rounding.factor(gradient)).to(gradient.dtype), None


def train_twins(dtype: str, seed: int, train: Callable[[], list[float]]) -> pd.DataFrame:
    """Train the baseline TWINS times with products rounded at random as coarsely as `dtype` rounds.

    Args:
        dtype: format of the variants that are to be compared, see `twin_format`.
        seed: of the experiment.
        train: trains the baseline from the same weights over the same batches at each call; returns the loss of every step.

    Returns:
        Columns kind ("twin"), twin, dtype, step, loss.
    """
    frames = []
    for number in range(TWINS):
        with RandomRounding(SPACING[dtype], seed * TWINS + number):
            losses = train()
        steps = range(1, len(losses) + 1)
        frames.append(pd.DataFrame({"kind": "twin", "twin": number, "dtype": dtype, "step": steps, "loss": losses}))
    return pd.concat(frames, ignore_index=True)


def twin_format(dtype: str) -> str:
    """Return the format whose twins a variant in `dtype` is compared with.

    The twins of bf16 serve tf32 and fp16 as well: late in a chaotic training the scatter does not depend on the format,
    and early in it the coarser format allows a little more.
    """
    return dtype if dtype in ("fp32", "fp8") else "bf16"


@dataclass(frozen=True)
class Agreement:
    """How far the losses of a variant lie from the baseline's in a window of the steps, and how far they may.

    Attributes:
        window: "early" or "late".
        first, last: steps of the window, from 1.
        difference: |mean loss of the variant / mean loss of the baseline - 1|.
        tolerance: largest difference of a variant that differs from its twins in rounding alone.
        twins: number of twins that the tolerance follows from.
    """

    window: str
    first: int
    last: int
    difference: float
    tolerance: float
    twins: int

    @property
    def check(self) -> str:
        """What is verified, for a row."""
        return (
            f"mean loss of steps {self.first} to {self.last}: no further from the baseline's than {self.twins} twins of it "
            f"with other rounding allow (prediction interval, false alarm {FALSE_ALARM:g})"
        )

    @property
    def params(self) -> dict:
        """What tells the row of this window from the other's."""
        return {"window": self.window, "first": self.first, "last": self.last}


def agreements(losses: np.ndarray, baseline: np.ndarray, twins: pd.DataFrame) -> list[Agreement]:
    """Compare a variant's losses with the baseline's, early and late in the training.

    Args:
        losses, baseline: loss of every step, over the same batches from the same weights.
        twins: of the baseline, as `train_twins` returns them, of one format. They come from the very code of the baseline:
            a baseline that computes something else than its twins would widen the tolerance.
    """
    curves = [curve["loss"].to_numpy() for _, curve in twins.groupby("twin")]
    return [
        Agreement(
            name, window.start + 1, window.stop,
            difference=abs(float(losses[window].mean() / baseline[window].mean()) - 1),
            tolerance=tolerance([float(curve[window].mean()) for curve in curves], float(baseline[window].mean())),
            twins=len(curves),
        )
        for name, window in windows(len(baseline)).items()
    ]  # fmt: skip


def windows(steps: int) -> dict[str, slice]:
    """Return the first eighth of the steps (at least 4), before the runs part, and the last quarter (at least 2)."""
    return {
        "early": slice(0, min(steps, max(4, steps // 8))),
        "late": slice(steps - min(steps, max(2, steps // 4)), steps),
    }


def tolerance(twins: list[float], baseline: float) -> float:
    """Return the largest relative difference from the baseline that rounding alone explains.

    With x the logarithms of the twins' mean losses over the baseline's, m of them, mean and standard deviation s: one more
    training with such rounding lies within ``mean ± t s sqrt(1 + 1/m)``, t the quantile of Student's distribution with
    m - 1 degrees of freedom, but for a share FALSE_ALARM of them. So its distance from the baseline is at most
    ``|mean| + t s sqrt(1 + 1/m)``; the losses are float32, whose spacing is added. Twins round everywhere by up to one
    spacing, and a format by half of one: the true share is smaller.

    Args:
        twins: mean losses of the twins, at least 2.
        baseline: mean loss of the baseline over the same steps.
    """
    from scipy import stats

    x = np.log(np.asarray(twins) / baseline)
    m = len(x)
    reach = stats.t.isf(FALSE_ALARM / 2, m - 1) * x.std(ddof=1) * math.sqrt(1 + 1 / m)
    return math.expm1(abs(x.mean()) + reach) + SPACING["fp32"]
