"""How long steps should take, by the ceilings that a run has measured and by what the steps dispatch."""

from collections.abc import Iterable

from hyperion.chapter.context import Context, Forecast
from hyperion.chapter.rows import stream_ceiling
from hyperion.experiments.steps.operator_cost import BLOCK, CONVOLUTION, ONCE, PLAIN
from hyperion.experiments.steps.reference_steps import step_params
from hyperion.experiments.steps.step_variants import StepVariant
from hyperion.measure import FORMATS, OPERATIONS, CompiledHost, MemoryStream, ProductRates, StepCeilings, predict_step
from hyperion.models import reference_model
from hyperion.results import Row
from hyperion.workloads.captured_steps import captured_step

NO_CEILINGS = "no estimate: this run has measured no ceilings (01_hardware_exploration)"
# Seconds of the host for an operator of an eager training step, Python, autograd and dispatch included, where the run has
# measured neither that nor a launch; and how many bare launches it is. The first was seen beside an H200 (19 us; another
# host of that GPU takes half as long again); a CPU's launch, a call of the dispatcher and no more, is less of its operator.
_OPERATOR_S = {"cpu": 30e-6, "gpu": 19e-6}
_LAUNCHES = {"cpu": 20, "gpu": 4}
# A kernel of compiled code is launched by generated Python, without autograd and dispatch: taken as half an operator.
_KERNEL_OPERATORS = 0.5
_MANY = 32  # a step has as many operators at every batch beyond 1, at which PyTorch has fewer tensors to turn round


def forecast_reference_step(context: Context, name: str, batch: int, variant: StepVariant) -> list[Forecast]:
    """Samples per second, then seconds, of a reference model's step, from the run's ceilings and the shapes alone.

    A layout moves no other bytes, so that its estimate is that of the step without it.
    """
    estimate, basis, dtype = None, NO_CEILINGS, variant.dtype
    ceilings, host = step_ceilings(context, dtype)
    if ceilings is not None:
        calls = captured_step(name, batch, "fp32" if dtype == "tf32" else dtype)
        compiled = None
        if variant.compiled:
            compiled, entry = compiled_host(context, len(reference_model(name).layout().blocks))
            host = f"{host}; {entry}"
        predicted = predict_step(calls, ceilings, compiled)
        estimate, basis = predicted.total_s, f"{predicted.basis} ({host})"
    shared = {"variant": name, "dtype": dtype, "params": step_params(batch) | variant.params, "basis": basis}
    rate = None if estimate is None else batch / estimate
    return [
        Forecast(metric="samples_per_s", estimate=rate, **shared),
        Forecast(metric="step_time_s", estimate=estimate, **shared),
    ]


def step_ceilings(context: Context, dtype: str) -> tuple[StepCeilings | None, str]:
    """(the ceilings that a prediction of steps in a dtype rests on, where the host's time comes from).

    None without rates of that dtype or without streams. In tf32 the products of float32 numbers have the rates of tf32. A
    step in half precision has few products left in float32: where the run has no rate of those, they are counted at the
    rate of the others.
    """
    units = context.device.compute_units or 1
    measured = {name: _products(context.upstream, dtype if dtype == "tf32" else name) for name in (dtype, "fp32")}
    stream = stream_ceiling(context.upstream)
    if not measured[dtype] or stream is None:
        return None, NO_CEILINGS
    rates = {name: ProductRates.fit(points or measured[dtype], units) for name, points in measured.items()}
    operator_s, host = operator_time(context)
    convolution = _operator_cost(context, CONVOLUTION, "operator_time_s")
    convolution_s = None if convolution is None else convolution.value
    once = _operator_cost(context, ONCE, "step_overhead_s")
    once_s = 0.0 if once is None else max(0.0, once.value)  # less than nothing is noise
    overlapped = context.device.kind != "cpu"
    return StepCeilings(rates, _memory(context.upstream, stream), operator_s, overlapped, convolution_s, once_s), host


def host_time(context: Context, name: str, batch: int, dtype: str) -> tuple[float, str]:
    """(the host's seconds for an eager step of a reference model, how they are known); ceilings must be there."""
    ceilings, told = step_ceilings(context, dtype)
    return ceilings.host_s(captured_step(name, 1 if batch == 1 else _MANY, dtype)), told


def operator_time(context: Context) -> tuple[float, str]:
    """(host seconds for an operator of an eager step, how they are known).

    Measured in this run, else from its launches, else assumed.
    """
    measured = _operator_cost(context, PLAIN, "operator_time_s")
    if measured is not None:
        return measured.value, "the host's time of an operator measured in steps of tiny tensors"
    kind = "cpu" if context.device.kind == "cpu" else "gpu"
    launch = _last(context, "launch_cost", "eager", "launch_time_s")
    if launch is None:
        return _OPERATOR_S[kind], "the host's time of an operator assumed, no launch was measured in this run either"
    return _LAUNCHES[kind] * launch.value, f"an operator taken as {_LAUNCHES[kind]} of this run's measured launches"


def compiled_host(context: Context, blocks: int) -> tuple[CompiledHost, str]:
    """(what the host does for a step whose blocks are compiled, how the cost of entering one is known).

    A measured block holds the launches of its kernels, which count by themselves: what is left is its entry.
    """
    kernel_s = _KERNEL_OPERATORS * operator_time(context)[0]
    block = _operator_cost(context, BLOCK, "block_time_s")
    if block is None:
        return CompiledHost(kernel_s), "entering a compiled block taken for nothing, it was not measured in this run"
    entry_s = max(0.0, block.value - block.params["kernels"] * kernel_s)
    return CompiledHost(kernel_s, blocks, entry_s), "a compiled block as measured with small tensors, less its kernels"


def _operator_cost(context: Context, variant: str, metric: str) -> Row | None:
    return _last(context, "operator_cost", variant, metric)


def _last(context: Context, experiment: str, variant: str, metric: str) -> Row | None:
    """The run's row, None where it has none or one without a value."""
    rows = [r for r in context.upstream if (r.experiment, r.variant, r.metric) == (experiment, variant, metric)]
    return next((row for row in reversed(rows) if row.value is not None), None)


def _products(rows: Iterable[Row], dtype: str) -> list[tuple[int, int, int, float]]:
    """(M, N, K, TFLOPS) of the run's products, with cold caches as all ceilings."""
    return [
        (row.params["m"], row.params["n"], row.params["k"], row.value)
        for row in rows
        if (row.experiment, row.metric, row.dtype, row.hot) == ("gemm", "gemm_tflops", dtype, False) and row.value is not None
    ]


def _memory(rows: Iterable[Row], stream: Row) -> MemoryStream:
    """Latency and bandwidth of the run's streams; of one size alone its rate, and no latency."""
    streams = [
        (OPERATIONS[row.variant].arrays * row.params["elements"] * FORMATS[row.dtype].bytes, row.value)
        for row in rows
        if (row.experiment, row.metric) == ("bandwidth", "bandwidth_gb_s")
        and row.variant in OPERATIONS
        and row.value is not None
        and not row.hot
    ]
    several = len({size for size, _ in streams}) > 1
    return MemoryStream.fit(streams) if several else MemoryStream(stream.value, 0.0)
