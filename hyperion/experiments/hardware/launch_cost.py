"""How long does a kernel launch take in eager mode and in a CUDA graph? At what size does a copy take as long as its launch?"""

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import all_samples, sample_frame, timed_row
from hyperion.experiments.hardware.memory_levels import point_row
from hyperion.measure import CachePoint, LaunchCost, Timing, measure_cache_sweep, measure_launch, worthwhile_size
from hyperion.results import Row
from hyperion.units import KIB

EAGER, GRAPH, COPY = "eager", "graph", "copy"
_NO_ESTIMATE = "no datasheet value: a launch is the work of driver, runtime and Python"


class LaunchCostOptions(Options):
    """Options for the `launch_cost` experiment.

    Args:
        copy_kib: working sets in KiB of the copies that are compared with a launch. A working set is the number of bytes that one
            copy reads and writes.
        time_limit_s: timing budget in seconds for the launches and for each copy.
    """

    copy_kib: tuple[int, ...]
    time_limit_s: float


def forecast(context: Context) -> list[Forecast]:
    """Return forecasts without estimates, because no data sheet states launch times."""
    metrics = ((EAGER, "launch_time_s"), (GRAPH, "launch_time_s"), (COPY, "worthwhile_bytes"))
    return [Forecast(variant, metric, None, _NO_ESTIMATE) for variant, metric in metrics]


def run(context: Context, report: Report) -> Result:
    """Time launches of an almost empty kernel and copies of several sizes.

    From these times, compute the size at which a copy takes as long as its launch.
    """
    options = LaunchCostOptions.of(context)
    report(0, 2, "launches")
    cost = measure_launch(context.device, time_limit_s=options.time_limit_s)
    rows, frames = [], []
    for name, timing in ((EAGER, cost.eager), (GRAPH, cost.graph)):
        rows.append(_launch_row(context, name, cost, timing))
        if timing is not None:
            frames.append(sample_frame(timing, name, "", rows[-1].params))
    report(1, 2, "copies")
    points = measure_cache_sweep(
        "copy",
        context.device,
        sizes=[size * KIB for size in options.copy_kib],
        seed=context.seed,
        time_limit_s=options.time_limit_s,
    )
    for point in points:
        # The row stores the rate of a copy. Its time follows from the rate and the working set.
        limit_source = "no limit: it is measured where launches weigh, not memory"
        rows.append(point_row(context, COPY, point, limit_source=limit_source))
        frames.append(sample_frame(point.timing, COPY, point.dtype, rows[-1].params).assign(how=point.how))
    report(2, 2, "done")
    return Result([*rows, _worthwhile_row(context, cost, points)], all_samples(frames))


EXPERIMENT = Experiment(forecast, run, options=LaunchCostOptions)


def _launch_row(context: Context, name: str, cost: LaunchCost, timing: Timing | None) -> Row:
    clock = "host" if name == EAGER else "device"
    params = {"clock": clock, "kernels": cost.eager_calls if name == EAGER else cost.graph_kernels, "cache": "hot"}
    if timing is None:
        return context.absent_row(name, "launch_time_s", cost.graph_reason, params=params)
    seconds = timing.estimate
    return timed_row(
        context,
        name,
        "launch_time_s",
        seconds,
        timing,
        cost.verification,
        limit=(None, "no limit: no datasheet value"),
        params=params,
    )


def _worthwhile_row(context: Context, cost: LaunchCost, points: list[CachePoint]) -> Row:
    found = worthwhile_size(cost, points)
    # On a CPU the time of a call includes the launch, so work and launch are equal when the call takes twice the launch time.
    params = {"set_equal": found.basis, "launches": 1 if cost.asynchronous else 2}
    if found.bytes is None:
        return context.absent_row(COPY, "worthwhile_bytes", found.reason, params=params)
    return context.row(COPY, "worthwhile_bytes", found.bytes, params=params)
