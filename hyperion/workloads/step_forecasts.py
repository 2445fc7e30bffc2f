"""Predict the time of training steps from the ceilings that a run has measured and from the operators a step dispatches."""

import contextlib
import functools
from collections.abc import Iterable

import torch

from hyperion.chapter.context import Context, Forecast
from hyperion.chapter.rows import stream_ceiling
from hyperion.errors import HyperionError, not_none
from hyperion.measure import (
    FORMATS,
    OPERATIONS,
    CompiledHost,
    MemoryStream,
    ProductRates,
    StepCeilings,
    predict_step,
    shapes_only,
    training_calls,
)
from hyperion.measure.products.dispatch import Call
from hyperion.models import REFERENCE_MODELS, ReferenceModel, TransformerLM, named_config, reference_model
from hyperion.results import Row
from hyperion.training import adamw
from hyperion.workloads.reference_steps import StepVariant, has_layout, step_params, to_channels_last, update_of

NO_CEILINGS = "no estimate: this run has measured no ceilings (01_hardware_exploration)"
# Host seconds of one operator of an eager training step, Python, autograd and dispatch included, for runs that measured
# neither it nor a launch. The GPU's was measured next to an H200; another host of the same GPU takes half as long again.
_OPERATOR_S = {"cpu": 30e-6, "gpu": 19e-6}
# Bare launches that take as long as one operator. On a CPU a launch is a call of the dispatcher, so it is a smaller part.
_LAUNCHES = {"cpu": 20, "gpu": 4}
# Generated Python launches a kernel of compiled code, without autograd and dispatch: assumed to take half an operator.
_KERNEL_OPERATORS = 0.5
# A step dispatches the same operators at every batch above 1. At batch 1 PyTorch transposes fewer tensors.
_MANY = 32
_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def forecast_reference_step(context: Context, name: str, batch: int, variant: StepVariant) -> list[Forecast]:
    """Predict samples per second and seconds of a reference model's step, from the run's ceilings and from shapes alone.

    The layout does not enter: it moves the same bytes.
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
    shared: dict = {"variant": name, "dtype": dtype, "params": step_params(batch) | variant.params, "basis": basis}
    rate = None if estimate is None else batch / estimate
    return [
        Forecast(metric="samples_per_s", estimate=rate, **shared),
        Forecast(metric="step_time_s", estimate=estimate, **shared),
    ]


def step_ceilings(context: Context, dtype: str) -> tuple[StepCeilings | None, str]:
    """Return (the ceilings for steps in a dtype, the source of the host's time), or (None, why there are none).

    In tf32 the products of float32 numbers have the rates of tf32. A step in 16 bits has few float32 products; if the run
    has no rate for them, they get the rate of the others.
    """
    units = context.device.compute_units or 1
    measured = {name: _products(context.upstream, dtype if dtype == "tf32" else name) for name in (dtype, "fp32")}
    stream = stream_ceiling(context.upstream)
    if not measured[dtype] or stream is None:
        return None, NO_CEILINGS
    rates = {name: ProductRates.fit(points or measured[dtype], units) for name, points in measured.items()}
    operator_s, host = operator_time(context)
    convolution_s = _operator_cost(context, "convolution", "operator_time_s")
    # Noise may make the measured overhead negative.
    once_s = max(0.0, _operator_cost(context, "once a step", "step_overhead_s") or 0.0)
    overlapped = context.device.kind != "cpu"
    return StepCeilings(rates, _memory(context.upstream, stream), operator_s, overlapped, convolution_s, once_s), host


def host_time(context: Context, name: str, batch: int, dtype: str) -> tuple[float, str]:
    """Return (the host's seconds for an eager step of a reference model, their source).

    Raises:
        ValueError: the run has no ceilings.
    """
    ceilings, source = step_ceilings(context, dtype)
    return not_none(ceilings).host_s(captured_step(name, 1 if batch == 1 else _MANY, dtype)), source


def operator_time(context: Context) -> tuple[float, str]:
    """Return (the host's seconds for an operator of an eager step, their source).

    Measured in this run, else derived from its launches, else assumed.
    """
    measured = _operator_cost(context, "operator", "operator_time_s")
    if measured is not None:
        return measured, "the host's time of an operator measured in steps of tiny tensors"
    kind = "cpu" if context.device.kind == "cpu" else "gpu"
    launch = _last_row(context, "launch_cost", "eager", "launch_time_s")
    if launch is None:
        return _OPERATOR_S[kind], "the host's time of an operator assumed, no launch was measured in this run either"
    return _LAUNCHES[kind] * not_none(launch.value), f"an operator taken as {_LAUNCHES[kind]} of this run's measured launches"


def compiled_host(context: Context, blocks: int) -> tuple[CompiledHost, str]:
    """Return (the host's work for a step whose blocks are compiled, the source of a block's entry cost).

    A measured block includes the launches of its kernels. The step counts launches separately, so they are subtracted.
    """
    kernel_s = _KERNEL_OPERATORS * operator_time(context)[0]
    block = _last_row(context, "operator_cost", "compiled block", "block_time_s")
    if block is None:
        return CompiledHost(kernel_s), "entering a compiled block taken for nothing, it was not measured in this run"
    entry_s = max(0.0, not_none(block.value) - block.params["kernels"] * kernel_s)
    return CompiledHost(kernel_s, blocks, entry_s), "a compiled block as measured with small tensors, less its kernels"


def _operator_cost(context: Context, variant: str, metric: str) -> float | None:
    row = _last_row(context, "operator_cost", variant, metric)
    return None if row is None else row.value


def _last_row(context: Context, experiment: str, variant: str, metric: str) -> Row | None:
    """Return the run's last row that has a value, None if there is none."""
    rows = [r for r in context.upstream if (r.experiment, r.variant, r.metric) == (experiment, variant, metric)]
    return next((row for row in reversed(rows) if row.value is not None), None)


def _products(rows: Iterable[Row], dtype: str) -> list[tuple[int, int, int, float]]:
    """Return (M, N, K, TFLOPS) of the run's products with cold caches."""
    return [
        (row.params["m"], row.params["n"], row.params["k"], row.value)
        for row in rows
        if (row.experiment, row.metric, row.dtype, row.hot) == ("gemm", "gemm_tflops", dtype, False) and row.value is not None
    ]


def _memory(rows: Iterable[Row], stream: Row) -> MemoryStream:
    """Fit latency and bandwidth to the run's streams; streams of a single size give a bandwidth without latency."""
    streams = [
        (OPERATIONS[row.variant].arrays * row.params["elements"] * FORMATS[row.dtype].bytes, row.value)
        for row in rows
        if (row.experiment, row.metric) == ("bandwidth", "bandwidth_gb_s")
        and row.variant in OPERATIONS
        and row.value is not None
        and not row.hot
    ]
    several = len({size for size, _ in streams}) > 1
    return MemoryStream.fit(streams) if several else MemoryStream(not_none(stream.value), 0.0)


@functools.cache
def captured_step(name: str, batch: int, dtype: str) -> tuple[Call, ...]:
    """Return the operators that a training step dispatches: forward with loss, backward, update. Nothing is computed.

    Takes some seconds of a slow core.

    Args:
        name: a reference model, or a Transformer LM's configuration ("gpt2_124m"), which trains on its whole context.
        batch: samples; sequences for a Transformer LM.
        dtype: fp32, or a dtype of autocast: bf16, fp16.

    Raises:
        HyperionError: no model has that name, or the dtype is another one. A step in tf32 is captured in fp32.
    """
    if dtype not in _AUTOCAST:
        raise HyperionError(
            f"a step cannot be captured in {dtype}",
            where=f"captured_step of {name}",
            next_step=f"use one of {', '.join(_AUTOCAST)}",
        )
    if name in REFERENCE_MODELS:
        return tuple(_reference_step(reference_model(name), batch, dtype))
    return tuple(_language_step(name, batch, dtype))


def _reference_step(model: ReferenceModel, batch: int, dtype: str) -> list[Call]:
    with torch.device("meta"):
        module = model.build()
    layout = torch.preserve_format
    if has_layout(model):
        layout = torch.channels_last
        to_channels_last(module)
    with shapes_only(module):
        inputs = torch.empty(batch, *model.sample_shape).contiguous(memory_format=layout)
        targets = model.targets(inputs, torch.Generator())

        def loss() -> torch.Tensor:
            with _autocast(dtype):
                return model.loss(module(inputs), targets)

        return training_calls(loss, update_of(model).make(module))


def _language_step(name: str, batch: int, dtype: str) -> list[Call]:
    config = named_config(name)
    with torch.device("meta"):
        module = TransformerLM(config)
    with shapes_only(module):
        inputs = torch.zeros(batch, config.context, dtype=torch.int64)

        def loss() -> torch.Tensor:
            with _autocast(dtype):
                return module.loss(inputs, inputs)

        return training_calls(loss, adamw(module, 1e-4))


def _autocast(dtype: str) -> contextlib.AbstractContextManager:
    # Tensors without values count as tensors of a CPU, whichever device the step is meant for.
    return torch.autocast("cpu", _AUTOCAST[dtype], enabled=dtype != "fp32")
