"""Twin trainings: how far apart two trainings end that differ in rounding alone, and the tolerance that follows from it.

A training that visits the same batches again and again is chaotic: two runs of it that round differently part, and after
some hundred steps their losses differ by percents although both are right. No fixed tolerance fits: it is a coin toss late
in the training, and blind early in it. So the scatter is measured. A twin is the baseline again, with the same weights and
batches, whose products have operands and results rounded to the grid of a number format that is scaled by a random factor
(`OtherRounding`). The format itself is one such grid. A variant computes the same training in that format if its loss lies
within the prediction interval of its twins.

The early steps, before the runs part, have a narrow interval: they show whether the variant computes the same. The late
steps have a wide one: they show whether it still learns as well.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from hyperion.results import Row

# Of one check, where twins scatter normally: a tenth of the 1 in 10,000 that is promised, since they need not.
FALSE_ALARM = 1e-5
TWINS = 8
# Trainings that visit each token once do not part. There the checks have fixed tolerances, far above the scatter of twins:
# measured on an H200 with the language model of 2.3, over 200 steps, 8 twins a format (standard deviations, relative).
SCATTER_BF16 = "twins of a language model scatter by 1e-4, so a false alarm is rarer than 1 in 1,000,000"
SCATTER_FP32 = "twins of a language model scatter by 1e-8, so a false alarm is rarer than 1 in 1,000,000"
# A format has a bias that other grids do not share: it rounds what all positions have in common (a norm's weights near 1, a
# logit of every unseen token) the same way. On an H200, GPT-2's losses in bf16 with all logits at once lie 9e-4 above those of
# fp32 in the first 25 steps, in each run alike, while its twins scatter by 3e-5. One unit of roundoff is allowed for it; what
# an 8-bit product gives is stored in bf16.
BIAS = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-8}
_LOSS_SPACING = 2.0**-23  # of losses, which are kept in float32
_PRODUCTS = frozenset(
    (
        F.linear,
        F.conv2d,
        torch.conv2d,
        torch.matmul,
        Tensor.matmul,
        Tensor.__matmul__,
        torch.mm,
        Tensor.mm,
        torch.bmm,
        Tensor.bmm,
        torch.baddbmm,
        torch.addmm,
        torch.einsum,
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,  # its own products are out of a mode's sight
    )
)


class OtherRounding(TorchFunctionMode):
    """Context in which operands and results of products, and their gradients, are rounded to the grid of a number format
    scaled by a random factor: ``round(x * c) / c``.

    The format itself is the grid with c = 1. Its errors are the same for equal values: a logit that many positions share is
    rounded the same way at all of them. So are those of a scaled grid, while independent random errors would average out.

    Args:
        dtype: fp32, bf16 or fp8, see `twin_format`.
        seed: draws c, uniform in [1, 2) on a logarithmic scale; weights, batches and dropout draw from other generators.
    """

    def __init__(self, dtype: str, seed: int):
        super().__init__()
        self._round = _ROUNDINGS[dtype]
        self._in_float64 = dtype == "fp32"  # a product with c in float32 has an error of its own, as large as that of fp32
        self.factor = float(2 ** np.random.default_rng(seed).random())

    def __torch_function__(self, function: Callable, types, args=(), kwargs=None):
        if function not in _PRODUCTS:
            return function(*args, **(kwargs or {}))
        rounded, named = tree_map(self._rounded, (args, kwargs or {}))
        return tree_map(self._rounded, function(*rounded, **named))

    def _rounded(self, value: object) -> object:
        return _Rounded.apply(value, self) if isinstance(value, Tensor) and value.is_floating_point() else value

    def rounded(self, tensor: Tensor, gradient: bool = False) -> Tensor:
        """Return `tensor` on the scaled grid, in its own dtype.

        Args:
            gradient: it is one: fp8 has another format for gradients.
        """
        wide = tensor.double() if self._in_float64 else tensor.float()
        return (self._round(wide * self.factor, gradient) / self.factor).to(tensor.dtype)


class _Rounded(torch.autograd.Function):
    """Round forward, and the gradient backward."""

    @staticmethod
    def forward(ctx, tensor: Tensor, rounding: OtherRounding) -> Tensor:
        ctx.rounding = rounding
        return rounding.rounded(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.rounding.rounded(gradient, gradient=True), None


def _to_fp8(scaled: Tensor, gradient: bool) -> Tensor:
    """Through fp8 with the tensor's largest number at the format's largest, as `hyperion.training.float8` scales."""
    dtype = torch.float8_e5m2 if gradient else torch.float8_e4m3fn
    # The factor of the grid must not cancel out: the scale is that of the number below the largest one, a power of two.
    largest = torch.finfo(dtype).max / 2 ** torch.ceil(torch.log2(scaled.abs().amax().clamp(min=1e-30)))
    return (scaled * largest).to(dtype).to(scaled.dtype) / largest


_ROUNDINGS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "fp32": lambda scaled, gradient: scaled.float().double(),
    "bf16": lambda scaled, gradient: scaled.bfloat16().float(),
    "fp8": _to_fp8,
}


def train_twins(dtype: str, seed: int, train: Callable[[], list[float]]) -> pd.DataFrame:
    """Train the baseline TWINS times with products rounded as coarsely as `dtype` rounds, each time to another grid.

    Args:
        dtype: format of the variants that are to be compared, see `twin_format`.
        seed: of the experiment.
        train: trains the baseline from the same weights over the same batches at each call; returns the loss of every step.

    Returns:
        Columns kind ("twin"), twin, dtype, step, loss.
    """
    frames = []
    for number in range(TWINS):
        with OtherRounding(dtype, seed * TWINS + number):
            losses = train()
        steps = range(1, len(losses) + 1)
        frames.append(pd.DataFrame({"kind": "twin", "twin": number, "dtype": dtype, "step": steps, "loss": losses}))
    return pd.concat(frames, ignore_index=True)


def twin_format(dtype: str) -> str:
    """Return the format whose twins a variant in `dtype` is compared with.

    The twins of bf16 serve tf32 and fp16, which are finer, as well: late in a chaotic training the scatter does not depend on
    the format, and early in it the coarser format allows a little more.
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
        bias: the part of it that is allowed for a bias of the format.
        twins: number of twins that the tolerance follows from.
    """

    window: str
    first: int
    last: int
    difference: float
    tolerance: float
    bias: float
    twins: int

    @property
    def check(self) -> str:
        """What is verified, for a row."""
        beyond = f", and {self.bias:.2g} for a bias of the format" if self.bias else ""
        return (
            f"mean loss of steps {self.first} to {self.last}: no further from the baseline's than {self.twins} twins of it "
            f"with other rounding allow (prediction interval, false alarm {FALSE_ALARM:g}{beyond})"
        )

    @property
    def params(self) -> dict:
        """What tells the row of this window from the other's."""
        return {"window": self.window, "first": self.first, "last": self.last}


