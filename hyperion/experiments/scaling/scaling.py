"""How does training speed scale with the number of devices?

The experiment starts new ranks for each number of devices. This is called a launch. In each launch, the ranks first run float32
steps. The losses of these steps must be the same on any number of devices (parity). Then the ranks time steps with and without
communication, and profile a few steps with communication (`rank_steps`). `scaling_rows` computes the rows from these samples.

On a GPU, the profiled steps also say whether the host limits the speed: a step of many short kernels takes as long as the host
needs to launch them, on any number of devices. Such a step says nothing about the links between the devices.
"""

import signal

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.variants import merged, run_on_ranks
from hyperion.experiments.scaling.efficiency_forecast import efficiency_forecast
from hyperion.experiments.scaling.rank_steps import measure_on_rank
from hyperion.experiments.scaling.scaled_training import ScalingOptions
from hyperion.experiments.scaling.scaling_rows import workload_rows
from hyperion.processes import JobError
from hyperion.processes.job import INTERRUPTED

LAUNCH_FAILED = "the launch failed"


def forecast(context: Context) -> list[Forecast]:
    """Predict the weak-scaling efficiency on all devices. On one device there is none, so the prediction has no value.

    The prediction is computed from the bytes that each rank sends, and from the compute and communication rates that chapters 1.1
    and 1.3 measured.
    """
    options = ScalingOptions.of(context)
    devices, dtype = options.device_count(context), options.dtype(context)
    ranks = max(count for count in options.counts if count <= devices)
    if ranks > 1:
        return [efficiency_forecast(context, training, ranks, dtype) for training in options.workloads]
    basis = f"no estimate: {_this_machine_has(devices)}"
    return [
        Forecast(training.name, "scaling_efficiency", None, basis, dtype=dtype, params=training.params("weak", count))
        for training in options.workloads
        for count in options.counts[1:2]
    ]


def run(context: Context, report: Report) -> Result:
    """Run the training workloads on each number of devices. If the ranks fail, the rows have a reason instead of a value."""
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
            rows += workload_rows(context, options.dtype(context), training, own, ranks, missing.get((training.name, ranks), ""))
    return Result(rows, frame)


EXPERIMENT = Experiment(forecast, run, forecast_reads=("gemm", "bandwidth", "collectives"), options=ScalingOptions)


def _launch(
    context: Context, options: ScalingOptions, report: Report, ranks: int
) -> tuple[list[pd.DataFrame], dict[tuple[str, int], str]]:
    """Start `ranks` ranks and run all workloads on them.

    Return their samples, and a dict that maps (workload, number of ranks) to the reason why its samples are missing.
    """
    names = [training.name for training in options.workloads]
    devices = options.device_count(context)
    if ranks > devices:
        return [], {(name, ranks): _this_machine_has(devices) for name in names}
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


def _this_machine_has(devices: int) -> str:
    return "this machine has one device" if devices == 1 else f"this machine has {devices} devices"


def _raise_if_interrupted(error: JobError) -> None:
    """Raise `error` again if SIGTERM or Ctrl-C stopped the launch. In this case, this process must also end."""
    if error.exit_code in (INTERRUPTED, 128 + signal.SIGTERM):
        raise error
