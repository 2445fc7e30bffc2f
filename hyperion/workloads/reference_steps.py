"""Run and time training steps of the reference models, build their result rows, and forecast the step time.

A reference model is a well-known model such as ResNet-50. A forecast is computed from the rates that the run has measured (its
ceilings) and from the operators that the step dispatches.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from hyperion.chapter.context import Context, Forecast
from hyperion.chapter.efficiency import REFERENCE_STEP, with_interval
from hyperion.chapter.rows import NO_CEILINGS, sample_frame, stream_ceiling, timed_row
from hyperion.errors import HyperionError, not_none
from hyperion.hardware import Device, lookup
from hyperion.measure import (
    FORMATS,
    OPERATIONS,
    CompiledHost,
    MemoryStream,
    Phase,
    ProductRates,
    StepCeilings,
    StepTiming,
    Verification,
    predict_step,
    shapes_only,
    time_step,
    training_calls,
)
from hyperion.measure.clock.timing import MINIMUM_SAMPLES
from hyperion.measure.products.dispatch import Call
from hyperion.models import REFERENCE_MODELS, ReferenceModel, TransformerLM, named_config, reference_model
from hyperion.models.reference import Encoder, ResNet50, VisionTransformer
from hyperion.results import Row
from hyperion.training import adamw, choose_precision, sgd_nesterov
from hyperion.training.recipe import AUTOCAST
from hyperion.units import GIB
from hyperion.workloads.training_rows import flops_floor, speed_rows
from hyperion.workloads.workloads import ADAMW_BYTES_A_PARAMETER, SGD_BYTES_A_PARAMETER

EAGER, COMPILED = "eager", "compiled"
CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels_last"
LEAST_MEMORY = "weights, gradients and moments in float32, and the batch"
# Default host time in seconds for one operator of an eager training step, including Python, autograd and dispatch. It is used
# only if the run has measured neither this time nor the launch time. The GPU value was measured on the host of an H200; another
# H200's host takes 1.5 times as long.
_OPERATOR_S = {"cpu": 30e-6, "gpu": 19e-6}
# Host time of one operator in an eager step, divided by the time of one kernel launch. On a CPU, a launch is only a call of
# PyTorch's dispatcher.
_LAUNCHES = {"cpu": 20, "gpu": 4}
# Host time of launching one kernel from compiled code, divided by the host time of one operator. Compiled code launches kernels
# without autograd and dispatch. The value is an assumption.
KERNEL_OPERATORS = 0.5
# Batch size at which the operators of a step are counted. The count is the same for every batch size above 1. At batch size 1,
# PyTorch transposes fewer tensors.
_MANY = 32
_CAPTURED_DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class StepVariant:
    """Variant of a training step.

    Args:
        dtype: fp32, tf32, bf16 or fp16, see `hyperion.training.Precision`.
        channels_last: whether images and convolution kernels are stored with the channels innermost. PyTorch's default is NCHW.
        compiled: whether the forward and backward pass of each block of the model are compiled with Inductor.
    """

    dtype: str
    channels_last: bool = False
    compiled: bool = False

    @property
    def params(self) -> dict:
        """Row params that distinguish this variant from other variants with the same dtype."""
        layout = CHANNELS_LAST if self.channels_last else CONTIGUOUS
        return {"layout": layout, "mode": COMPILED if self.compiled else EAGER}

    def __str__(self) -> str:
        words = [self.dtype, CHANNELS_LAST if self.channels_last else "", COMPILED if self.compiled else ""]
        return " ".join(word for word in words if word)


def has_layout(model: ReferenceModel) -> bool:
    """Return True if channels_last affects the model, i.e. for convolutional networks.

    A Vision Transformer has a single convolution; all its other layers work on sequences.
    """
    return isinstance(model, ResNet50)


def to_channels_last(module: nn.Module) -> None:
    """Convert the module's convolution kernels to the channels_last memory format."""
    module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # torch's annotations omit the argument


