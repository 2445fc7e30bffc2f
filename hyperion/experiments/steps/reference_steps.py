"""One training step of a reference model, in its phases, and the rows of it: chapter 1.2 times it, and sweeps over batches."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor, nn

from hyperion.chapter.context import Context, Forecast
from hyperion.chapter.rows import sample_frame, timed_columns
from hyperion.experiments.steps.step_variants import StepVariant, has_layout
from hyperion.hardware import Device, lookup
from hyperion.measure import FORMATS, Phase, StepTiming, Verification, time_step
from hyperion.models import ReferenceModel, reference_model
from hyperion.models.reference import Encoder, ResNet50, VisionTransformer
from hyperion.results import Row
from hyperion.training import adamw, choose_precision, sgd_nesterov
from hyperion.workloads.training_rows import (
    ADAMW_BYTES_A_PARAMETER,
    SGD_BYTES_A_PARAMETER,
    flops_floor,
    speed_rows,
    step_forecasts,
)

GIB = 2**30
# Forward and backward, what a product or convolution writes passes through memory some twelve times: itself, its norm
# and its activation, each written and read.
_PASSES = 12


@dataclass(frozen=True)
class Update:
    """The optimizer that a model is trained with here, as its field does.

    Args:
        make: builds it over a module.
        traffic_bytes: read and written for each parameter in a step.
        held_bytes: weight, gradient and moments of each parameter, in float32.
    """

    make: Callable[[nn.Module], torch.optim.Optimizer]
    traffic_bytes: int
    held_bytes: int


# The learning rates are low enough for a first step without warm-up; nothing is trained to the end here.
_SGD = Update(lambda module: sgd_nesterov(module, 1e-3), SGD_BYTES_A_PARAMETER, 3 * 4)
_ADAMW = Update(lambda module: adamw(module, 1e-4), ADAMW_BYTES_A_PARAMETER, 4 * 4)
_UPDATES: dict[type, Update] = {ResNet50: _SGD, VisionTransformer: _ADAMW, Encoder: _ADAMW}


def update_of(model: ReferenceModel) -> Update:
    """The update of a reference model's step."""
    return _UPDATES[type(model)]


class TrainingStep:
    """Forward with loss, backward, and update on one batch that lies on the device: `step(phase)` does it once.

    Inputs are standard normal; the targets are those of the model's configuration. The batch stays the same, so a step
    that works lowers the loss. Of a compiled step, each block of the model is compiled, forward and backward, when it is
    called first; blocks that are alike share what was compiled. Loss and update stay eager.

    Args:
        variant: the number format, eager and with the layout that the model's convolutions prefer; or all three of them.

    Attributes:
        model: the configuration.
        module: what is trained.
        losses: of every step, scalars on the device; reading one waits for it.
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
            self.module.to(memory_format=torch.channels_last)
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
        """A step that nobody times."""
        with self.products():
            self(lambda name: contextlib.nullcontext())

    def products(self) -> contextlib.AbstractContextManager:
        """The context of steps: fp32 means products and convolutions of float32 numbers, with TF32 off; tf32 has it on."""
        return self._precision.products()


def timed(step: TrainingStep, device: Device, time_limit_s: float) -> tuple[StepTiming, Verification]:
    """A step's timing, and whether its loss fell: a step that does not train is none, however fast."""
    with step.products():
        timing = time_step(step, device, time_limit_s=time_limit_s)
    first, last = float(step.losses[0]), float(step.losses[-1])
    return timing, Verification("last loss / first loss", last / first, 0.99)


def step_rows(
    context: Context, model: ReferenceModel, batch: int, dtype: str, timing: StepTiming, learned: Verification, **told
) -> tuple[list[Row], pd.DataFrame]:
    """Step time, throughput and MFU, then each phase, every one with what its work needs at the device's limits.

    Args:
        told: more that tells these rows from others of the model.
    """
    name, work, device = model.name, model.flops, context.device
    params = step_params(batch) | told
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
        rows.append(
            context.row(
                name,
                f"{phase}_time_s",
                estimate.value,
                limit=floor,
                limit_source=source,
                **shared,
                **timed_columns(estimate, phase_timing),
            )
        )
        frames.append(sample_frame(phase_timing, name, dtype, params).assign(phase=phase))
    return rows, pd.concat(frames, ignore_index=True)


def _traffic_floor(device: Device, traffic_bytes: int) -> tuple[float | None, str]:
    """(least seconds of memory traffic, its source), or (None, why there is none). What a cache may hold costs nothing."""
    found, reason = lookup(device)
    if found is None or found.memory_bandwidth_limit_gb_s is None:
        return None, f"no limit: {reason or found.memory_bandwidth_source}"
    # Gradients may still lie in the cache when the update begins, and new weights when it ends.
    uncached = max(0, traffic_bytes - 2 * (device.last_level_cache_bytes or 0))
    return uncached / (found.memory_bandwidth_limit_gb_s * 1e9), f"beyond the cache: {found.memory_bandwidth_source}"


def least_memory_gib(model: ReferenceModel, batch: int) -> float:
    """GiB of what a step cannot do without at its end: weights, gradients and moments in float32, and the batch."""
    inputs = 4 * batch * torch.Size(model.sample_shape).numel()
    return (update_of(model).held_bytes * model.parameter_count + inputs) / GIB


LEAST_MEMORY = "weights, gradients and moments in float32, and the batch"


def step_params(batch: int) -> dict:
    """What tells the rows of a model's steps apart."""
    return {"batch": batch, "step": "steady"}


def forecast_step(context: Context, name: str, batch: int, dtype: str) -> list[Forecast]:
    """Samples per second from the ceilings of chapter 1.1: products, then the traffic of optimizer and activations."""
    model = reference_model(name)
    passing = batch * model.activations * _PASSES * FORMATS[dtype].bytes
    traffic = {"optimizer": update_of(model).traffic_bytes * model.parameter_count, "activations": passing}
    return step_forecasts(context, name, dtype, "sample", batch, model.flops, traffic)


def processes_of(context: Context, names: list[str]) -> list[list[str]]:
    """The models that share a process, so that no model's memory is counted for another.

    On a CPU every model gets its own: resident pages stay with a process. On an accelerator, where tensors are counted
    one by one and each variant's row says what was left before it, one process does, and 6 s of start-up are paid once.
    """
    return [[name] for name in names] if context.device.kind == "cpu" else [names]
