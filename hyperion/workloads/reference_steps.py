"""One training step of a reference model: its variants, its optimizer, the step itself, and the rows of a timed step."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor, nn

from hyperion.chapter.context import Context
from hyperion.chapter.rows import sample_frame, timed_row
from hyperion.hardware import Device, lookup
from hyperion.measure import Phase, StepTiming, Verification, time_step
from hyperion.models import ReferenceModel, reference_model
from hyperion.models.reference import Encoder, ResNet50, VisionTransformer
from hyperion.results import Row
from hyperion.training import adamw, choose_precision, sgd_nesterov
from hyperion.units import GIB
from hyperion.workloads.training_rows import flops_floor, speed_rows
from hyperion.workloads.workloads import ADAMW_BYTES_A_PARAMETER, SGD_BYTES_A_PARAMETER

EAGER, COMPILED = "eager", "compiled"
CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels_last"
LEAST_MEMORY = "weights, gradients and moments in float32, and the batch"


@dataclass(frozen=True)
class StepVariant:
    """One way to do a training step.

    Args:
        dtype: fp32, tf32, bf16 or fp16, see `hyperion.training.Precision`.
        channels_last: store images and kernels with the channels innermost, instead of PyTorch's default NCHW order.
        compiled: compile forward and backward of each block of the model with Inductor.
    """

    dtype: str
    channels_last: bool = False
    compiled: bool = False

    @property
    def params(self) -> dict:
        """Parameters of its rows that distinguish it from other variants in the same dtype."""
        layout = CHANNELS_LAST if self.channels_last else CONTIGUOUS
        return {"layout": layout, "mode": COMPILED if self.compiled else EAGER}

    def __str__(self) -> str:
        words = [self.dtype, CHANNELS_LAST if self.channels_last else "", COMPILED if self.compiled else ""]
        return " ".join(word for word in words if word)


def has_layout(model: ReferenceModel) -> bool:
    """Return whether channels_last applies: to a convolutional network.

    A Vision Transformer works on sequences after its single convolution.
    """
    return isinstance(model, ResNet50)


def to_channels_last(module: nn.Module) -> None:
    """Store the module's convolution kernels with the channels innermost."""
    module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # torch's annotations omit the argument


@dataclass(frozen=True)
class Update:
    """The optimizer of a reference model, as usual for its kind.

    Args:
        make: builds it for a module.
        traffic_bytes: bytes read and written for each parameter in a step.
        held_bytes: bytes of weight, gradient and moments of each parameter, in float32.
    """

    make: Callable[[nn.Module], torch.optim.Optimizer]
    traffic_bytes: int
    held_bytes: int


# The learning rates are low enough for a first step without warm-up; nothing is trained to the end here.
_SGD = Update(lambda module: sgd_nesterov(module, 1e-3), SGD_BYTES_A_PARAMETER, 3 * 4)
_ADAMW = Update(lambda module: adamw(module, 1e-4), ADAMW_BYTES_A_PARAMETER, 4 * 4)
_UPDATES: dict[type, Update] = {ResNet50: _SGD, VisionTransformer: _ADAMW, Encoder: _ADAMW}


def update_of(model: ReferenceModel) -> Update:
    """Return the update of a reference model's step."""
    return _UPDATES[type(model)]


class TrainingStep:
    """Forward with loss, backward, and update on one batch that stays on the device: `step(phase)` does it once.

    Inputs are standard normal; the targets are those of the model's configuration. Every step sees the same batch, so the
    loss falls if the step works. In a compiled step each block of the model is compiled, forward and backward, at its first
    call; equal blocks share the compiled code. Loss and update stay eager.

    Args:
        name: name of the reference model.
        batch: samples.
        variant: the variant, or a dtype alone: then the step is eager, in the layout that the model prefers.
        seed: of weights, inputs and targets.

    Attributes:
        model: the configuration.
        module: the module that is trained.
        losses: loss of every step, scalars on the device. Reading one waits for the device.
    """

    def __init__(self, name: str, batch: int, variant: str | StepVariant, device: Device, seed: int = 0):
        self.model = reference_model(name)
        if isinstance(variant, str):
            variant = StepVariant(variant, channels_last=has_layout(self.model))
        self._device, self._precision = device, choose_precision(device, variant.dtype)
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
        for block in map(self.module.get_submodule, self.model.layout().blocks if variant.compiled else ()):
            block.forward = torch.compile(block.forward, dynamic=False)
        self.losses: list[Tensor] = []

    def __call__(self, phase: Phase) -> None:
        with phase("forward"), self._precision.autocast(self._device):
            loss = self.model.loss(self.module(self._inputs), self._targets)
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            self._optimizer.step()
            self._optimizer.zero_grad()
        self.losses.append(loss.detach())

    def once(self) -> None:
        """Do one step without timing it."""
        with self.products():
            self(lambda name: contextlib.nullcontext())

    def products(self) -> contextlib.AbstractContextManager:
        """Return the context of a step: it turns TF32 off for fp32 and on for tf32."""
        return self._precision.products()


def timed(step: TrainingStep, device: Device, time_limit_s: float) -> tuple[StepTiming, Verification]:
    """Return a step's timing, and the verification that its loss fell: a step that does not train is refused."""
    with step.products():
        timing = time_step(step, device, time_limit_s=time_limit_s)
    first, last = float(step.losses[0]), float(step.losses[-1])
    return timing, Verification("last loss / first loss", last / first, 0.99)


def step_params(batch: int) -> dict:
    """Return the parameters that rows of a model's steps share."""
    return {"batch": batch, "step": "steady"}


def step_rows(
    context: Context, model: ReferenceModel, batch: int, dtype: str, timing: StepTiming, learned: Verification, **params
) -> tuple[list[Row], pd.DataFrame]:
    """Return rows of step time, throughput, MFU and each phase, with the least time of its work; and the samples.

    Args:
        learned: check of the throughput: that the loss fell.
        params: further parameters that identify these rows.
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
    """Return (least seconds of memory traffic, its source), or (None, why there is none)."""
    found, reason = lookup(device)
    if found is None:
        return None, f"no limit: {reason}"
    if found.memory_bandwidth_limit_gb_s is None:
        return None, f"no limit: {reason or found.memory_bandwidth_source}"
    # Gradients may still be in the cache when the update begins, and new weights when it ends.
    uncached = max(0, traffic_bytes - 2 * (device.last_level_cache_bytes or 0))
    return uncached / (found.memory_bandwidth_limit_gb_s * 1e9), f"beyond the cache: {found.memory_bandwidth_source}"


def least_memory_gib(model: ReferenceModel, batch: int) -> float:
    """Return the GiB that a step needs at least at its end: weights, gradients and moments in float32, and the batch."""
    inputs = 4 * batch * torch.Size(model.sample_shape).numel()
    return (update_of(model).held_bytes * model.parameter_count + inputs) / GIB