@dataclass(frozen=True)
class Update:
    """Standard optimizer of one kind of reference model, with its memory and its memory traffic per parameter.

    Args:
        make: function that takes a module and returns the optimizer of its parameters.
        traffic_bytes: bytes that an update reads and writes per parameter.
        held_bytes: bytes of the weight, gradient and moments per parameter, in float32.
    """

    make: Callable[[nn.Module], torch.optim.Optimizer]
    traffic_bytes: int
    held_bytes: int


# The learning rates are low, so training needs no warm-up. These models are not trained to the end.
_SGD = Update(lambda module: sgd_nesterov(module, 1e-3), SGD_BYTES_A_PARAMETER, 3 * 4)
_ADAMW = Update(lambda module: adamw(module, 1e-4), ADAMW_BYTES_A_PARAMETER, 4 * 4)
_UPDATES: dict[type, Update] = {ResNet50: _SGD, VisionTransformer: _ADAMW, Encoder: _ADAMW}


def update_of(model: ReferenceModel) -> Update:
    """Return the standard optimizer of a reference model."""
    return _UPDATES[type(model)]


class TrainingStep:
    """A training step on one batch that stays on the device. Calling it runs forward pass, loss, backward pass and update.

    The inputs are standard normal numbers, and the model's configuration defines the targets. Every step uses the same batch, so
    the loss falls if the step is correct. If the variant is compiled, the forward and backward pass of each block are compiled at
    its first call, and equal blocks share the compiled code. Loss and update are not compiled.

    Args:
        name: name of the reference model.
        batch: number of samples in the batch.
        variant: variant of the step, or only its dtype. With only a dtype, the step is eager and uses the memory format that is
            faster for the model.
        device: device of the step.
        seed: seed of weights, inputs and targets.

    Attributes:
        model: configuration of the reference model.
        module: module being trained.
        losses: losses of all steps, as scalar tensors on the device. Reading a value waits for the device.
    """

    def __init__(self, name: str, batch: int, variant: str | StepVariant, device: Device, seed: int = 0):
        self.model = reference_model(name)
        if isinstance(variant, str):
            variant = StepVariant(variant, channels_last=has_layout(self.model))
        self._device, self._precision = device, choose_precision(device, variant.dtype)
        # Weights come from the default generator. Inputs and targets have a separate generator, so they do not depend on how many
        # numbers the model draws.
        torch.manual_seed(seed)
        with torch.device(device.torch_device):
            self.module = self.model.build()
            generator = torch.Generator(device.torch_device).manual_seed(seed)
            inputs = torch.randn(batch, *self.model.sample_shape, generator=generator)
            self._targets = self.model.targets(inputs, generator)
        if variant.channels_last:
            to_channels_last(self.module)
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        self._inputs, self._optimizer = inputs, update_of(self.model).make(self.module)
        # Compile blocks instead of the whole model: equal blocks share one compiled graph, so compilation takes less time.
        for block in map(self.module.get_submodule, self.model.layout().blocks if variant.compiled else ()):
            # Compile for fixed shapes. Otherwise, after a second batch size the compiler would generate slower code for arbitrary
            # shapes.
            block.forward = torch.compile(block.forward, dynamic=False)
        self.losses: list[Tensor] = []

    def __call__(self, phase: Phase) -> None:
        with phase("forward"), self._precision.autocast(self._device):
            loss = self.model.loss(self.module(self._inputs), self._targets)
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            self._optimizer.step()
            # Reset the gradients within the phase "optimizer", because the metric `optimizer_time_s` includes this work.
            self._optimizer.zero_grad()
        # Detach the loss. Otherwise, the stored loss would keep the autograd graph of its step in memory.
        self.losses.append(loss.detach())

    def once(self) -> None:
        """Run one step without timing it."""
        with self.products():
            self(lambda name: contextlib.nullcontext())

    def products(self) -> contextlib.AbstractContextManager:
        """Return the context manager in which a step must run. It disables TF32 for fp32 and enables it for tf32."""
        return self._precision.products()


