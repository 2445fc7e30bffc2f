"""Twin trainings: measure how far trainings that differ in rounding alone diverge, and derive the tolerance of a comparison.

A training that visits the same batches again and again is chaotic: two correct runs that round differently diverge, and after
some hundred steps their losses differ by percents. No fixed tolerance fits: it raises false alarms late in the training and
misses faults early in it. So this module measures the scatter. A twin is the baseline with the same weights and batches,
whose matrix products round operands and results to the grid of a number format scaled by a random factor (`OtherRounding`);
the format itself is one such grid. A variant computes the same training in that format if its loss lies within the
prediction interval of its twins.

Early steps, before the runs diverge, have a narrow interval: they show whether the variant computes the same. Late steps have
a wide one: they show whether it still learns as well. `captured_parity` applies this to steps that are replayed as one graph.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from hyperion.chapter.context import Context
from hyperion.results import Row
from hyperion.training import TorchEngine, seed_everything

# False-alarm rate of one check if twins scatter normally. It is a tenth of the 1 in 10,000 that the book promises, because
# their distribution may have heavier tails.
FALSE_ALARM = 1e-5
TWINS = 8
# Trainings that visit each token once do not diverge. Their checks have fixed tolerances, far above the scatter of twins,
# which was measured on an H200 with the language model of chapter 2.3: 200 steps, 8 twins a format, relative deviations.
SCATTER_BF16 = "twins of a language model scatter by 1e-4, so a false alarm is rarer than 1 in 1,000,000"
SCATTER_FP32 = "twins of a language model scatter by 1e-8, so a false alarm is rarer than 1 in 1,000,000"
# A format has a bias that its scaled grids do not have: it rounds values that all positions share (norm weights near 1, the
# logit of every unseen token) the same way. On an H200, GPT-2's losses in bf16 with all logits at once are 9e-4 above those of
# fp32 in the first 25 steps of every run, while its twins scatter by 3e-5. The tolerance allows one unit of roundoff for it.
# Results of fp8 products are stored in bf16.
BIAS = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-8}
REPLAYED, ONE_BY_ONE = "replayed as one graph", "one by one"
STEPS, WINDOWS = 200, 10
# For trainings whose twins do not diverge: a hundred times their scatter.
TOLERANCE = 0.01
_LOSS_SPACING = 2.0**-23  # spacing of float32, the format of the stored losses
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
        F.multi_head_attention_forward,  # a mode does not see the products inside it
    )
)


class OtherRounding(TorchFunctionMode):
    """Context that rounds operands and results of matrix products, and their gradients, to a scaled grid of a number format:
    ``round(x * c) / c`` with a random factor c.

    The format itself is the grid with c = 1. Like the format, a scaled grid makes the same error for equal values, such as a
    logit that many positions share. Independent random errors would average out.

    Args:
        dtype: fp32, bf16 or fp8, see `twin_format`.
        seed: seed of c, which is uniform in [1, 2) on a logarithmic scale. Weights, batches and dropout use other generators.
    """

    def __init__(self, dtype: str, seed: int):
        super().__init__()
        self._round = _ROUNDINGS[dtype]
        self._in_float64 = dtype == "fp32"  # in float32 the multiplication by c would round as coarsely as the format
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
            gradient: whether the tensor is a gradient; fp8 has another format for those.
        """
        wide = tensor.double() if self._in_float64 else tensor.float()
        return (self._round(wide * self.factor, gradient) / self.factor).to(tensor.dtype)


