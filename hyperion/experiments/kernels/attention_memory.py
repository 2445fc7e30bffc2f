"""How does the memory of attention grow with the sequence length?

An implementation that stores the matrix of scores needs memory that grows with the square of the length. The experiment measures
the peak memory of one forward and backward pass at several lengths T, and fits a + b·T + c·T². The share of c·T² at the greatest
length distinguishes the two kinds of implementations.
"""

import gc

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import all_samples, checked, out_of_memory_reason
from hyperion.experiments.kernels.attention_implementations import (
    GPU_ONLY,
    IMPLEMENTATIONS,
    TRITON,
    RefusedError,
    attend,
    make_inputs,
    why_absent,
)
from hyperion.measure import FORMATS
from hyperion.measure.memory_use.tensor_memory import allocated_peak
from hyperion.results import Row
from hyperion.units import GIB

# If the largest residual of the fit exceeds this share of the largest value, the fit is rejected.
FIT_TOLERANCE = 0.02


class AttentionMemoryOptions(Options):
    """Options for the `attention_memory` experiment.

    Args:
        dtype: number format of all tensors.
        heads: number of query heads, which is also the number of key-value heads.
        features: number of features of a head.
        lengths: sequence lengths, at least four.
    """

    dtype: str
    heads: int
    features: int
    lengths: tuple[int, ...]


def forecast(context: Context) -> list[Forecast]:
    """Predict the peak memory of each implementation at the greatest length, and the share of its quadratic term.

    The implementation "math" stores the scores, the probabilities and their gradients in float32, even for 16-bit inputs. The
    others store no matrix of scores. The backends that have no CPU kernel are not predicted on a CPU, where they refuse.
    """
    options = AttentionMemoryOptions.of(context)
    longest, forecasts = max(options.lengths), []
    linear = _compulsory_bytes(options, longest)
    # One matrix of scores has H · T² elements of at least 4 bytes.
    scores = options.heads * longest**2 * max(4, FORMATS[options.dtype].bytes)
    for name in IMPLEMENTATIONS:
        if why_absent(name, context.device) or (context.device.kind == "cpu" and name in GPU_ONLY):
            continue
        quadratic = 3 * scores if name == "math" else 0
        basis = f"outputs and gradients {linear / GIB:.3g} GiB"
        basis += f", and three matrices of scores {quadratic / GIB:.3g} GiB" if quadratic else ", no matrix of scores"
        share = quadratic / (quadratic + linear)
        identity = {"dtype": options.dtype, "params": _params(options)}
        forecasts.append(Forecast(name, "quadratic_share", share, basis, **identity))
        peak = (quadratic + linear) / GIB
        params = _params(options, longest)
        forecasts.append(Forecast(name, "peak_memory_gib", peak, basis, options.dtype, params, ceiling=linear / GIB))
    return forecasts


def run(context: Context, report: Report) -> Result:
    """Measure the peak memory of each implementation at each length, excluding the inputs, and fit its growth."""
    options = AttentionMemoryOptions.of(context)
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    for done, name in enumerate(IMPLEMENTATIONS):
        report(done, len(IMPLEMENTATIONS), name)
        peaks, reason = [], why_absent(name, context.device)
        try:
            peaks = [] if reason else [_peak_bytes(context, options, name, length) for length in options.lengths]
        except RefusedError as error:
            reason = f"refused: {error}"
        except torch.OutOfMemoryError as error:
            reason = out_of_memory_reason(error)
        if reason:
            absent = context.absent_row(name, "quadratic_share", reason, dtype=options.dtype, params=_params(options))
            rows.append(absent)
            continue
        rows += [_peak_row(context, options, name, *pair) for pair in zip(options.lengths, peaks, strict=True)]
        share, residual = quadratic_share(options.lengths, peaks)
        if name != TRITON and residual > FIT_TOLERANCE:
            reason = f"no polynomial of the second degree fits: the residual is {residual:.2g} of the largest memory"
            rows.append(context.absent_row(name, "quadratic_share", reason, dtype=options.dtype, params=_params(options)))
            continue
        check = checked("residual of the fit", residual, FIT_TOLERANCE)
        rows.append(context.row(name, "quadratic_share", share, dtype=options.dtype, params=_params(options), **check))
        frames.append(pd.DataFrame({"variant": name, "length": options.lengths, "peak_bytes": peaks}))
    report(len(IMPLEMENTATIONS), len(IMPLEMENTATIONS), "done")
    return Result(rows, all_samples(frames))


EXPERIMENT = Experiment(forecast, run, options=AttentionMemoryOptions)


def quadratic_share(lengths: tuple[int, ...], peaks: list[int]) -> tuple[float, float]:
    """Fit a + b·T + c·T² to the peak memory, and return the share of c·T² at the greatest length and the largest residual.

    The coefficients are not negative, because no term can reduce the memory. The residual is divided by the largest peak.
    """
    from scipy.optimize import nnls

    # Scale both to a maximum of 1, so that the columns have similar magnitudes. At x = 1, each coefficient equals its term.
    x, y = np.array(lengths, dtype=float) / max(lengths), np.array(peaks, dtype=float) / max(peaks)
    terms = np.stack([np.ones_like(x), x, x**2], axis=1)
    fitted, _ = nnls(terms, y)
    return float(fitted[2] / fitted.sum()), float(np.abs(terms @ fitted - y).max())


def _params(options: AttentionMemoryOptions, length: int | None = None) -> dict:
    params = {"heads": options.heads, "features": options.features, "what": "forward and backward pass, above the inputs"}
    return params | ({"length": length} if length else {"longest": max(options.lengths)})


def _compulsory_bytes(options: AttentionMemoryOptions, length: int) -> int:
    """Return the bytes of the output and of the three gradients, which every implementation must store at the end."""
    # Output and gradients of Q, K and V: four tensors of shape [H, T, features].
    return 4 * options.heads * length * options.features * FORMATS[options.dtype].bytes


def _peak_bytes(context: Context, options: AttentionMemoryOptions, name: str, length: int) -> int:
    """Return the peak memory of one forward and backward pass in bytes, excluding the inputs."""
    device = context.device
    sizes = (1, options.heads, options.heads, length, options.features)
    q, k, v, grad = make_inputs(device, FORMATS[options.dtype].storage, sizes, context.seed)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]

    def step() -> None:
        output = attend(name, q, k, v)
        results = (output, *torch.autograd.grad(output, leaves, grad))
        del results

    step()  # the first call compiles, and creates shared workspaces
    gc.collect()
    # The inputs and the workspaces already exist. Only the memory that the pass adds counts.
    standing = torch.cuda.memory_allocated(device.torch_device) if device.kind != "cpu" else 0
    return allocated_peak(device, step) - standing


def _peak_row(context: Context, options: AttentionMemoryOptions, name: str, length: int, peak: int) -> Row:
    least = _compulsory_bytes(options, length) / GIB
    source = "output and gradients alone"
    return context.row(
        name,
        "peak_memory_gib",
        peak / GIB,
        dtype=options.dtype,
        params=_params(options, length),
        limit=least,
        limit_source=source,
    )