def timed(
    step: TrainingStep, device: Device, time_limit_s: float, minimum_samples: int = MINIMUM_SAMPLES
) -> tuple[StepTiming, Verification]:
    """Time a training step. Return the timing, and a verification that the loss has fallen during the timed steps.

    If the step is faulty, the loss may not fall. The limits have the same meaning as for `time_interleaved`.
    """
    with step.products():
        timing = time_step(step, device, minimum_samples=minimum_samples, time_limit_s=time_limit_s)
    # Read only after the timing, because reading a loss waits for the device.
    first, last = float(step.losses[0]), float(step.losses[-1])
    return timing, Verification("last loss / first loss", last / first, 0.99)


def step_params(batch: int) -> dict:
    """Return the params shared by all rows of a step at this batch size."""
    return {"batch": batch, "step": "steady"}


def step_rows(
    context: Context, model: ReferenceModel, batch: int, dtype: str, timing: StepTiming, learned: Verification, **params: Any
) -> tuple[list[Row], pd.DataFrame]:
    """Return the rows and the samples of a timed step.

    The rows give the step time, the throughput, the model FLOPs utilisation (MFU) and the time of each phase. Their limits come
    from the least time that the device needs for the FLOPs and the memory traffic.

    Args:
        context: context of the experiment.
        model: reference model.
        batch: batch size.
        dtype: dtype of the step.
        timing: timing of the step.
        learned: verification that the loss has fallen, for the throughput row.
        params: additional params that distinguish the rows from other variants.
    """
    name, work, device = model.name, model.flops, context.device
    params = step_params(batch) | params
    shared = {"dtype": dtype, "params": params}
    rows = speed_rows(
        context, name, "sample", batch, timing.whole, work, work.forward_backward, shared, timing.verification, learned
    )
    floors = {
        "forward": flops_floor(device, dtype, work.forward * batch),
        "backward": flops_floor(device, dtype, (work.forward_backward - work.forward) * batch),
        "optimizer": _traffic_floor(device, update_of(model).traffic_bytes * model.parameter_count),
    }
    frames = [sample_frame(timing.whole, name, dtype, params).assign(phase="step")]
    for phase, phase_timing in timing.phases.items():
        estimate, (floor, source) = phase_timing.estimate, floors[phase]
        rows.append(timed_row(context, name, f"{phase}_time_s", estimate, phase_timing, limit=(floor, source), **shared))
        frames.append(sample_frame(phase_timing, name, dtype, params).assign(phase=phase))
    return rows, pd.concat(frames, ignore_index=True)


def _traffic_floor(device: Device, traffic_bytes: int) -> tuple[float | None, str]:
    """Return (minimum time of the memory traffic in seconds, source of this limit), or (None, reason why there is no limit)."""
    found, reason = lookup(device)
    if found is None:
        return None, f"no limit: {reason}"
    if found.memory_bandwidth_limit_gb_s is None:
        return None, f"no limit: {reason or found.memory_bandwidth_source}"
    # A part of this traffic may not reach the memory, because the cache may hold gradients when the update begins, and new
    # weights when it ends. Therefore twice the cache size is subtracted: once for the gradients that are read, and once for the
    # weights that are written.
    uncached = max(0, traffic_bytes - 2 * (device.last_level_cache_bytes or 0))
    return uncached / (found.memory_bandwidth_limit_gb_s * 1e9), f"beyond the cache: {found.memory_bandwidth_source}"


def least_memory_gib(model: ReferenceModel, batch: int) -> float:
    """Return the minimum memory in GiB at the end of a step: weights, gradients and moments in float32, and the batch."""
    inputs = 4 * batch * torch.Size(model.sample_shape).numel()
    return (update_of(model).held_bytes * model.parameter_count + inputs) / GIB


