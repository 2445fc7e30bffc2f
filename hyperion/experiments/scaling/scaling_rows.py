"""Turn the samples of the ranks into rows: speed, efficiency, cost of communication, and parity of the losses.

`rank_steps` describes the samples.
"""

import math

import numpy as np
import pandas as pd

from hyperion.chapter.context import Context
from hyperion.errors import not_none
from hyperion.experiments.scaling.figures import COMPUTING, LEAST_EXPOSED, MEAN_EXPOSED
from hyperion.experiments.scaling.scaled_training import MODES, ScaledTraining
from hyperion.measure.steps.trace import COMMUNICATION
from hyperion.results import BUSY_GPU, Estimate, Row, independent_ratio_estimate
from hyperion.results.series import correlation_time, series_estimate
from hyperion.workloads.training_rows import flops_floor
from hyperion.workloads.twins import SCATTER_FP32

EXPOSED = COMMUNICATION  # name of this part of a profiled step
_PARITY_TOLERANCE = 1e-4  # largest relative difference of a loss from that of one device
_IDEAL = "no limit: N devices are ideally N times as fast, and more where each holds and updates a part of the state only"


def workload_rows(
    context: Context, dtype: str, training: ScaledTraining, own: pd.DataFrame, ranks: int, reason: str
) -> list[Row]:
    """Return the rows of one workload on `ranks` devices.

    A non-empty `reason` means that the workload was not measured. The rows then give this reason instead of a value.
    """
    modes = MODES if ranks > 1 else MODES[:1]
    if reason:
        return [_absent_efficiency(context, dtype, training, mode, ranks, reason) for mode in modes]
    rows = [] if ranks == 1 else [_parity_row(context, training, own, ranks)]
    for mode in modes:
        rows += _mode_rows(context, dtype, training, own, mode, ranks)
    return rows


def _mode_rows(context: Context, dtype: str, training: ScaledTraining, own: pd.DataFrame, mode: str, ranks: int) -> list[Row]:
    times = step_times(own, mode, ranks)
    if not len(times):
        why = own.query("ranks == @ranks and mode == @mode and kind == 'missing'").iloc[0]["reason"]
        return [_absent_efficiency(context, dtype, training, mode, ranks, why)]
    step = series_estimate(times)
    facts = own.query("ranks == @ranks and mode == @mode and kind == 'step'").iloc[0]
    items, params = int(facts["items"]), training.params(mode, ranks)
    floor, source = flops_floor(context.device, dtype, float(facts["least_flops"]) / ranks)
    rate = step.map(lambda seconds: items / seconds)
    best = None if floor is None else items / floor
    rows = [
        _row(context, training, "step_time_s", step, dtype, params, limit=floor, limit_source=source),
        _row(context, training, f"{training.item}s_per_s", rate, dtype, params, limit=best, limit_source=source),
    ]
    rows += _busy_rows(context, dtype, training, own, step, params)
    if ranks == 1:
        return rows
    rows += _difference_rows(context, dtype, training, own, times, params)
    rows += _exposed_rows(context, dtype, training, own, params)
    one = step_times(own, MODES[0], 1)
    if not len(one):
        return rows
    # In weak scaling, N devices do N times the work of one device per step, so the ratio of the times is multiplied by N.
    grown = ranks if mode == "weak" else 1
    speedup = _ratio(times, one).map(lambda ratio: grown * ratio)
    efficiency = speedup.map(lambda times_faster: times_faster / ranks)
    return rows + [
        _row(context, training, "speedup", speedup, dtype, params, limit_source=_IDEAL),
        _row(context, training, "scaling_efficiency", efficiency, dtype, params, limit_source=_IDEAL),
    ]


def _absent_efficiency(context: Context, dtype: str, training: ScaledTraining, mode: str, ranks: int, reason: str) -> Row:
    columns = {"dtype": dtype, "params": training.params(mode, ranks), "limit_source": _IDEAL}
    return context.absent_row(training.name, "scaling_efficiency", reason, **columns)


def _difference_rows(
    context: Context, dtype: str, training: ScaledTraining, own: pd.DataFrame, times: np.ndarray, params: dict
) -> list[Row]:
    """Return two rows that compare a step on all ranks with the same step on a single rank without communication.

    The first row contains the difference of the two times divided by the step time on all ranks. It is negative if the single
    rank is slower, for example because it updates the whole optimizer state. The second row contains the same number as the share
    of communication. A share cannot be negative, so the second row has a value only if the whole confidence interval of the
    difference is above zero.
    """
    alone = step_times(own, params["mode"], params["ranks"], "alone")
    if not len(alone):
        reason = "the twin, which holds the whole state, does not fit"
        metrics = ("alone_difference", "communication_share")
        return [context.absent_row(training.name, metric, reason, dtype=dtype, params=params) for metric in metrics]
    difference = _ratio(times, alone).map(lambda ratio: 1 - ratio)
    row = _row(context, training, "alone_difference", difference, dtype, params)
    if difference.ci_low > 0:
        return [row, _row(context, training, "communication_share", difference, dtype, params)]
    reason = (
        f"no share: the interval of the difference from the step alone, {100 * difference.ci_low:.1f} % to "
        f"{100 * difference.ci_high:.1f} %, is not above zero"
    )
    return [row, context.absent_row(training.name, "communication_share", reason, dtype=dtype, params=params)]


