"""Scaling: the same training on 1, 2, 4 and more devices, one launch for each number of devices."""

import signal

import numpy as np
import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.variants import merged, run_on_ranks
from hyperion.experiments.scaling.scaling_workloads import MODES, ScaledTraining, ScalingOptions, lm_config, measure_on_rank
from hyperion.models import flops_per_token, llama_flops_per_token, llama_parameter_count, random_llama_shape
from hyperion.parallel.lora import ATTENTION
from hyperion.processes import JobError
from hyperion.processes.job import INTERRUPTED
from hyperion.results import Estimate, Row, independent_ratio_estimate, median_estimate
from hyperion.workloads.fine_tuning import RANK
from hyperion.workloads.training_rows import flops_floor
from hyperion.workloads.twins import SCATTER_FP32

PARITY = 1e-4
LAUNCH_FAILED = "the launch failed"
# Share of the step that can hide communication: DDP overlaps its all-reduce with the backward pass only, FSDP2 its
# gathers with the whole step.
_HIDING = {"ddp": 2 / 3, "fsdp": 1.0}
_IDEAL = "no limit: N devices are ideally N times as fast, and more where each holds and updates a part of the state only"


def forecast(context: Context) -> list[Forecast]:
    """Estimate the weak-scaling efficiency on all devices, from bytes to exchange and the rates of chapters 1.1 and 1.3."""
    options = ScalingOptions.of(context)
    devices, dtype = options.device_count(context), options.dtype(context)
    ranks = max(count for count in options.counts if count <= devices)
    return [_efficiency_forecast(context, training, ranks, dtype) for training in options.workloads]


def run(context: Context, report: Report) -> Result:
    """Run each number of devices in turn. If one fails, its rows have no value and a reason, and the others run."""
    options = ScalingOptions.of(context)
    samples, missing = [], {}
    for ranks in options.counts:
        frames, failures = _launch(context, options, report, ranks)
        samples += frames
        missing |= failures
    frame = pd.concat(samples, ignore_index=True) if samples else pd.DataFrame({"workload": [], "ranks": []})
    rows = []
    for training in options.workloads:
        own = frame.query("workload == @training.name")
        for ranks in options.counts:
            rows += _cells(context, options.dtype(context), training, own, ranks, missing.get((training.name, ranks), ""))
    return Result(rows, frame)


EXPERIMENT = Experiment(forecast, run, forecast_reads=("gemm", "bandwidth", "collectives"), options=ScalingOptions)


def _efficiency_forecast(context: Context, training: ScaledTraining, ranks: int, dtype: str) -> Forecast:
    """Estimate the weak-scaling efficiency: communication that computation cannot hide adds to the step time."""
    params = {"model": training.model, "strategy": training.strategy, "mode": "weak", "ranks": ranks}
    tokens = training.batch("weak", ranks) * training.sequence_length
    gemm, busbw = context.best_upstream("gemm_tflops", dtype), _best_busbw(context)
    estimate, basis = None, "no estimate: this run has not measured products and collectives (chapters 1.1 and 1.3)"
    if ranks == 1:
        basis = "no estimate: this machine has one device"
    elif gemm and gemm.value and busbw:
        flops, sent = _flops_and_bytes(training, ranks, dtype)
        computing = flops * tokens / ranks / (gemm.value * 1e12)
        exchanging = sent / (busbw * 1e9)
        exposed = max(0.0, exchanging - _HIDING[training.strategy] * computing)
        estimate = computing / (computing + exposed)
        basis = (
            f"{computing * 1e3:.3g} ms of products at the measured {gemm.value:.4g} TFLOPS; {sent / 1e9:.3g} GB a rank at the "
            f"measured {busbw:.4g} GB/s take {exchanging * 1e3:.3g} ms, of which {exposed * 1e3:.3g} ms cannot be hidden"
        )
    return Forecast(training.name, "scaling_efficiency", estimate, basis, dtype=dtype, params=params | {"tokens": tokens})


def _best_busbw(context: Context) -> float | None:
    rates = [r.value for r in context.upstream if r.metric == "busbw_gb_s" and r.variant == "all_reduce" and r.value]
    return max(rates, default=None)


def _flops_and_bytes(training: ScaledTraining, ranks: int, dtype: str) -> tuple[float, float]:
    """Return (FLOPs of a token, bytes that each rank sends in a step)."""
    if training.lora:
        config = random_llama_shape(training.model, training.vocabulary)
        flops = llama_flops_per_token(config, training.sequence_length, RANK, ATTENTION).forward_backward
        parameters, reduced = llama_parameter_count(config), 0  # gradients of the adapters alone
    else:
        config = lm_config(training)
        flops = flops_per_token(config, training.sequence_length).forward_backward
        parameters = reduced = config.parameter_count
    passes = (ranks - 1) / ranks
    if training.strategy == "ddp":
        return flops, 2 * passes * 4 * reduced  # all-reduce of float32 gradients
    gathered = 2 if dtype == "bf16" else 4
    return flops, passes * (2 * gathered * parameters + 4 * reduced)  # gathered forward and backward, then scattered


