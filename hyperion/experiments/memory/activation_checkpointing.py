"""Compare activation-checkpointing policies for the language model and the ResNet-18.

A policy determines which blocks of the model are checkpointed. The experiment checks that the gradients do not depend on the
policy, and measures memory and step time under each policy. It also measures activation memory for several numbers of layers.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
from pydantic import BaseModel
from torch import Tensor

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import out_of_memory_reason
from hyperion.chapter.variants import merged, run_counted
from hyperion.errors import not_none
from hyperion.measure import PeakMemoryRegion, SavedForBackward, TensorMemory, state_of
from hyperion.parallel import ParallelPlan
from hyperion.parallel.parallelize import BUDGET, EVERY_BLOCK, NONE, SELECTIVE
from hyperion.results import Row
from hyperion.training import TorchEngine, choose_precision
from hyperion.units import GIB
from hyperion.workloads.training_rows import Contender, compare_steps, memory_released
from hyperion.workloads.workloads import (
    BASIS,
    KINDS,
    Batch,
    ImageSizes,
    LanguageSizes,
    Workload,
    applied,
    build_step,
    estimate_step,
    plan_within_budget,
    random_batch,
    workload,
)

GRADIENT_TOLERANCE = 1e-5
_WHEN = {"phase": "forward and backward"}
# A gradient whose norm is below this share of the norm of all gradients consists only of rounding errors. An example is the
# gradient of a bias that has no effect, because a softmax follows it.
_NEGLIGIBLE = 1e-4


class Policies(BaseModel, extra="forbid", frozen=True, strict=True):
    """Activation-checkpointing policies for each kind of model. `ParallelPlan` describes the policies.

    Args:
        language: names of the policies for the language model.
        image: names of the policies for the ResNet-18.
    """

    language: tuple[str, ...]
    image: tuple[str, ...]


class ActivationCheckpointingOptions(Options):
    """Options for the `activation_checkpointing` experiment.

    Args:
        precision: number format of the steps, or "auto".
        policies: checkpointing policies to compare with a step without checkpointing.
        budget_share: memory that the policy "budget" must save, divided by the memory that checkpointing of every block saves.
        depths: numbers of layers of the language model for which activation memory is measured.
        time_limit_s: seconds of timing for each model, shared by all policies.
        language: the language model and its batch.
        image: the ResNet-18 and its batch.
    """

    precision: str
    policies: Policies
    budget_share: float
    depths: tuple[int, ...]
    time_limit_s: float
    language: LanguageSizes
    image: ImageSizes


@dataclass(frozen=True)
class _Setup:
    """Options of the experiment, and the workloads and plans derived from them on this device.

    A `Workload` is a model with its batch. A `ParallelPlan` contains an activation-checkpointing policy.
    """

    context: Context
    options: ActivationCheckpointingOptions
    dtype: str

    @classmethod
    def of(cls, context: Context) -> "_Setup":
        options = ActivationCheckpointingOptions.of(context)
        return cls(context, options, choose_precision(context.device, options.precision).dtype)

    def work(self, kind: str) -> Workload:
        return workload(getattr(self.options, kind))

    def deep(self, layers: int) -> Workload:
        """Return the workload of the language model in the options, with its number of layers changed to `layers`."""
        return workload(self.options.language.model_copy(update={"layers": layers}))

    def plans(self, kind: str) -> list[ParallelPlan]:
        """Return a plan without checkpointing, then one plan for each policy that the options list for this kind of model."""
        return [ParallelPlan(), *(self._plan(kind, policy) for policy in getattr(self.options.policies, kind))]

    def _plan(self, kind: str, policy: str) -> ParallelPlan:
        if policy != BUDGET:
            return ParallelPlan(checkpointing=policy)
        return plan_within_budget(self.work(kind), self.dtype, self.context.device, self.options.budget_share)


def forecast(context: Context) -> list[Forecast]:
    """Predict the speed-up under each policy. Also predict the peak memory, with the memory estimator.

    The reader of the chapter guesses the value of the first prediction before the measurement.
    """
    setup = _Setup.of(context)
    lines = [line for kind in KINDS for plan in setup.plans(kind) for line in _policy_forecasts(setup, kind, plan)]
    for layers in setup.options.depths:
        lines += [_depth_forecast(setup, setup.deep(layers), policy) for policy in (NONE, EVERY_BLOCK)]
    # Put the speed-up of EVERY_BLOCK first, because the reader guesses the first prediction. False sorts before True.
    lines.sort(key=lambda line: line.params["checkpointing"] != EVERY_BLOCK or line.metric != "speedup")
    return lines


def run(context: Context, report: Report) -> Result:
    """Measure memory, gradients and step time under each policy, and activation memory for each number of layers.

    The steps of all policies are timed in alternation.
    """
    setup = _Setup.of(context)
    plans = {kind: setup.plans(kind) for kind in KINDS}
    cells = [
        {"kind": kind, "checkpointing": plan.checkpointing, "blocks": plan.checkpointed_blocks}
        for kind in KINDS
        for plan in plans[kind]
    ]
    results = run_counted(context, report, measure_memory, cells)
    for number, kind in enumerate(KINDS):
        report(2 * number, 2 * len(KINDS), f"gradients of the {kind} model")
        with memory_released():
            results.append(Result(_gradient_rows(context, setup.work(kind), plans[kind]), pd.DataFrame()))
        report(2 * number + 1, 2 * len(KINDS), f"steps of the {kind} model, alternately")
        results.append(_timed(setup, setup.work(kind), plans[kind]))
    for layers in setup.options.depths:
        for policy in (NONE, EVERY_BLOCK):
            with memory_released():
                results.append(Result([_depth_row(setup, setup.deep(layers), policy)], pd.DataFrame()))
    return merged(results)


EXPERIMENT = Experiment(forecast, run, options=ActivationCheckpointingOptions)


def measure_memory(context: Context, report: Report, kind: str, checkpointing: str, blocks: int | None) -> Result:
    """Measure the peak memory of the forward and backward pass. It includes weights and optimizer state."""
    setup = _Setup.of(context)
    work, device = setup.work(kind), context.device
    plan = ParallelPlan(checkpointing=checkpointing, checkpointed_blocks=blocks)
    row = partial(context.row, work.name, dtype=setup.dtype, params=_params(work, plan) | _WHEN)
    try:
        engine, batch = build_step(work, setup.dtype, plan, device, context.seed)
        engine.train_step(batch)  # the first step allocates the optimizer's state
        with PeakMemoryRegion(device) as region:
            peak = forward_and_backward(engine, batch).peak
    except torch.OutOfMemoryError as error:
        return Result([row("tensor_memory_gib", None, value_reason=out_of_memory_reason(error))], pd.DataFrame())
    rows = [row("tensor_memory_gib", peak / GIB)]
    if device.kind != "cpu":  # on a CPU, the measured peak would be that of the whole process
        limit_source = "no limit: the row of the tensors' own peak is the comparison"
        rows.append(row(region.peak.metric, region.peak.gib, limit_source=limit_source))
    return Result(rows, pd.DataFrame())


@dataclass(frozen=True)
class PassMemory:
    """Memory of tensors in one forward and backward pass, in bytes.

    Attributes:
        saved_bytes: bytes of the tensors that the forward pass saves for the backward pass.
        peak: largest number of bytes that exist at the same time, including weights, optimizer state and batch.
    """

    saved_bytes: int
    peak: int


def forward_and_backward(engine: TorchEngine, batch: Batch) -> PassMemory:
    """Run the forward and backward pass on a batch, and count the bytes of all tensors. The gradients are stored in `.grad`."""
    present = [tensor for tensors in state_of(engine.model, engine.optimizer).values() for tensor in tensors]
    items = engine.count_items(batch)
    with TensorMemory(engine.device, [*present, *batch]) as memory, engine.precision.products():
        with SavedForBackward([*present, *batch]) as saved, engine.precision.autocast(engine.device):
            loss = engine.summed_loss(batch) / items
        # Read the memory between the forward and the backward pass, when all saved activations exist.
        saved_bytes = saved.bytes
        engine.scaler.backward(loss)
    return PassMemory(saved_bytes, memory.peak_bytes)


def largest_difference(tensors: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Return the largest relative difference between a tensor and its reference, in the Frobenius norm.

    The reference of a tensor is the tensor in `reference` with the same name.
    """
    norms = {name: tensor.double().norm().item() for name, tensor in reference.items()}
    # A gradient near zero consists only of rounding errors, and its relative difference is meaningless. In this case, divide by a
    # share of the norm of all gradients instead.
    floor = _NEGLIGIBLE * sum(norm**2 for norm in norms.values()) ** 0.5
    return max(
        (tensors[name].double() - tensor.double()).norm().item() / max(norms[name], floor) for name, tensor in reference.items()
    )


