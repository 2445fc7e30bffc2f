"""Policies of activation checkpointing on the blocks of both baselines: equal gradients, memory against time; by depth."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.rows import out_of_memory_reason
from hyperion.chapter.side_by_side import run_counted
from hyperion.chapter.variants import merged
from hyperion.measure import PeakMemoryRegion, SavedForBackward, TensorMemory, state_of
from hyperion.models import layout_of
from hyperion.parallel import ParallelPlan
from hyperion.parallel.plan import BUDGET, EVERY_BLOCK, NONE, SELECTIVE
from hyperion.results import Row
from hyperion.training import TorchEngine, choose_precision
from hyperion.workloads import workloads
from hyperion.workloads.memory_forecasts import foretold, laid_out, made, policy, within_budget
from hyperion.workloads.step_comparison import Contender, compare_steps, emptied_afterwards
from hyperion.workloads.workloads import KINDS, Batch, Workload

GIB = 2**30
GRADIENT_TOLERANCE = 1e-5
_WHEN = {"phase": "forward and backward"}
_BASIS = "the estimator: this very step on tensors that have shapes and no memory"
# A parameter whose gradient is this small a part of the whole has none but rounding: a bias that a softmax ignores, say.
_NEGLIGIBLE = 1e-4


def forecast(context: Context) -> list[Forecast]:
    """The speed that recomputing costs (the first line is the one to guess), and memory by the estimator."""
    lines = []
    for kind in KINDS:
        for plan in _plans(context, kind):
            lines += _policy_forecasts(context, kind, plan)
    for layers in context.sizes["depths"]:
        work, dtype = _workload(context, "language", layers), _dtype(context)
        lines += [_kept_forecast(context, work, dtype, checkpointing) for checkpointing in (NONE, EVERY_BLOCK)]
    lines.sort(key=lambda line: line.params["checkpointing"] != EVERY_BLOCK or line.metric != "speedup")
    return lines


def run(context: Context, report) -> Result:
    """Memory under each policy, the gradients of all beside each other, memory by depth, then their steps in turn."""
    plans = {kind: _plans(context, kind) for kind in KINDS}
    cells = [
        {"kind": kind, "checkpointing": plan.checkpointing, "blocks": plan.checkpointed_blocks}
        for kind in KINDS
        for plan in plans[kind]
    ]
    results = run_counted(context, report, measure_memory, cells)
    for done, kind in enumerate(KINDS):
        report(2 * done, 2 * len(KINDS), f"gradients of the {kind} model")
        with emptied_afterwards():
            results.append(Result(_agreement(context, kind, plans[kind]), pd.DataFrame()))
        report(2 * done + 1, 2 * len(KINDS), f"steps of the {kind} model in turn")
        results.append(_timed(context, kind, plans[kind]))
    for layers in context.sizes["depths"]:
        for how in (NONE, EVERY_BLOCK):
            with emptied_afterwards():
                results.append(Result(_kept_rows(context, _workload(context, "language", layers), how), pd.DataFrame()))
    return merged(results)


EXPERIMENT = Experiment(forecast, run)


def measure_memory(context: Context, report, kind: str, checkpointing: str, blocks: int | None) -> Result:
    """The fullest moment of forward and backward in a training step, optimizer state and all."""
    work, device, plan = _workload(context, kind), context.device, policy(checkpointing, blocks)
    row = partial(context.row, work.name, dtype=_dtype(context), params=_params(work, plan) | _WHEN)
    try:
        engine, batch = made(work, _dtype(context), plan, device, context.seed)
        engine.train_step(batch)  # makes the optimizer's state
        with PeakMemoryRegion(device) as region:
            peak = forward_and_backward(engine, batch).peak
    except torch.OutOfMemoryError as error:
        return Result([row("tensor_memory_gib", None, value_reason=out_of_memory_reason(error))], pd.DataFrame())
    rows = [row("tensor_memory_gib", peak / GIB)]
    if device.kind != "cpu":  # on a CPU the region is the whole process
        limit_source = "no limit: the tensors' own peak stands beside it"
        rows.append(row(region.peak.metric, region.peak.gib, limit_source=limit_source))
    return Result(rows, pd.DataFrame())


@dataclass(frozen=True)
class Held:
    """Bytes of tensors around one forward and backward pass.

    Attributes:
        kept: what the forward pass left for the backward pass.
        peak: the most alive at once, weights, optimizer state and batch included.
    """

    kept: int
    peak: int


def forward_and_backward(engine: TorchEngine, batch: Batch) -> Held:
    """Compute the gradients of a batch, count, and leave the gradients with the parameters."""
    known = [tensor for tensors in state_of(engine.model, engine.optimizer).values() for tensor in tensors]
    items = engine.count_items(batch)
    with TensorMemory(engine.device, [*known, *batch]) as memory, engine.precision.products():
        with SavedForBackward([*known, *batch]) as saved, engine.precision.autocast(engine.device):
            loss = engine.summed_loss(batch) / items
        kept = saved.bytes
        engine.scaler.backward(loss)
    return Held(kept, memory.peak_bytes)


def _workload(context: Context, kind: str, layers: int = 0) -> Workload:
    sizes = context.sizes[kind]
    return workloads.workload(kind, sizes, sizes.get("vocabulary", 0), layers or sizes.get("layers", 0))


def _dtype(context: Context) -> str:
    return choose_precision(context.device, context.sizes["precision"]).dtype


def _plans(context: Context, kind: str) -> list[ParallelPlan]:
    """The one without checkpointing first, then the profile's; a budget lies between what none and what all of it needs."""
    return [policy(), *(_plan(context, kind, how) for how in context.sizes["policies"][kind])]