def forecast_reference_step(context: Context, name: str, batch: int, variant: StepVariant) -> list[Forecast]:
    """Predict the throughput and the time of a reference model's step from the run's measured rates and the model's shapes.

    The memory format of the images is ignored, because it does not change the number of bytes that a step moves.
    """
    estimate, basis, dtype = None, NO_CEILINGS, variant.dtype
    ceilings, host = step_ceilings(context, dtype)
    if ceilings is not None:
        # A tf32 step dispatches the same operators as an fp32 step.
        calls = captured_step(name, batch, "fp32" if dtype == "tf32" else dtype)
        compiled = None
        if variant.compiled:
            compiled, entry = compiled_host(context, len(reference_model(name).layout().blocks))
            host = f"{host}; {entry}"
        predicted = predict_step(calls, ceilings, compiled)
        estimate, basis = predicted.total_s, f"{predicted.basis} ({host})"
    shared: dict = {"variant": name, "dtype": dtype, "params": step_params(batch) | variant.params, "basis": basis}
    rate = None if estimate is None else batch / estimate
    forecasts = [
        Forecast(metric="samples_per_s", estimate=rate, **shared),
        Forecast(metric="step_time_s", estimate=estimate, **shared),
    ]
    return [with_interval(context.device, REFERENCE_STEP, forecast) for forecast in forecasts]


def step_ceilings(context: Context, dtype: str) -> tuple[StepCeilings | None, str]:
    """Return (rates and host times for steps in a dtype, source of the host time), or (None, reason why they are missing).

    In a tf32 step, matrix products of float32 numbers run at tf32 rates. A step in a 16-bit format has few float32 matrix
    products; if the run has measured no rate for them, the 16-bit rate is used.
    """
    units = context.device.compute_units or 1
    measured = {name: _products(context.upstream, dtype if dtype == "tf32" else name) for name in (dtype, "fp32")}
    stream = stream_ceiling(context.upstream)
    if not measured[dtype] or stream is None:
        return None, NO_CEILINGS
    rates = {name: ProductRates.fit(points or measured[dtype], units) for name, points in measured.items()}
    operator_s, host = operator_time(context)
    convolution_s = _operator_cost(context, "convolution", "operator_time_s")
    # Clamp the measured overhead at 0. It is a difference of two times, so noise can make it negative.
    once_s = max(0.0, _operator_cost(context, "once a step", "step_overhead_s") or 0.0)
    # On an accelerator the host runs ahead of the device, so the step takes the longer of the two times. On a CPU the two times
    # add up.
    overlapped = context.device.kind != "cpu"
    return StepCeilings(rates, _memory(context.upstream, stream), operator_s, overlapped, convolution_s, once_s), host


def host_time(context: Context, name: str, batch: int, dtype: str) -> tuple[float, str]:
    """Return (host time in seconds of a reference model's eager step, source of this value).

    Raises:
        ValueError: the run has measured no ceilings.
    """
    ceilings, source = step_ceilings(context, dtype)
    return not_none(ceilings).host_s(captured_step(name, 1 if batch == 1 else _MANY, dtype)), source


def operator_time(context: Context) -> tuple[float, str]:
    """Return (host time in seconds of one operator in an eager step, source of this value).

    If the run has not measured this time, it is computed from the measured launch time. If that is missing too, a constant is
    used.
    """
    measured = _operator_cost(context, "operator", "operator_time_s")
    if measured is not None:
        return measured, "the host's time of an operator measured in steps of tiny tensors"
    kind = "cpu" if context.device.kind == "cpu" else "gpu"
    from_launches = _operator_from_launches(context)
    if from_launches is None:
        return _OPERATOR_S[kind], "the host's time of an operator assumed, no launch was measured in this run either"
    return from_launches


def inference_operator_time(context: Context) -> tuple[float, str]:
    """Return (host time in seconds of one operator without gradients, source of this value).

    It is computed from the measured launch time, because the measured time of an operator in a step includes autograd. If no
    launch was measured, it is the time of an operator in a step.
    """
    return _operator_from_launches(context) or operator_time(context)