def _launch(
    context: Context, options: ScalingOptions, report: Report, ranks: int
) -> tuple[list[pd.DataFrame], dict[tuple[str, int], str]]:
    """Return samples of all trainings on `ranks` ranks, and the reasons for missing ones by (training, ranks)."""
    names = [training.name for training in options.workloads]
    devices = options.device_count(context)
    if ranks > devices:
        return [], {(name, ranks): f"this machine has {devices} devices" for name in names}
    try:
        results = run_on_ranks(context, report, measure_on_rank, {"names": names}, ranks=ranks)
        return [merged(results).samples], {}
    except JobError as error:
        _raise_if_interrupted(error)
        print(f"{ranks} ranks together: {error.what.splitlines()[0]}; running each training in a launch of its own")
    samples, missing = [], {}
    for name in names:
        try:
            results = run_on_ranks(context, report, measure_on_rank, {"names": [name]}, ranks=ranks)
            samples.append(merged(results).samples)
        except JobError as error:
            _raise_if_interrupted(error)
            missing[name, ranks] = f"{LAUNCH_FAILED}: {error.what.splitlines()[0]}"
    return samples, missing


def _raise_if_interrupted(error: JobError) -> None:
    """Raise if the launch was asked to end (SIGTERM or Ctrl-C): then this process must end too."""
    if error.exit_code in (INTERRUPTED, 128 + signal.SIGTERM):
        raise error


def _cells(context: Context, dtype: str, training: ScaledTraining, own: pd.DataFrame, ranks: int, reason: str) -> list[Row]:
    """Return the rows of one training on `ranks` devices; with a reason, rows without value."""
    modes = MODES if ranks > 1 else MODES[:1]
    if reason:
        return [
            context.absent_row(
                training.name,
                "scaling_efficiency",
                reason,
                dtype=dtype,
                params=_params(training, mode, ranks, {}),
                limit_source=_IDEAL,
            )
            for mode in modes
        ]
    rows = [] if ranks == 1 else [_parity_row(context, training, own, ranks)]
    for mode in modes:
        rows += _mode_rows(context, dtype, training, own, mode, ranks)
    return rows


def _mode_rows(context: Context, dtype: str, training: ScaledTraining, own: pd.DataFrame, mode: str, ranks: int) -> list[Row]:
    times = step_times(own, mode, ranks)
    if not len(times):
        why = own.query("ranks == @ranks and mode == @mode and kind == 'missing'").iloc[0]["reason"]
        return [
            context.absent_row(
                training.name,
                "scaling_efficiency",
                why,
                dtype=dtype,
                params=_params(training, mode, ranks, {}),
                limit_source=_IDEAL,
            )
        ]
    step = median_estimate(times)
    facts = own.query("ranks == @ranks and mode == @mode and kind == 'step'").iloc[0]
    tokens = int(facts["tokens"])
    params = _params(training, mode, ranks, {"tokens": tokens})
    floor, source = flops_floor(context.device, dtype, float(facts["least_flops"]) / ranks)
    rate = step.map(lambda seconds: tokens / seconds)
    best = None if floor is None else tokens / floor
    rows = [
        _row(context, training, "step_time_s", step, dtype, params, limit=floor, limit_source=source),
        _row(context, training, "tokens_per_s", rate, dtype, params, limit=best, limit_source=source),
    ]
    if ranks == 1:
        return rows
    rows.append(_share_row(context, dtype, training, own, times, params))
    one = step_times(own, MODES[0], 1)
    if not len(one):
        return rows
    grown = ranks if mode == "weak" else 1
    speedup = independent_ratio_estimate(times, one).map(lambda ratio: grown * ratio)
    efficiency = speedup.map(lambda times_faster: times_faster / ranks)
    return rows + [
        _row(context, training, "speedup", speedup, dtype, params, limit_source=_IDEAL),
        _row(context, training, "scaling_efficiency", efficiency, dtype, params, limit_source=_IDEAL),
    ]


def _share_row(context: Context, dtype: str, training: ScaledTraining, own: pd.DataFrame, times: np.ndarray, params: dict) -> Row:
    alone = step_times(own, params["mode"], params["ranks"], "alone")
    if not len(alone):
        return context.absent_row(
            training.name,
            "communication_share",
            "the twin, which holds the whole state, does not fit",
            dtype=dtype,
            params=params,
        )
    share = independent_ratio_estimate(times, alone).map(lambda ratio: 1 - ratio)
    return _row(context, training, "communication_share", share, dtype, params)


def step_times(own: pd.DataFrame, mode: str, ranks: int, kind: str = "step") -> np.ndarray:
    """Return the seconds of each step on the slowest rank.

    Args:
        own: samples of one training.
        kind: "step", or "alone" for steps without communication.
    """
    chosen = own.query("ranks == @ranks and mode == @mode and kind == @kind")
    return np.asarray(chosen.groupby("index")["time_s"].max())


def _parity_row(context: Context, training: ScaledTraining, own: pd.DataFrame, ranks: int) -> Row:
    losses = own.query("kind == 'parity'").drop_duplicates(["ranks", "index"]).sort_values("index")
    alone, here = (np.asarray(losses.loc[losses["ranks"] == n, "loss"]) for n in (1, ranks))
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
        PARITY,
        dtype="fp32",
        params=params,
    )


def _row(context: Context, training: ScaledTraining, metric: str, estimate: Estimate, dtype: str, params: dict, **columns) -> Row:
    return context.row(training.name, metric, estimate, dtype=dtype, params=params, **columns)


def _params(training: ScaledTraining, mode: str, ranks: int, more: dict) -> dict:
    return {"model": training.model, "strategy": training.strategy, "mode": mode, "ranks": ranks} | more
