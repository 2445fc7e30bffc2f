"""How much host time does a training step need?

The host is the CPU that runs Python and PyTorch and launches the kernels. The experiment measures the host time of one operator,
one convolution and one compiled block, and the host time of a step outside its operators. Hosts with the same GPU can differ by a
factor of two. If kernels are short, the host time determines the step time.
"""

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import all_samples, sample_frame, timed_columns
from hyperion.chapter.variants import merged, run_variant
from hyperion.hardware import Device
from hyperion.measure import measure_block_cost, measure_operator_cost
from hyperion.measure.steps.compilation import missing_compiler, probe_vector_instructions
from hyperion.results import Row

# Variant names of the rows. hyperion/workloads/reference_steps.py looks up the rows by these names.
PLAIN, CONVOLUTION, ONCE, BLOCK = "operator", "convolution", "once a step", "compiled block"
_NO_LIMIT = "no limit: no data sheet covers Python, autograd and dispatch"
_NO_ESTIMATE = "no data sheet states the time that Python, autograd, dispatcher and driver take on this host"


class OperatorCostOptions(Options):
    """Options for the `operator_cost` experiment.

    Args:
        time_limit_s: timing budget in seconds for each of the tiny networks.
        compiled: dtype of the compiled blocks. An empty string omits them, because compilation with cold caches is slow.
    """

    time_limit_s: float
    compiled: str = ""


def forecast(context: Context) -> list[Forecast]:
    """Return forecasts without estimates, because no data sheet states host costs."""
    metrics = {PLAIN: "operator_time_s", CONVOLUTION: "operator_time_s", ONCE: "step_overhead_s", BLOCK: "block_time_s"}
    dtypes = {BLOCK: OperatorCostOptions.of(context).compiled}
    return [Forecast(v, metric, None, _NO_ESTIMATE, dtype=dtypes.get(v, "")) for v, metric in metrics.items()]


def run(context: Context, report: Report) -> Result:
    """Time eager operators and, if the profile asks for it, a compiled block in a separate process."""
    options = OperatorCostOptions.of(context)
    report(0, 2, "eager steps")
    eager = _measure_operators(context, options)
    report(1, 2, "compiled blocks")
    if reason := _why_not(context.device, options.compiled):
        row = context.absent_row(BLOCK, "block_time_s", reason, dtype=options.compiled, params=_clock())
        block = Result([row], pd.DataFrame())
    else:
        block = run_variant(context, lambda done, total, note: None, measure_block)
    report(2, 2, "done")
    return merged([eager, block])


EXPERIMENT = Experiment(forecast, run, options=OperatorCostOptions)


def measure_block(context: Context, report: Report) -> Result:
    """Measure the host time of a compiled block and its compilation time. Runs in a worker process."""
    options = OperatorCostOptions.of(context)
    # Inductor tests the C++ compiler once per machine, which must not count as compilation of the block.
    probe_vector_instructions(context.device, context.workspace)
    cost = measure_block_cost(context.device, options.compiled, time_limit_s=options.time_limit_s)
    seconds, params = cost.time_s, _clock() | {"kernels": cost.kernels, "blocks": cost.blocks}
    columns = timed_columns(seconds, cost.many, cost.verification)
    shared = {"dtype": options.compiled}
    rows = [
        context.row(BLOCK, "block_time_s", seconds.value, params=params, limit_source=_NO_LIMIT, **shared, **columns),
        context.row(BLOCK, "compile_time_s", cost.compile_time_s, params=_clock(), **shared),
    ]
    series = (("few", cost.few), ("many", cost.many))
    return Result(
        rows, all_samples([sample_frame(timing, BLOCK, options.compiled, params).assign(blocks=name) for name, timing in series])
    )


def _measure_operators(context: Context, options: OperatorCostOptions) -> Result:
    cost = measure_operator_cost(context.device, time_limit_s=options.time_limit_s)
    convolutions = {"operators": cost.convolutions, "beside": cost.other_operators}
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    for variant, metric, seconds, steps, counts in (
        (PLAIN, "operator_time_s", cost.time_s, cost.layers, {"operators": cost.operators}),
        (CONVOLUTION, "operator_time_s", cost.convolution_time_s, cost.convolving, convolutions),
        (ONCE, "step_overhead_s", cost.once_s, (), {"operators": cost.layers[0].plain}),
    ):
        params = _clock() | counts
        if steps:
            params["parts"] = steps[1].parts - steps[0].parts
        columns = timed_columns(seconds, (steps or cost.layers)[1].timing, cost.verification)
        rows.append(context.row(variant, metric, seconds.value, params=params, limit_source=_NO_LIMIT, **columns))
        frames += [sample_frame(step.timing, variant, "", params).assign(parts=step.parts) for step in steps]
    return Result(rows, all_samples(frames))


def _clock() -> dict:
    return {"clock": "host", "cache": "hot"}


def _why_not(device: Device, dtype: str) -> str:
    """Return the reason why compiled blocks are not measured, or an empty string if they are."""
    if not dtype:
        return "left out by this profile: it takes a cold compilation"
    supported, how = device.supports(dtype)
    if not supported:
        return f"unsupported: {how}"
    missing = missing_compiler(device)
    return f"unavailable: {missing}" if missing else ""
