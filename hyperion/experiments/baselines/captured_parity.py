"""Compare the losses of captured steps, replayed as one graph, with those of the same steps done one by one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.context import Context
from hyperion.results import Row
from hyperion.training import TorchEngine, seed_everything
from hyperion.workloads.twins import SCATTER_BF16, agreements, train_twins, twin_format

REPLAYED, ONE_BY_ONE = "replayed as one graph", "one by one"
STEPS, WINDOWS = 200, 10
# For trainings whose twins do not diverge: a hundred times their scatter.
TOLERANCE = 0.01


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
        context.row(
            variant,
            "relative_difference",
            agreement.difference,
            dtype=dtype,
            data_source=source,
            params=_params(curves) | params | agreement.params,
            check=agreement.check,
            check_error=agreement.difference,
            check_tolerance=agreement.tolerance,
        )
        for agreement in agreements(curves[REPLAYED], curves[ONE_BY_ONE], twins)
    ]
    return rows, [_samples(curves), twins]


def parity_row(context: Context, variant: str, dtype: str, curves: dict[str, np.ndarray], source: str, **params: Any) -> Row:
    """Return the largest relative difference of mean losses in any of WINDOWS windows of the steps."""
    means = {how: np.array([part.mean() for part in np.array_split(curve, WINDOWS)]) for how, curve in curves.items()}
    difference = float(np.max(np.abs(means[REPLAYED] / means[ONE_BY_ONE] - 1)))
    return context.row(
        variant,
        "relative_difference",
        difference,
        dtype=dtype,
        params=_params(curves) | params,
        data_source=source,
        check=f"mean loss of each of {WINDOWS} windows of the steps, same weights, batches and random numbers; {SCATTER_BF16}",
        check_error=difference,
        check_tolerance=TOLERANCE,
    )


def _params(curves: dict[str, np.ndarray]) -> dict:
    return {"what": "training loss", "of": REPLAYED, "from": ONE_BY_ONE, "steps": len(curves[REPLAYED])}


def _samples(curves: dict[str, np.ndarray]) -> pd.DataFrame:
    frames = [
        pd.DataFrame({"kind": "parity", "loop": how, "step": range(1, len(curve) + 1), "loss": curve})
        for how, curve in curves.items()
    ]
    return pd.concat(frames, ignore_index=True)