def _plan(context: Context, kind: str, how: str) -> ParallelPlan:
    if how != BUDGET:
        return policy(how)
    return within_budget(_workload(context, kind), _dtype(context), context.device, context.sizes["budget_share"])


def _params(work: Workload, plan: ParallelPlan) -> dict:
    params = {"batch": work.items, "checkpointing": plan.checkpointing}
    return params if plan.checkpointing != BUDGET else params | {"checkpointed_blocks": plan.checkpointed_blocks}


def _agreement(context: Context, kind: str, plans: list[ParallelPlan]) -> list[Row]:
    """Gradients in fp32, and BatchNorm's running statistics, of each policy beside those without."""
    work = _workload(context, kind)
    plain, *others = (_gradients(context, work, plan) for plan in plans)
    return [
        row for plan, found in zip(plans[1:], others, strict=True) for row in _difference_rows(context, work, plan, found, plain)
    ]


def _gradients(context: Context, work: Workload, plan: ParallelPlan) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine, batch = made(work, "fp32", plan, context.device, context.seed)
    engine.model.train()
    with engine.precision.products(), _in_one_order():
        with engine.precision.autocast(engine.device):
            loss = engine.summed_loss(batch) / engine.count_items(batch)
        loss.backward()
    statistics = {name: buffer for name, buffer in engine.model.named_buffers() if buffer.is_floating_point()}
    return {name: p.grad for name, p in engine.model.named_parameters()}, statistics


def _difference_rows(context: Context, work: Workload, plan: ParallelPlan, found: tuple, plain: tuple) -> list[Row]:
    rows = []
    for what, with_it, without in zip(("gradients", "running statistics"), found, plain, strict=True):
        if without:
            difference = largest_difference(with_it, without)
            rows.append(
                context.row(
                    work.name,
                    "relative_difference",
                    difference,
                    dtype="fp32",
                    params=_params(work, plan) | {"of": what},
                    check=f"{what} as without checkpointing",
                    check_error=difference,
                    check_tolerance=GRADIENT_TOLERANCE,
                )
            )
    return rows


