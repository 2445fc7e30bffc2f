"""Compare the losses of two training runs, with a tolerance that is measured with twins: runs that differ only in rounding.

Training that repeats the same batches is chaotic. Two correct runs that round differently diverge, and after some hundred steps
their losses differ by some percent. No fixed tolerance suits such runs: it would be too small late in training and cause false
alarms, and too large early in training and miss faults. Therefore this module measures how much the losses scatter.

A twin repeats the baseline run with the same initial weights and the same batches, but with other rounding. Its matrix products
round operands and results to the numbers of a number format, multiplied by a random factor (`OtherRounding`). With the factor 1,
this is the rounding of the number format itself. A variant is the run that is compared with the baseline, for example a run in
another number format. It passes if its loss lies within the prediction interval of the twins in its format.

In early steps, before the runs diverge, the interval is narrow. These steps show whether the variant computes the same as the
baseline. In late steps, the interval is wide. These steps show whether the variant learns as well as the baseline.
`captured_parity` makes this comparison for steps that are replayed as one graph.
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
from hyperion.data.packing import IGNORE_INDEX
from hyperion.results import Row
from hyperion.training import TorchEngine, seed_everything

# False-alarm rate: the probability that a single check fails although nothing is wrong, if the losses of twins are normally
# distributed. It is a tenth of the probability that the book promises (1 in 10,000), because the real distribution may have
# heavier tails.
FALSE_ALARM = 1e-5
TWINS = 8
# Training runs that use each token once do not diverge. Their checks have fixed tolerances, much larger than the scatter of
# twins. The relative scatter was measured on an H200 with the language model of chapter 2.3, over 200 steps with 8 twins per
# format.
SCATTER_BF16 = "twins of a language model scatter by 1e-4, so a false alarm is rarer than 1 in 1,000,000"
SCATTER_FP32 = "twins of a language model scatter by 1e-8, so a false alarm is rarer than 1 in 1,000,000"
# Relative difference allowed for the bias of each number format: one unit roundoff. A number format has a bias because it rounds
# a value shared by all positions in the same direction everywhere, for example a norm weight near 1 or the logit of an unseen
# token. In twins this bias averages out. On an H200, if all logits are computed at once, GPT-2's losses in bf16 are 9e-4 above
# those in fp32 in the first 25 steps of every run, while its twins scatter by 3e-5. fp8 has the value of bf16, because the
# results of fp8 matrix products are stored in bf16.
BIAS = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-8}
REPLAYED, ONE_BY_ONE = "replayed as one graph", "one by one"
STEPS, WINDOWS = 64, 10
# Tolerance for training runs whose twins do not diverge: a hundred times the scatter of the twins.
TOLERANCE = 0.01
_LOSS_SPACING = 2.0**-23  # relative spacing of float32 numbers; losses are stored in float32
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
        F.multi_head_attention_forward,  # a TorchFunctionMode is not called for the matrix products inside this function
    )
)


class OtherRounding(TorchFunctionMode):
    """Context manager in which matrix products round each number x to ``round(x * c) / c`` with a random factor c.

    ``round`` rounds to a number format. With c = 1, the result is the rounding of the number format itself. Operands, results and
    their gradients are rounded. Equal numbers have equal rounding errors, as with a real number format; an example is a logit
    shared by many positions. Independent random errors would average out, which the errors of a number format do not.

    Args:
        dtype: number format, one of fp32, bf16 and fp8, see `twin_format`.
        seed: seed of c. The logarithm of c is uniformly distributed, and c lies in [1, 2). Weights, batches and dropout use other
            random generators.
    """

    def __init__(self, dtype: str, seed: int):
        super().__init__()
        self._round = _ROUNDINGS[dtype]
        self._in_float64 = dtype == "fp32"  # in float32, multiplying by c rounds as coarsely as fp32 itself
        self.factor = float(2 ** np.random.default_rng(seed).random())

    # A mode intercepts the functions of PyTorch's Python interface. Functions not in _PRODUCTS run unchanged.
    def __torch_function__(self, function: Callable, types, args=(), kwargs=None):
        if function not in _PRODUCTS:
            return function(*args, **(kwargs or {}))
        rounded, named = tree_map(self._rounded, (args, kwargs or {}))
        return tree_map(self._rounded, function(*rounded, **named))

    def _rounded(self, value: object) -> object:
        return _Rounded.apply(value, self) if isinstance(value, Tensor) and value.is_floating_point() else value

    def rounded(self, tensor: Tensor, gradient: bool = False) -> Tensor:
        """Return `tensor` with all elements rounded, in its original dtype.

        Args:
            tensor: tensor to round.
            gradient: whether the tensor is a gradient. fp8 training uses another fp8 format for gradients.
        """
        wide = tensor.double() if self._in_float64 else tensor.float()
        return (self._round(wide * self.factor, gradient) / self.factor).to(tensor.dtype)


class _Rounded(torch.autograd.Function):
    """Autograd function that rounds a tensor in the forward pass and its gradient in the backward pass."""

    @staticmethod
    def forward(ctx, tensor: Tensor, rounding: OtherRounding) -> Tensor:
        ctx.rounding = rounding
        return rounding.rounded(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.rounding.rounded(gradient, gradient=True), None


def _to_fp8(scaled: Tensor, gradient: bool) -> Tensor:
    """Round a scaled tensor to fp8: convert it to fp8 and back, with the scaling of `hyperion.training.float8`."""
    dtype = torch.float8_e5m2 if gradient else torch.float8_e4m3fn
    # The scale is a power of two. Scaling exactly to the format's largest number would cancel the random factor c.
    largest = torch.finfo(dtype).max / 2 ** torch.ceil(torch.log2(scaled.abs().amax().clamp(min=1e-30)))
    return (scaled * largest).to(dtype).to(scaled.dtype) / largest


_ROUNDINGS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "fp32": lambda scaled, gradient: scaled.float().double(),
    "bf16": lambda scaled, gradient: scaled.bfloat16().float(),
    "fp8": _to_fp8,
}


def train_twins(dtype: str, seed: int, train: Callable[[], list[float]]) -> pd.DataFrame:
    """Repeat the baseline training TWINS times with different rounding errors, and return the losses.

    The losses of the runs, which are called twins, show how much rounding alone changes a training. A random factor is drawn for
    each run. Operands and results of matrix products are multiplied by this factor, rounded to `dtype`, and divided by it. So the
    rounding errors have the size of those of `dtype`, but differ from run to run.

    Args:
        dtype: number format of the twins, as returned by `twin_format`.
        seed: seed of the experiment.
        train: function that trains the baseline and returns the loss of every step. Every call must start from the same weights
            and use the same batches.

    Returns:
        A table with the columns kind ("twin"), twin, dtype, step and loss.
    """
    frames = []
    for number in range(TWINS):
        # Derive the seeds of the twins from the experiment's seed, so that another seed gives other twins.
        with OtherRounding(dtype, seed * TWINS + number):
            losses = train()
        steps = range(1, len(losses) + 1)
        frames.append(pd.DataFrame({"kind": "twin", "twin": number, "dtype": dtype, "step": steps, "loss": losses}))
    return pd.concat(frames, ignore_index=True)


def twin_format(dtype: str) -> str:
    """Return the number format in which twins round their matrix products, for a variant that trains in `dtype`.

    Variants in TF32 and fp16 also use bf16 twins, although these formats round more finely than bf16. Late in chaotic training,
    the scatter does not depend on the format. Early in training, the tolerance from bf16 twins is only a little larger.
    """
    return dtype if dtype in ("fp32", "fp8") else "bf16"


@dataclass(frozen=True)
class Agreement:
    """Relative difference between the losses of a variant and of the baseline in a window of steps, with its tolerance.

    Attributes:
        window: name of the window, "early" or "late".
        first, last: first and last step of the window, counted from 1.
        difference: |mean loss of the variant / mean loss of the baseline - 1|.
        tolerance: largest difference that rounding alone explains, including `bias`.
        bias: part of the tolerance that covers a bias of the number format.
        twins: number of twins from which the tolerance was computed.
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
        """Name of the check in the row of this window of steps."""
        beyond = f", and {self.bias:.2g} for a bias of the format" if self.bias else ""
        return (
            f"mean loss of steps {self.first} to {self.last}: no further from the baseline's than {self.twins} twins of it "
            f"with other rounding allow (prediction interval, false alarm {FALSE_ALARM:g}{beyond})"
        )

    @property
    def params(self) -> dict:
        """Params of the row of this window of steps."""
        return {"window": self.window, "first": self.first, "last": self.last}


