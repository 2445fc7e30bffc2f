"""Scaling: the same training on 1, 2, 4, … devices, each number of them a launch of its own."""

import signal

import numpy as np
import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.ranks import devices_here
from hyperion.chapter.variants import Report, merged, run_on_ranks
from hyperion.experiments.scaling.scaling_forecast import efficiency_forecast
from hyperion.experiments.scaling.scaling_workloads import MODES, Workload, dtype_here, measure_on_rank, workloads_of
from hyperion.processes import JobError
from hyperion.processes.job import INTERRUPTED
from hyperion.results import Estimate, Row, independent_ratio_estimate, median_estimate
from hyperion.workloads.training_rows import flops_floor
from hyperion.workloads.twins import SCATTER_FP32

PARITY = 1e-4
LAUNCH_FAILED = "the launch failed"
_IDEAL = "no limit: N devices are ideally N times as fast, and more where each holds and updates a part of the state only"


def forecast(context: Context) -> list[Forecast]:
    """Weak-scaling efficiency on all devices, from the bytes that must move and the rates measured in 1.1 and 1.3."""
    ranks, dtype = max(_counts(context)), dtype_here(context)
    return [efficiency_forecast(context, workload, ranks, dtype) for workload in workloads_of(context)]


def run(context: Context, report: Report) -> Result:
    """Every number of devices in turn. One that fails is told in its cells, and the others go on."""
    samples, missing = [], {}
    for ranks in context.sizes["counts"]:
        found, failures = _launched(context, report, ranks)
        samples += found
        missing |= failures
    frame = pd.concat(samples, ignore_index=True) if samples else pd.DataFrame({"workload": [], "ranks": []})
    rows = []
    for workload in workloads_of(context):
        own = frame[frame["workload"] == workload.name]
        for ranks in context.sizes["counts"]:
            rows += _cells(context, workload, own, ranks, missing.get((workload.name, ranks), ""))
    return Result(rows, frame)


EXPERIMENT = Experiment(forecast, run, forecast_reads=("gemm", "bandwidth", "collectives"))


def _counts(context: Context) -> list[int]:
    """The profile's numbers of devices, as far as this machine has them."""
    return [ranks for ranks in context.sizes["counts"] if ranks <= devices_here(context)]


def _launched(context: Context, report: Report, ranks: int) -> tuple[list[pd.DataFrame], dict]:
    """Samples of all workloads on so many ranks, and why those that are missing are missing, by (workload, ranks)."""
    names = [workload.name for workload in workloads_of(context)]
    if ranks > devices_here(context):
        return [], {(name, ranks): f"this machine has {devices_here(context)} devices" for name in names}
    try:
        found = run_on_ranks(context, report, measure_on_rank, {"names": names}, ranks=ranks)
        return [merged(found).samples], {}
    except JobError as error:
        _raise_if_asked_to_end(error)
        print(f"{ranks} ranks together: {error.what.splitlines()[0]}; each workload again by itself")
    samples, missing = [], {}
    for name in names:
        try:
            found = run_on_ranks(context, report, measure_on_rank, {"names": [name]}, ranks=ranks)
            samples.append(merged(found).samples)
        except JobError as error:
            _raise_if_asked_to_end(error)
            missing[name, ranks] = f"{LAUNCH_FAILED}: {error.what.splitlines()[0]}"
    return samples, missing


def _raise_if_asked_to_end(error: JobError) -> None:
    """A launch that was asked to end is no failed one: the batch system wants this process to end too."""
    if error.exit_code in (INTERRUPTED, 128 + signal.SIGTERM):
        raise error


def _cells(context: Context, workload: Workload, own: pd.DataFrame, ranks: int, reason: str) -> list[Row]:
    """The rows of one workload on so many devices; with a reason, rows that are missing and say why."""
    modes = MODES if ranks > 1 else MODES[:1]
    if reason:
        return [
            context.row(
                workload.name,
                "scaling_efficiency",
                None,
                value_reason=reason,
                dtype=dtype_here(context),
                params=_params(workload, mode, ranks, {}),
                limit_source=_IDEAL,
            )
            for mode in modes
        ]
    rows = [] if ranks == 1 else [_parity_row(context, workload, own, ranks)]
    for mode in modes:
        rows += _mode_rows(context, workload, own, mode, ranks)
    return rows