@contextlib.contextmanager
def _in_one_order() -> Iterator[None]:
    """The fastest convolution kernels add up gradients of weights in whatever order threads come, differently each time:
    on an H200 by 2e-5, which would hide a difference that checkpointing makes.
    """
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def largest_difference(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest relative Frobenius difference of any tensor from the reference of its name."""
    norms = {name: tensor.double().norm().item() for name, tensor in reference.items()}
    floor = _NEGLIGIBLE * sum(norm**2 for norm in norms.values()) ** 0.5
    return max(
        (found[name].double() - tensor.double()).norm().item() / max(norms[name], floor) for name, tensor in reference.items()
    )


def _timed(context: Context, kind: str, plans: list[ParallelPlan]) -> Result:
    work, dtype = _workload(context, kind), _dtype(context)
    batch = workloads.random_batch(work, context.device, context.seed)
    contenders = [
        Contender(
            "no checkpointing" if plan.checkpointing == NONE else plan.checkpointing,
            dtype,
            {name: value for name, value in _params(work, plan).items() if name != "batch"},
            partial(work.engine, dtype, context.device, context.seed, laid_out(plan, context.device)),
            work.least_flops + _again(work, plan),
        )
        for plan in plans
    ]
    return compare_steps(context, work, batch, contenders, "")


def _again(work: Workload, plan: ParallelPlan) -> float:
    """FLOPs of an item that are done a second time."""
    blocks = len(layout_of(work.build()).blocks)
    shares = {NONE: 0, SELECTIVE: 0, EVERY_BLOCK: 1, BUDGET: (plan.checkpointed_blocks or 0) / blocks}
    return work.block_flops * shares[plan.checkpointing]


def _kept_rows(context: Context, work: Workload, checkpointing: str) -> list[Row]:
    """What a forward pass keeps at this depth."""
    columns = {"dtype": _dtype(context), "params": _depth_params(work, checkpointing)}
    try:
        kept = forward_and_backward(*made(work, _dtype(context), policy(checkpointing), context.device, context.seed)).kept
    except torch.OutOfMemoryError as error:
        return [context.row(work.name, "allocated_memory_gib", None, value_reason=out_of_memory_reason(error), **columns)]
    return [context.row(work.name, "allocated_memory_gib", kept / GIB, **columns)]


def _depth_params(work: Workload, checkpointing: str) -> dict:
    return _params(work, policy(checkpointing)) | {"layers": work.config.layers, "what": "activations after forward"}


def _kept_forecast(context: Context, work: Workload, dtype: str, checkpointing: str) -> Forecast:
    kept = foretold(work, dtype, policy(checkpointing), context.device).history.kept_bytes
    return Forecast(
        variant=work.name,
        metric="allocated_memory_gib",
        estimate=kept / GIB,
        dtype=dtype,
        params=_depth_params(work, checkpointing),
        basis=_BASIS,
    )


def _policy_forecasts(context: Context, kind: str, plan: ParallelPlan) -> list[Forecast]:
    work, dtype = _workload(context, kind), _dtype(context)
    estimate, line = foretold(work, dtype, plan, context.device), partial(Forecast, variant=work.name, dtype=dtype)
    params, basis = _params(work, plan), _BASIS
    lines = [
        line(metric="tensor_memory_gib", estimate=estimate.history.tensor_peak_bytes / GIB, basis=basis, params=params | _WHEN)
    ]
    if context.device.kind != "cpu":
        lines.append(line(metric="peak_memory_gib", estimate=estimate.peak_bytes / GIB, basis=basis, params=params | _WHEN))
    if plan.checkpointing != NONE:
        flops = work.flops.forward_backward
        lines.append(
            line(
                metric="speedup",
                estimate=flops / (flops + _again(work, plan)),
                params=params,
                basis="FLOPs alone: what the policy computes again comes on top of forward and backward",
            )
        )
    return lines
