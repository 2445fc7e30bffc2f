"""A recorded step is held against the same steps done one by one: no training by graphs without it."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch

from hyperion.experiments.context import Context
from hyperion.results import Row
from hyperion.training import TorchEngine, seed_everything

REPLAYED, ONE_BY_ONE = "replayed as one graph", "one by one"
STEPS, WINDOWS = 200, 10
# Some sums of a GPU are formed in the order in which threads arrive, and what is learned from them grows apart.
TOLERANCE = 0.01


def captured_parity(
    context: Context, variant: str, begin: Callable[[bool], tuple[TorchEngine, Callable]], source: str,
    tolerance: float = TOLERANCE, windows: int = WINDOWS, **told,
) -> tuple[list[Row], list[pd.DataFrame]]:
    """The row that refuses another training, and the losses of both; nothing where the device records no step.

    Args:
        begin: makes an engine that records its steps or one that does not, and what gives it its batches, the same ones
            each time. It is called with the random generators in the same place, so that weights and dropout are the same.
        tolerance, windows: in so many equal parts of the steps the mean losses must be that near.
        told: more that the row is to say of the recorded steps.
    """
    curves: dict[str, np.ndarray] = {}
    for how, capture in ((REPLAYED, True), (ONE_BY_ONE, False)):
        seed_everything(context.seed)
        engine, next_batch = begin(capture)
        if capture and engine.uncaptured:
            return [], []
        dtype = engine.precision.dtype
        losses = [engine.train_step(next_batch()).loss for _ in range(STEPS)]
        curves[how] = torch.stack(losses).float().cpu().numpy()
        del engine  # leaves the device's memory for the next
    row = parity_row(context, variant, dtype, curves, source, tolerance, windows, **told)
    return [row], [_told(curves)]


def parity_row(
    context: Context, variant: str, dtype: str, curves: dict[str, np.ndarray], source: str,
    tolerance: float = TOLERANCE, windows: int = WINDOWS, **told,
) -> Row:  # fmt: skip
    """The largest relative difference of mean losses in any window of the steps, which must be within the tolerance."""
    means = {how: np.array([part.mean() for part in np.array_split(curve, windows)]) for how, curve in curves.items()}
    difference = float(np.max(np.abs(means[REPLAYED] / means[ONE_BY_ONE] - 1)))
    params = {"what": "training loss", "of": REPLAYED, "from": ONE_BY_ONE, "steps": len(curves[REPLAYED])} | told
    return context.row(
        variant, "relative_difference", difference, dtype=dtype, params=params, data_source=source,
        check=f"mean loss of each of {windows} windows of the steps, same weights, batches and random numbers",
        check_error=difference, check_tolerance=tolerance,
    )  # fmt: skip


def _told(curves: dict[str, np.ndarray]) -> pd.DataFrame:
    frames = [
        pd.DataFrame({"kind": "parity", "loop": how, "step": range(1, len(curve) + 1), "loss": curve})
        for how, curve in curves.items()
    ]
    return pd.concat(frames, ignore_index=True)