class _Rounded(torch.autograd.Function):
    """Round in the forward pass, and the gradient in the backward pass."""

    @staticmethod
    def forward(ctx, tensor: Tensor, rounding: OtherRounding) -> Tensor:
        ctx.rounding = rounding
        return rounding.rounded(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.rounding.rounded(gradient, gradient=True), None


def _to_fp8(scaled: Tensor, gradient: bool) -> Tensor:
    """Convert to fp8 and back, with the tensor scaled to the format's range as in `hyperion.training.float8`."""
    dtype = torch.float8_e5m2 if gradient else torch.float8_e4m3fn
    # A power of two: a scale by the largest number itself would cancel the factor of the grid.
    largest = torch.finfo(dtype).max / 2 ** torch.ceil(torch.log2(scaled.abs().amax().clamp(min=1e-30)))
    return (scaled * largest).to(dtype).to(scaled.dtype) / largest


_ROUNDINGS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "fp32": lambda scaled, gradient: scaled.float().double(),
    "bf16": lambda scaled, gradient: scaled.bfloat16().float(),
    "fp8": _to_fp8,
}


def train_twins(dtype: str, seed: int, train: Callable[[], list[float]]) -> pd.DataFrame:
    """Train the baseline TWINS times, each time with products rounded to another scaled grid of `dtype`.

    Args:
        dtype: format of the variants to compare, see `twin_format`.
        seed: seed of the experiment.
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
    """Return the format of the twins for a variant in `dtype`.

    The twins of bf16 also serve the finer formats TF32 and fp16: late in a chaotic training the scatter does not depend on
    the format, and early in it the coarser format allows only a little more.
    """
    return dtype if dtype in ("fp32", "fp8") else "bf16"


@dataclass(frozen=True)
class Agreement:
    """Difference between the losses of a variant and of the baseline in a window of the steps, with its tolerance.

    Attributes:
        window: "early" or "late".
        first, last: first and last step of the window, counted from 1.
        difference: |mean loss of the variant / mean loss of the baseline - 1|.
        tolerance: largest difference that rounding alone explains, bias included.
        bias: part of the tolerance for a bias of the format.
        twins: number of twins behind the tolerance.
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
        """Name of the check, for a row."""
        beyond = f", and {self.bias:.2g} for a bias of the format" if self.bias else ""
        return (
            f"mean loss of steps {self.first} to {self.last}: no further from the baseline's than {self.twins} twins of it "
            f"with other rounding allow (prediction interval, false alarm {FALSE_ALARM:g}{beyond})"
        )

    @property
    def params(self) -> dict:
        """Parameters of the window's row."""
        return {"window": self.window, "first": self.first, "last": self.last}


def agreements(losses: np.ndarray, baseline: np.ndarray, twins: pd.DataFrame, bias: float = 0.0) -> list[Agreement]:
    """Compare a variant's losses with the baseline's, early and late in the training.

    Args:
        losses, baseline: loss of every step, from the same weights over the same batches.
        twins: twins of the baseline in one format, from `train_twins`. They must run the code of the baseline: twins of other
            code would widen the tolerance.
        bias: relative difference to allow beyond the scatter: BIAS of the variant's format if the baseline has another one.
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


def difference_rows(row: Row, baseline: str, windows_compared: list[Agreement]) -> list[Row]:
    """Return a row per window with the difference between a variant's and the baseline's losses, checked by the tolerance.

    Args:
        row: training loss of the variant, from which the rows take their other columns.
        baseline: name of the baseline, for the rows' params.
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
        for agreement in windows_compared
    ]


