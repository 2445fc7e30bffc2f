"""What does a launch cost, eagerly and in a graph, and how small may a kernel be before launching it takes longer?"""

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.rows import sample_frame, timed_columns
from hyperion.experiments.hardware.memory_levels import point_row
from hyperion.measure import CachePoint, LaunchCost, Timing, measure_cache_sweep, measure_launch, worthwhile_size
from hyperion.results import Row

EAGER, GRAPH, COPY = "eager", "graph", "copy"
_NOTHING_FORETELLS = "no datasheet value: a launch is the work of driver, runtime and Python"


def forecast(context: Context) -> list[Forecast]:
    """None of it: no datasheet tells of launches."""
    metrics = ((EAGER, "launch_time_s"), (GRAPH, "launch_time_s"), (COPY, "worthwhile_bytes"))
    return [Forecast(variant=v, metric=metric, estimate=None, basis=_NOTHING_FORETELLS) for v, metric in metrics]


def run(context: Context, report) -> Result:
    """Launches of a kernel with next to nothing to do, then copies by size, and where the two cross."""
    report(0, 2, "launches")
    cost = measure_launch(context.device, time_limit_s=context.sizes["time_limit_s"])
    rows, frames = [], []
    for name, timing in ((EAGER, cost.eager), (GRAPH, cost.graph)):
        rows.append(_launch_row(context, name, cost, timing))
        if timing is not None:
            frames.append(sample_frame(timing, name, "", rows[-1].params))
    report(1, 2, "copies")
    points = measure_cache_sweep(
        "copy",
        context.device,
        sizes=[size * 2**10 for size in context.sizes["copy_kib"]],
        seed=context.seed,
        time_limit_s=context.sizes["time_limit_s"],
    )
    for point in points:
        rows.append(_copy_row(context, point))
        frames.append(sample_frame(point.timing, COPY, point.dtype, rows[-1].params).assign(how=point.how))
    report(2, 2, "done")
    return Result([*rows, _worthwhile_row(context, cost, points)], pd.concat(frames, ignore_index=True))


EXPERIMENT = Experiment(forecast, run)


def _launch_row(context: Context, name: str, cost: LaunchCost, timing: Timing | None) -> Row:
    clock = "host" if name == EAGER else "device"
    params = {"clock": clock, "kernels": cost.eager_calls if name == EAGER else cost.graph_kernels, "cache": "hot"}
    if timing is None:
        return context.row(name, "launch_time_s", None, params=params, value_reason=cost.graph_reason)
    seconds = timing.estimate
    return context.row(
        name,
        "launch_time_s",
        seconds.value,
        params=params,
        limit_source="no limit: no datasheet value",
        **timed_columns(seconds, timing, cost.verification),
    )


def _copy_row(context: Context, point: CachePoint) -> Row:
    """The copy's rate, from which its time follows: its bytes are the working set's."""
    return point_row(context, COPY, point, limit_source="no limit: it is measured where launches weigh, not memory")


def _worthwhile_row(context: Context, cost: LaunchCost, points: list[CachePoint]) -> Row:
    found = worthwhile_size(cost, points)
    # On a CPU a call's time holds both the launch and the work, which are alike where it takes twice a launch.
    params = {"set_equal": found.basis, "launches": 1 if cost.asynchronous else 2}
    if found.bytes is None:
        return context.row(COPY, "worthwhile_bytes", None, params=params, value_reason=found.reason)
    size = found.bytes
    columns = {"n": size.n, "ci_low": size.ci_low, "ci_high": size.ci_high}
    return context.row(COPY, "worthwhile_bytes", size.value, params=params, **columns)
