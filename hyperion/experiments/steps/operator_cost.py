"""What does the host of this machine pay for a training step: for an operator, a convolution, a compiled block, and once?

Hosts of the same GPU differ by a factor of two in this, and wherever kernels are short it decides how long a step takes.
"""

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.rows import sample_frame, timed_columns
from hyperion.chapter.variants import merged, run_variant
from hyperion.hardware import Device
from hyperion.measure import measure_block_cost, measure_operator_cost
from hyperion.measure.steps.compilation import missing_compiler, probe_vector_instructions

PLAIN, CONVOLUTION, ONCE, BLOCK = "operator", "convolution", "once a step", "compiled block"
_NO_LIMIT = "no limit: no data sheet tells of Python, autograd and dispatch"
_NOTHING_FORETELLS = "no data sheet value: it is the work of Python, autograd, dispatcher and driver on this host"


def forecast(context: Context) -> list[Forecast]:
    """None of it: no data sheet tells of a host's work."""
    metrics = {PLAIN: "operator_time_s", CONVOLUTION: "operator_time_s", ONCE: "step_overhead_s", BLOCK: "block_time_s"}
    return [Forecast(variant=v, metric=metric, estimate=None, basis=_NOTHING_FORETELLS) for v, metric in metrics.items()]


def run(context: Context, report) -> Result:
    """Eager operators, then, where the profile names a format for it, a compiled block, in a process of its own."""
    report(0, 2, "eager steps")
    eager = _operators(context)
    report(1, 2, "compiled blocks")
    dtype = context.sizes.get("compiled", "")
    if reason := _why_not(context.device, dtype):
        row = context.row(BLOCK, "block_time_s", None, dtype=dtype, params=_clock(), value_reason=reason)
        block = Result([row], pd.DataFrame())
    else:
        block = run_variant(context, _unheard, measure_block)
    report(2, 2, "done")
    return merged([eager, block])


EXPERIMENT = Experiment(forecast, run)


def measure_block(context: Context, report) -> Result:
    """The worker's side: what a compiled block costs, and its compilation."""
    probe_vector_instructions(context.device, context.workspace)
    dtype = context.sizes["compiled"]
    cost = measure_block_cost(context.device, dtype, time_limit_s=context.sizes["time_limit_s"])
    seconds, params = cost.time_s, _clock() | {"kernels": cost.kernels, "blocks": cost.blocks}
    columns = timed_columns(seconds, cost.many, cost.verification)
    rows = [
        context.row(BLOCK, "block_time_s", seconds.value, dtype=dtype, params=params, limit_source=_NO_LIMIT, **columns),
        context.row(BLOCK, "compile_time_s", cost.compile_time_s, dtype=dtype, params=_clock()),
    ]
    series = (("few", cost.few), ("many", cost.many))
    frames = [sample_frame(timing, BLOCK, dtype, params).assign(blocks=name) for name, timing in series]
    return Result(rows, pd.concat(frames, ignore_index=True))


def _operators(context: Context) -> Result:
    cost = measure_operator_cost(context.device, time_limit_s=context.sizes["time_limit_s"])
    rows, frames = [], []
    for variant, metric, seconds, steps, told in (
        (PLAIN, "operator_time_s", cost.time_s, cost.layers, {"operators": cost.operators}),
        (
            CONVOLUTION,
            "operator_time_s",
            cost.convolution_time_s,
            cost.convolving,
            {"operators": cost.convolutions, "beside": cost.beside},
        ),
        (ONCE, "step_overhead_s", cost.once_s, (), {"operators": cost.layers[0].plain}),
    ):
        params = _clock() | told
        if steps:
            params["parts"] = steps[1].parts - steps[0].parts
        columns = timed_columns(seconds, (steps or cost.layers)[1].timing, cost.verification)
        rows.append(context.row(variant, metric, seconds.value, params=params, limit_source=_NO_LIMIT, **columns))
        frames += [sample_frame(step.timing, variant, "", params).assign(parts=step.parts) for step in steps]
    return Result(rows, pd.concat(frames, ignore_index=True))


def _unheard(done: int, total: int, note: str = "") -> None:
    """The worker's own count is none of this experiment's."""


def _clock() -> dict:
    return {"clock": "host", "cache": "hot"}


def _why_not(device: Device, dtype: str) -> str:
    if not dtype:
        return "left out by this profile: it takes a cold compilation"
    supported, how = device.supports(dtype)
    if not supported:
        return f"unsupported: {how}"
    missing = missing_compiler(device)
    return f"unavailable: {missing}" if missing else ""