def _mode_rows(context: Context, workload: Workload, own: pd.DataFrame, mode: str, ranks: int) -> list[Row]:
    times, dtype = step_times(own, mode, ranks), dtype_here(context)
    if not len(times):
        absent = own[(own["ranks"] == ranks) & (own["mode"] == mode) & (own["kind"] == "missing")]
        why = absent["reason"].iloc[0]
        return [
            context.row(
                workload.name,
                "scaling_efficiency",
                None,
                value_reason=why,
                dtype=dtype,
                params=_params(workload, mode, ranks, {}),
                limit_source=_IDEAL,
            )
        ]
    step = median_estimate(times)
    facts = own[(own["ranks"] == ranks) & (own["mode"] == mode) & (own["kind"] == "step")].iloc[0]
    tokens = int(facts["tokens"])
    params = _params(workload, mode, ranks, {"tokens": tokens})
    floor, source = flops_floor(context.device, dtype, float(facts["least_flops"]) / ranks)
    rate = step.map(lambda seconds: tokens / seconds)
    best = None if floor is None else tokens / floor
    rows = [
        _row(context, workload, "step_time_s", step, dtype, params, limit=floor, limit_source=source),
        _row(context, workload, "tokens_per_s", rate, dtype, params, limit=best, limit_source=source),
    ]
    if ranks == 1:
        return rows
    rows.append(_share_row(context, workload, own, times, params))
    one = step_times(own, MODES[0], 1)
    if not len(one):
        return rows
    grown = ranks if mode == "weak" else 1
    speedup = independent_ratio_estimate(times, one).map(lambda ratio: grown * ratio)
    efficiency = speedup.map(lambda times_faster: times_faster / ranks)
    return rows + [
        _row(context, workload, "speedup", speedup, dtype, params, limit_source=_IDEAL),
        _row(context, workload, "scaling_efficiency", efficiency, dtype, params, limit_source=_IDEAL),
    ]


def _share_row(context: Context, workload: Workload, own: pd.DataFrame, times: np.ndarray, params: dict) -> Row:
    alone, dtype = step_times(own, "alone", params["ranks"], params["mode"]), dtype_here(context)
    if not len(alone):
        return context.row(
            workload.name,
            "communication_share",
            None,
            dtype=dtype,
            params=params,
            value_reason="the twin, which holds the whole state, does not fit",
        )
    share = independent_ratio_estimate(times, alone).map(lambda ratio: 1 - ratio)
    return _row(context, workload, "communication_share", share, dtype, params)


def step_times(own: pd.DataFrame, kind: str, ranks: int, mode: str | None = None) -> np.ndarray:
    """Seconds of each step, that of the slowest rank: of a mode, or of `alone`, the twin in a group of its own."""
    chosen = own[(own["ranks"] == ranks) & (own["kind"] == ("alone" if kind == "alone" else "step"))]
    chosen = chosen[chosen["mode"] == (mode or kind)]
    return chosen.groupby("index")["time_s"].max().to_numpy()


def _parity_row(context: Context, workload: Workload, own: pd.DataFrame, ranks: int) -> Row:
    losses = own[own["kind"] == "parity"].drop_duplicates(["ranks", "index"])
    alone, here = (losses[losses["ranks"] == n].sort_values("index")["loss"].to_numpy() for n in (1, ranks))
    params = {"what": "training loss", "model": workload.model, "strategy": workload.strategy, "ranks": ranks, "steps": len(here)}
    if len(alone) != len(here):
        return context.row(
            workload.name, "relative_difference", None, value_reason="one device alone is missing", dtype="fp32", params=params
        )
    difference = float(np.max(np.abs(here / alone - 1)))
    return context.row(
        workload.name,
        "relative_difference",
        difference,
        dtype="fp32",
        params=params,
        check=f"losses of one device, step by step; {SCATTER_FP32}",
        check_error=difference,
        check_tolerance=PARITY,
    )


def _row(context: Context, workload: Workload, metric: str, estimate: Estimate, dtype: str, params: dict, **columns) -> Row:
    return context.row(
        workload.name,
        metric,
        estimate.value,
        dtype=dtype,
        params=params,
        n=estimate.n,
        ci_low=estimate.ci_low,
        ci_high=estimate.ci_high,
        **columns,
    )


def _params(workload: Workload, mode: str, ranks: int, more: dict) -> dict:
    return {"model": workload.model, "strategy": workload.strategy, "mode": mode, "ranks": ranks} | more