def _params(work: Workload, plan: ParallelPlan) -> dict:
    params = {"batch": work.items, "checkpointing": plan.checkpointing}
    return params if plan.checkpointing != BUDGET else params | {"checkpointed_blocks": plan.checkpointed_blocks}


def _gradient_rows(context: Context, work: Workload, plans: list[ParallelPlan]) -> list[Row]:
    """Return rows that compare the results of a step under each policy with those of a step without checkpointing.

    The rows contain the relative difference of the fp32 gradients and of BatchNorm's running statistics.
    """
    plain, *others = (_gradients(context, work, plan) for plan in plans)
    rows = []
    for plan, computed in zip(plans[1:], others, strict=True):
        for what, tensors, reference in zip(("gradients", "running statistics"), computed, plain, strict=True):
            if not reference:
                continue
            difference = largest_difference(tensors, reference)
            rows.append(
                context.error_row(
                    work.name,
                    "relative_difference",
                    difference,
                    f"{what} as without checkpointing",
                    GRADIENT_TOLERANCE,
                    dtype="fp32",
                    params=_params(work, plan) | {"of": what},
                )
            )
    return rows


def _gradients(context: Context, work: Workload, plan: ParallelPlan) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine, batch = build_step(work, "fp32", plan, context.device, context.seed)
    # Use training mode, because BatchNorm updates its running statistics only in this mode. Recomputation must not update them
    # twice.
    engine.model.train()
    with engine.precision.products(), _deterministic_convolutions():
        with engine.precision.autocast(engine.device):
            loss = engine.summed_loss(batch) / engine.count_items(batch)
        loss.backward()
    statistics = {name: buffer for name, buffer in engine.model.named_buffers() if buffer.is_floating_point()}
    return {name: not_none(parameter.grad) for name, parameter in engine.model.named_parameters()}, statistics