def agreements(losses: np.ndarray, baseline: np.ndarray, twins: pd.DataFrame, bias: float = 0.0) -> list[Agreement]:
    """Compare a variant's losses with the baseline's, early and late in the training.

    Args:
        losses, baseline: loss of every step, over the same batches from the same weights.
        twins: of the baseline, as `train_twins` returns them, of one format. They come from the very code of the baseline:
            a baseline that computes something else than its twins would widen the tolerance.
        bias: relative difference that is allowed beyond the scatter; BIAS of the variant's format where that is not the
            baseline's.
    """
    curves = [curve["loss"].to_numpy() for _, curve in twins.groupby("twin")]
    return [
        Agreement(
            name,
            window.start + 1,
            window.stop,
            difference=abs(float(losses[window].mean() / baseline[window].mean()) - 1),
            tolerance=tolerance([float(curve[window].mean()) for curve in curves], float(baseline[window].mean())) + bias,
            bias=bias,
            twins=len(curves),
        )
        for name, window in windows(len(baseline)).items()
    ]


def difference_rows(row: Row, baseline: str, found: list[Agreement]) -> list[Row]:
    """Return a row of each window: how far a variant's losses lie from the baseline's, checked by the tolerance.

    Args:
        row: the variant's training loss, whose circumstances they share.
        baseline: what it was compared with, for the rows' params.
    """
    return [
        replace(
            row,
            metric="relative_difference",
            value=agreement.difference,
            limit_source="",
            params=row.params | {"of": "training_loss", "from": baseline} | agreement.params,
            check=agreement.check,
            check_error=agreement.difference,
            check_tolerance=agreement.tolerance,
        )
        for agreement in found
    ]


def windows(steps: int) -> dict[str, slice]:
    """Return the first eighth of the steps (at least 4), before the runs part, and the last quarter (at least 2)."""
    return {"early": slice(0, min(steps, max(4, steps // 8))), "late": slice(steps - min(steps, max(2, steps // 4)), steps)}


def tolerance(twins: list[float], baseline: float) -> float:
    """Return the largest relative difference from the baseline that rounding alone explains.

    With x the logarithms of the twins' mean losses over the baseline's, m of them, mean and standard deviation s: one more
    training with such rounding lies within ``mean ± t s sqrt(1 + 1/m)``, t the quantile of Student's distribution with
    m - 1 degrees of freedom, but for a share FALSE_ALARM of them. So its distance from the baseline is at most
    ``|mean| + t s sqrt(1 + 1/m)``; the losses are float32, whose spacing is added. A variant that rounds less than its
    twins (fewer operations, or a finer format) lies nearer still.

    Args:
        twins: mean losses of the twins, at least 2.
        baseline: mean loss of the baseline over the same steps.
    """
    from scipy import stats

    x = np.log(np.asarray(twins) / baseline)
    m = len(x)
    reach = stats.t.isf(FALSE_ALARM / 2, m - 1) * x.std(ddof=1) * math.sqrt(1 + 1 / m)
    return math.expm1(abs(x.mean()) + reach) + _LOSS_SPACING