def agreements(losses: np.ndarray, baseline: np.ndarray, twins: pd.DataFrame, bias: float = 0.0) -> list[Agreement]:
    """Compare the losses of a variant with those of the baseline, early and late in training.

    Args:
        losses: loss of every step of the variant.
        baseline: loss of every step of the baseline, from the same initial weights and the same batches.
        twins: losses of the baseline's twins in one number format, from `train_twins`. The twins must run the baseline's code. If
            they ran other code, the differences between both codes would widen the tolerance.
        bias: relative difference allowed in addition to the scatter of the twins. If the variant and the baseline have different
            number formats, pass `BIAS[dtype]` with the variant's dtype.
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
    """Return one row per window of steps with the difference between a variant's losses and those of the baseline.

    The check of a row fails if the difference exceeds the tolerance.

    Args:
        row: row of the variant's training loss. The new rows copy its other columns, such as the variant and the dtype.
        baseline: name of the baseline, for the params of the rows.
        windows_compared: differences from `agreements`.
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
    """Return the two windows of a training run: "early" and "late".

    The early window is the first eighth of the steps, but at least 4 steps. In these steps, runs have not diverged yet. The late
    window is the last quarter of the steps, but at least 2 steps.
    """
    return {"early": slice(0, min(steps, max(4, steps // 8))), "late": slice(steps - min(steps, max(2, steps // 4)), steps)}


def tolerance(twins: list[float], baseline: float) -> float:
    """Return the largest relative difference from the baseline that rounding alone explains.

    For each of the m twins, let x be the logarithm of (mean loss of the twin / mean loss of the baseline). Let ``mean`` and s be
    the mean and the standard deviation of x over the twins. For another training run with rounding of the same kind, x lies
    within ``mean ± t s sqrt(1 + 1/m)`` with probability 1 - FALSE_ALARM. Here t is a quantile of Student's distribution with m -
    1 degrees of freedom. So the relative difference from the baseline is at most ``|mean| + t s sqrt(1 + 1/m)``, plus the spacing
    of float32 numbers, in which losses are stored. If a variant rounds less than its twins, because it has fewer operations or a
    finer format, its difference is smaller.

    Args:
        twins: mean losses of at least 2 twins.
        baseline: mean loss of the baseline over the same steps.
    """
    from scipy import stats

    x = np.log(np.asarray(twins) / baseline)
    m = len(x)
    # Use FALSE_ALARM / 2, because half of the false alarms fall on each side of the interval.
    reach = stats.t.isf(FALSE_ALARM / 2, m - 1) * x.std(ddof=1) * math.sqrt(1 + 1 / m)
    # Convert from logarithms to relative differences.
    return math.expm1(abs(x.mean()) + reach) + _LOSS_SPACING


def captured_parity(
    context: Context,
    variant: str,
    begin: Callable[[bool], tuple[TorchEngine, Callable]],
    source: str,
    chaotic: bool = False,
    **params: Any,
) -> tuple[list[Row], list[pd.DataFrame]]:
    """Compare the losses of training steps that are replayed as a graph with those of the same steps without a graph.

    Args:
        context: context of the experiment.
        variant: variant of the rows.
        begin: function that starts training. Its argument states whether the engine captures its steps as a graph. It returns an
            engine, and a function that returns the next batch. Every call must give the same sequence of batches. The random
            generators are seeded before each call, so that weights and dropout are the same.
        source: data source of the rows.
        chaotic: whether runs of this kind that round differently diverge within these steps. If True, the tolerance comes from
            twins. If False, it is TOLERANCE.
        params: additional params of the rows.

    Returns:
        (rows, loss curves). Both lists are empty if the device cannot capture steps as a graph.
    """

    def train(capture: bool) -> tuple[TorchEngine, list[float]]:
        seed_everything(context.seed)
        engine, next_batch = begin(capture)
        if capture and engine.uncaptured:
            return engine, []
        # The losses stay on the device until the last step, so that no step waits for the device.
        return engine, torch.stack([engine.train_step(next_batch()).loss for _ in range(STEPS)]).tolist()

    curves, dtype = dict[str, np.ndarray](), ""
    for how, capture in ((REPLAYED, True), (ONE_BY_ONE, False)):
        engine, losses = train(capture)
        if not losses:
            return [], []
        dtype = engine.precision.dtype
        curves[how] = np.array(losses)
        del engine  # frees the device memory for the next training run
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
    """Return a row with the largest relative difference between the losses of two training runs.

    The steps are divided into WINDOWS windows. In each window, the mean losses of the two runs are compared. The row's value is
    the largest relative difference.

    Args:
        context: context of the experiment.
        variant: variant of the row.
        dtype: number format of the training runs.
        curves: a dict that maps the name of each of the two runs to its loss per step.
        source: data source of the row.
        params: additional params of the row.
    """
    # Compare means over windows, because the loss of a single step depends too much on its batch.
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


def with_unequal_rows(batch: tuple[Tensor, Tensor], first_row: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return a batch whose rows have different numbers of targets: from all of them in the first row to about half in the last.

    If all rows have as many targets, a step that gives each micro-batch or each rank the same weight, instead of each token, has
    the right loss.

    Args:
        batch: (inputs_BT, targets_BT), the rows of this rank.
        first_row: number of the first of these rows in the batch over all ranks.
        rows: number of rows of the batch over all ranks.
    """
    inputs_BT, targets_BT = batch
    targets_BT, length = targets_BT.clone(), targets_BT.shape[1]
    for place, targets_T in enumerate(targets_BT, start=first_row):
        targets_T[length - place * length // (2 * rows) :] = IGNORE_INDEX
    return inputs_BT, targets_BT