@contextlib.contextmanager
def _deterministic_convolutions() -> Iterator[None]:
    # Use deterministic kernels. The fastest kernels add the parts of a weight gradient in the order in which threads finish. On
    # an H200, the results of two runs then differ by 2e-5. This would hide a difference caused by checkpointing.
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def _timed(setup: _Setup, work: Workload, plans: list[ParallelPlan]) -> Result:
    context = setup.context
    contenders = [
        Contender(
            "no checkpointing" if plan.checkpointing == NONE else plan.checkpointing,
            setup.dtype,
            {name: value for name, value in _params(work, plan).items() if name != "batch"},
            partial(work.engine, setup.dtype, context.device, context.seed, applied(plan, context.device)),
            # The minimum work of this policy includes the recomputed FLOPs. The MFU (model FLOPs utilization) does not.
            work.least_flops + _recomputed_flops(work, plan),
        )
        for plan in plans
    ]
    batch = random_batch(work, context.device, context.seed)
    return compare_steps(context, work, batch, contenders, "", setup.options.time_limit_s)


def _recomputed_flops(work: Workload, plan: ParallelPlan) -> float:
    """Return the FLOPs of the part of the forward pass that the backward pass recomputes, per token or per image."""
    shares = {NONE: 0, SELECTIVE: 0, EVERY_BLOCK: 1, BUDGET: (plan.checkpointed_blocks or 0) / work.blocks}
    return work.block_flops * shares[plan.checkpointing]


def _depth_row(setup: _Setup, work: Workload, policy: str) -> Row:
    """Return a row with the bytes of the tensors that the forward pass of `work` saves for the backward pass."""
    context, plan = setup.context, ParallelPlan(checkpointing=policy)
    row = partial(context.row, work.name, "allocated_memory_gib", dtype=setup.dtype, params=_depth_params(work, policy))
    try:
        saved_bytes = forward_and_backward(*build_step(work, setup.dtype, plan, context.device, context.seed)).saved_bytes
    except torch.OutOfMemoryError as error:
        return row(None, value_reason=out_of_memory_reason(error))
    return row(saved_bytes / GIB)


def _depth_params(work: Workload, policy: str) -> dict:
    layers = not_none(work.config).layers
    return {"batch": work.items, "checkpointing": policy, "layers": layers, "what": "activations after forward"}


def _depth_forecast(setup: _Setup, work: Workload, policy: str) -> Forecast:
    estimate = estimate_step(work, setup.dtype, ParallelPlan(checkpointing=policy), setup.context.device)
    return Forecast(
        work.name,
        "allocated_memory_gib",
        estimate.history.kept_bytes / GIB,
        BASIS,
        dtype=setup.dtype,
        params=_depth_params(work, policy),
    )


def _policy_forecasts(setup: _Setup, kind: str, plan: ParallelPlan) -> list[Forecast]:
    work, device = setup.work(kind), setup.context.device
    estimate, params = estimate_step(work, setup.dtype, plan, device), _params(work, plan)
    line = partial(Forecast, variant=work.name, dtype=setup.dtype)
    peak_gib = estimate.history.tensor_peak_bytes / GIB
    lines = [line(metric="tensor_memory_gib", estimate=peak_gib, basis=BASIS, params=params | _WHEN)]
    if device.kind != "cpu":
        lines.append(line(metric="peak_memory_gib", estimate=estimate.peak_bytes / GIB, basis=BASIS, params=params | _WHEN))
    if plan.checkpointing != NONE:
        flops = work.flops.forward_backward
        lines.append(
            line(
                metric="speedup",
                estimate=flops / (flops + _recomputed_flops(work, plan)),
                params=params,
                basis="only FLOPs count: the recomputed FLOPs are added to those of forward and backward",
            )
        )
    return lines