def windows(steps: int) -> dict[str, slice]:
    """Return the first eighth of the steps (at least 4), before runs diverge, and the last quarter (at least 2)."""
    return {"early": slice(0, min(steps, max(4, steps // 8))), "late": slice(steps - min(steps, max(2, steps // 4)), steps)}


def tolerance(twins: list[float], baseline: float) -> float:
    """Return the largest relative difference from the baseline that rounding alone explains.

    Let x be the m logarithms of the twins' mean losses over the baseline's, with mean and standard deviation s. With
    probability 1 - FALSE_ALARM, another training with such rounding lies within ``mean ± t s sqrt(1 + 1/m)``, where t is a
    quantile of Student's distribution with m - 1 degrees of freedom. So its distance from the baseline is at most
    ``|mean| + t s sqrt(1 + 1/m)``, plus the spacing of float32 losses. A variant that rounds less than its twins (fewer
    operations or a finer format) lies nearer.

    Args:
        twins: mean losses of the twins, at least 2.
        baseline: mean loss of the baseline over the same steps.
    """
    from scipy import stats

    x = np.log(np.asarray(twins) / baseline)
    m = len(x)
    reach = stats.t.isf(FALSE_ALARM / 2, m - 1) * x.std(ddof=1) * math.sqrt(1 + 1 / m)
    return math.expm1(abs(x.mean()) + reach) + _LOSS_SPACING


def captured_parity(
    context: Context,
    variant: str,
    begin: Callable[[bool], tuple[TorchEngine, Callable]],
    source: str,
    chaotic: bool = False,
    **params: Any,
) -> tuple[list[Row], list[pd.DataFrame]]:
    """Compare the losses of captured steps with those of the same steps done one by one.

    Args:
        begin: returns an engine that captures its steps (True) or not (False), and a function that returns its next batch,
            the same batches at each call. The random generators are seeded before each call, so that weights and dropout
            are the same.
        chaotic: whether trainings of this kind diverge within these steps if they round differently. Then the tolerance
            comes from twins of the training (`hyperion.workloads.twins`), otherwise it is TOLERANCE.
        params: further parameters of the rows.

    Returns:
        Rows and loss curves; empty if the device captures no steps.
    """

    def train(capture: bool) -> tuple[TorchEngine, list[float]]:
        seed_everything(context.seed)
        engine, next_batch = begin(capture)
        if capture and engine.uncaptured:
            return engine, []
        return engine, torch.stack([engine.train_step(next_batch()).loss for _ in range(STEPS)]).tolist()

    curves, dtype = dict[str, np.ndarray](), ""
    for how, capture in ((REPLAYED, True), (ONE_BY_ONE, False)):
        engine, losses = train(capture)
        if not losses:
            return [], []
        dtype = engine.precision.dtype
        curves[how] = np.array(losses)
        del engine  # frees the device's memory for the next
    if not chaotic:
        return [parity_row(context, variant, dtype, curves, source, **params)], [_samples(curves)]
    twins = train_twins(twin_format(dtype), context.seed, lambda: train(False)[1])
    rows = [
        context.error_row(
            variant,
            "relative_difference",
            agreement.difference,
            agreement.check,
            agreement.tolerance,
            dtype=dtype,
            data_source=source,
            params=_params(curves) | params | agreement.params,
        )
        for agreement in agreements(curves[REPLAYED], curves[ONE_BY_ONE], twins)
    ]
    return rows, [_samples(curves), twins]


def parity_row(context: Context, variant: str, dtype: str, curves: dict[str, np.ndarray], source: str, **params: Any) -> Row:
    """Return the largest relative difference of mean losses in any of WINDOWS windows of the steps."""
    means = {how: np.array([part.mean() for part in np.array_split(curve, WINDOWS)]) for how, curve in curves.items()}
    difference = float(np.max(np.abs(means[REPLAYED] / means[ONE_BY_ONE] - 1)))
    return context.error_row(
        variant,
        "relative_difference",
        difference,
        f"mean loss of each of {WINDOWS} windows of the steps, same weights, batches and random numbers; {SCATTER_BF16}",
        TOLERANCE,
        dtype=dtype,
        params=_params(curves) | params,
        data_source=source,
    )


def _params(curves: dict[str, np.ndarray]) -> dict:
    return {"what": "training loss", "of": REPLAYED, "from": ONE_BY_ONE, "steps": len(curves[REPLAYED])}


def _samples(curves: dict[str, np.ndarray]) -> pd.DataFrame:
    frames = [
        pd.DataFrame({"kind": "parity", "loop": how, "step": range(1, len(curve) + 1), "loss": curve})
        for how, curve in curves.items()
    ]
    return pd.concat(frames, ignore_index=True)