def _busy_rows(
    context: Context, dtype: str, training: ScaledTraining, own: pd.DataFrame, step: Estimate, params: dict
) -> list[Row]:
    """Return the row with the busy time of the GPUs as a share of the step time, mean of the ranks. No row on a CPU.

    The busy time comes from profiled steps. The step time does not, because the profiler delays the host.

    Exposed communication does not count. A kernel of a collective also runs while it waits for a rank whose host has not
    launched it yet, so with this time, GPUs that wait for a host would seem busy.
    """
    if context.device.kind == "cpu":
        return []
    about, source = params | BUSY_GPU, "the GPU is busy during the whole step"
    about |= {"of": COMPUTING} if params["ranks"] > 1 else {}
    traced = _profiled(own, params)
    if isinstance(traced, str):
        return [context.absent_row(training.name, "share", traced, dtype=dtype, params=about)]
    busy_s = (traced["busy_ns"] - traced["exposed_ns"]) / traced["steps"] / 1e9
    share = min(float(np.mean(busy_s)) / not_none(step.value), 1.0)
    columns = {"n": int(np.max(traced["steps"])), "limit": 1.0, "limit_source": source}
    return [context.row(training.name, "share", share, dtype=dtype, params=about, **columns)]


def _exposed_rows(context: Context, dtype: str, training: ScaledTraining, own: pd.DataFrame, params: dict) -> list[Row]:
    """Return two rows with the exposed communication: the share of a step in which a rank communicates but does not compute.

    The values come from profiled steps. The first value is the mean over the ranks, the second value that of the rank with the
    least. Both contain the time in which a rank waits for slower ranks. The second value contains less of it, so the exchange
    itself costs at most this share.
    """
    traced = _profiled(own, params)
    rows = []
    for of, combine in ((MEAN_EXPOSED, np.mean), (LEAST_EXPOSED, np.min)):
        about = params | {"what": EXPOSED, "of": of}
        if isinstance(traced, str):
            rows.append(context.absent_row(training.name, "share", traced, dtype=dtype, params=about))
            continue
        share, count = float(combine(traced["share"])), int(np.max(traced["steps"]))
        rows.append(context.row(training.name, "share", share, dtype=dtype, params=about, n=count))
    return rows


def _profiled(own: pd.DataFrame, params: dict) -> pd.DataFrame | str:
    """Return the samples of the profiled steps of one workload, one for each rank, or the reason why a rank has none."""
    step = own.query("ranks == @params['ranks'] and mode == @params['mode']")
    reasons = step.query("kind == 'not traced'")
    if len(reasons):
        return reasons.iloc[0]["reason"]
    traced = step.query("kind == 'traced'")
    return "no step was profiled" if traced.empty else traced


def step_times(own: pd.DataFrame, mode: str, ranks: int, kind: str = "step") -> np.ndarray:
    """Return the time in seconds of each step on its slowest rank.

    Args:
        own: samples of one workload.
        mode: "weak" or "strong".
        ranks: number of ranks.
        kind: "step" for steps of all ranks together, or "alone" for steps of each rank without communication.
    """
    chosen = own.query("ranks == @ranks and mode == @mode and kind == @kind")
    # A step ends when its slowest rank has finished, so take the maximum over the ranks.
    return np.asarray(chosen.groupby("index")["time_s"].max())


def _ratio(times_a: np.ndarray, times_b: np.ndarray) -> Estimate:
    """Return the ratio of the medians b / a of two series, with its 95 % interval.

    `independent_ratio_estimate` assumes that the samples of a series are independent. Often each step is like the step before, so
    the interval of the logarithm of the ratio is widened by the square root of the longer correlation time. The interval does
    not exceed the ratios of the extreme samples.
    """
    ratio = independent_ratio_estimate(times_a, times_b)
    wider = math.sqrt(max(correlation_time(times_a), correlation_time(times_b)))
    low, high = (ratio.value * (end / ratio.value) ** wider for end in (ratio.ci_low, ratio.ci_high))
    least, most = float(times_b.min() / times_a.max()), float(times_b.max() / times_a.min())
    return Estimate(ratio.value, max(low, least), min(high, most), ratio.n)


def _parity_row(context: Context, training: ScaledTraining, own: pd.DataFrame, ranks: int) -> Row:
    losses = own.query("kind in ('parity', 'parity alone')").drop_duplicates(["kind", "ranks", "index"]).sort_values("index")

    def of(kind: str, count: int) -> np.ndarray:
        return np.asarray(losses.query("kind == @kind and ranks == @count")["loss"])

    here = of("parity", ranks)
    alone = of("parity alone", ranks) if training.item == "image" else of("parity", 1)
    params = {"what": "training loss", "model": training.model, "strategy": training.strategy, "ranks": ranks, "steps": len(here)}
    if len(alone) != len(here):
        return context.absent_row(
            training.name, "relative_difference", "one device alone is missing", dtype="fp32", params=params
        )
    difference = float(np.max(np.abs(here / alone - 1)))
    return context.error_row(
        training.name,
        "relative_difference",
        difference,
        f"losses of one device, step by step; {SCATTER_FP32}",
        _PARITY_TOLERANCE,
        dtype="fp32",
        params=params,
    )


def _row(context: Context, training: ScaledTraining, metric: str, estimate: Estimate, dtype: str, params: dict, **columns) -> Row:
    return context.row(training.name, metric, estimate, dtype=dtype, params=params, **columns)