def _operator_from_launches(context: Context) -> tuple[float, str] | None:
    kind = "cpu" if context.device.kind == "cpu" else "gpu"
    launch = _last_row(context, "launch_cost", "eager", "launch_time_s")
    if launch is None:
        return None
    return _LAUNCHES[kind] * not_none(launch.value), f"an operator taken as {_LAUNCHES[kind]} of this run's measured launches"


def compiled_host(context: Context, blocks: int) -> tuple[CompiledHost, str]:
    """Return the host times of a step with compiled blocks, and the source of the time that entering a compiled block takes.

    The measured time of a compiled block includes its kernel launches. They are subtracted, because the launches of a step are
    counted separately.

    Args:
        context: context of the experiment.
        blocks: number of compiled blocks of the model.
    """
    kernel_s = KERNEL_OPERATORS * operator_time(context)[0]
    block = _last_row(context, "operator_cost", "compiled block", "block_time_s")
    if block is None:
        return CompiledHost(kernel_s), "entering a compiled block taken for nothing, it was not measured in this run"
    entry_s = max(0.0, not_none(block.value) - block.params["kernels"] * kernel_s)
    return CompiledHost(kernel_s, blocks, entry_s), "a compiled block as measured with small tensors, less its kernels"


def _operator_cost(context: Context, variant: str, metric: str) -> float | None:
    row = _last_row(context, "operator_cost", variant, metric)
    return None if row is None else row.value


def _last_row(context: Context, experiment: str, variant: str, metric: str) -> Row | None:
    """Return the last row with a value for this experiment, variant and metric, or None if the run has none."""
    rows = [r for r in context.upstream if (r.experiment, r.variant, r.metric) == (experiment, variant, metric)]
    return next((row for row in reversed(rows) if row.value is not None), None)


def _products(rows: Iterable[Row], dtype: str) -> list[tuple[int, int, int, float]]:
    """Return the shape and rate (M, N, K, TFLOPS) of each matrix product that the run has measured with cold caches."""
    return [
        (row.params["m"], row.params["n"], row.params["k"], row.value)
        for row in rows
        if (row.experiment, row.metric, row.dtype, row.hot) == ("gemm", "gemm_tflops", dtype, False) and row.value is not None
    ]


def _memory(rows: Iterable[Row], stream: Row) -> MemoryStream:
    """Fit a latency and a bandwidth to the run's measured memory streams. If all have the same size, the latency is 0."""
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
    """Return the operators that a training step dispatches in forward pass, loss, backward pass and update.

    The operators are recorded with tensors that have shapes but no memory, so no values are computed. Recording takes some
    seconds on a slow CPU core. For a tf32 step, pass fp32, because both steps dispatch the same operators.

    Args:
        name: name of a reference model, or of a Transformer configuration such as "gpt2_124m", whose sequences have the length of
            its context.
        batch: number of samples or, for a Transformer, of sequences.
        dtype: fp32, bf16 or fp16. bf16 and fp16 use autocast.

    Raises:
        HyperionError: there is no model with this name, or the dtype is not supported.
    """
    if dtype not in _CAPTURED_DTYPES:
        raise HyperionError(
            f"a step cannot be captured in {dtype}",
            where=f"captured_step of {name}",
            next_step=f"use one of {', '.join(_CAPTURED_DTYPES)}",
        )
    if name in REFERENCE_MODELS:
        return tuple(_reference_step(reference_model(name), batch, dtype))
    return tuple(_language_step(name, batch, dtype))


def _reference_step(model: ReferenceModel, batch: int, dtype: str) -> list[Call]:
    # Meta tensors have shapes but no memory, so even a large model costs nothing to build.
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
    # The device type is "cpu" because tensors without memory count as CPU tensors, even if the step is for another device.
    return torch.autocast("cpu", AUTOCAST.get(dtype), enabled=dtype in AUTOCAST)
