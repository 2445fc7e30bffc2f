"""Activation checkpointing on the blocks of both baselines: equal gradients, less memory, more time; and memory by depth."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
from torch import Tensor, nn

from hyperion.experiments import workloads
from hyperion.experiments.columns import out_of_memory_reason
from hyperion.experiments.context import Context, Experiment, Forecast, Result
from hyperion.experiments.side_by_side import run_counted
from hyperion.experiments.step_comparison import Contender, compare_steps, emptied_afterwards
from hyperion.experiments.variants import merged
from hyperion.experiments.workloads import KINDS, SIXTEEN_BIT, Batch, Workload
from hyperion.measure import PeakMemoryRegion, SavedForBackward, TensorMemory, state_of
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.processes import world
from hyperion.results import Row
from hyperion.training import TorchEngine, choose_precision

GIB = 2**30
NONE, EVERY_BLOCK = "none", "every block"
GRADIENT_TOLERANCE = 1e-5
# A parameter whose gradient is this small a part of the whole has none but rounding: a bias that a softmax ignores, say.
_NEGLIGIBLE = 1e-4


def forecast(context: Context) -> list[Forecast]:
    """The speed that recomputing costs (the first line is the one to guess), and memory from shapes."""
    dtype = choose_precision(context.device, context.sizes["precision"]).dtype
    lines = []
    for kind in KINDS:
        work = _workload(context, kind)
        flops = work.flops.forward_backward
        basis = "FLOPs alone: the blocks' forward pass comes on top of forward and backward"
        lines.append(
            Forecast(
                variant=work.name, metric="speedup", estimate=flops / (flops + work.block_flops), basis=basis, dtype=dtype,
                params={"batch": work.items, "checkpointing": EVERY_BLOCK},
            )
        )  # fmt: skip
        lines += [_memory_forecast(work, dtype, checkpointing) for checkpointing in (NONE, EVERY_BLOCK)]
    for layers in context.sizes["depths"]:
        work = _workload(context, "language", layers)
        lines += [_kept_forecast(work, dtype, checkpointing) for checkpointing in (NONE, EVERY_BLOCK)]
    return lines


def run(context: Context, report) -> Result:
    """Memory of each variant, the gradients of both beside each other, memory by depth, then both steps in turn."""
    cells = [{"kind": kind, "checkpointing": how} for kind in KINDS for how in (NONE, EVERY_BLOCK)]
    results = run_counted(context, report, "hyperion.experiments.activation_checkpointing:measure_memory", cells)
    for done, kind in enumerate(KINDS):
        report(2 * done, 2 * len(KINDS), f"gradients of the {kind} model")
        with emptied_afterwards():
            results.append(Result(_agreement(context, kind), pd.DataFrame()))
        report(2 * done + 1, 2 * len(KINDS), f"steps of the {kind} model in turn")
        results.append(_timed(context, kind))
    for layers in context.sizes["depths"]:
        for how in (NONE, EVERY_BLOCK):
            with emptied_afterwards():
                results.append(Result(_kept_rows(context, _workload(context, "language", layers), how), pd.DataFrame()))
    return merged(results)


EXPERIMENT = Experiment(forecast, run)


def measure_memory(context: Context, report, kind: str, checkpointing: str) -> Result:
    """The fullest moment of forward and backward in a training step, optimizer state and all."""
    work, device = _workload(context, kind), context.device
    dtype = choose_precision(device, context.sizes["precision"]).dtype
    row = partial(context.row, work.name, dtype=dtype, params=_params(work, checkpointing) | {"phase": "forward and backward"})
    try:
        engine, batch = _engine(context, work, dtype, checkpointing)
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
    return workloads.workload(kind, sizes, sizes.get("vocabulary", 0), layers)


def _laid_out(checkpointing: str) -> Callable[[nn.Module], nn.Module]:
    plan = ParallelPlan(checkpointing=checkpointing)
    return lambda model: parallelize(model, plan, world())


def _engine(context: Context, work: Workload, dtype: str, checkpointing: str) -> tuple[TorchEngine, Batch]:
    engine = work.engine(dtype, context.device, context.seed, _laid_out(checkpointing))
    return engine, workloads.random_batch(work, context.device, context.seed)


def _params(work: Workload, checkpointing: str) -> dict:
    return {"batch": work.items, "checkpointing": checkpointing}


def _agreement(context: Context, kind: str) -> list[Row]:
    """Gradients in fp32, and BatchNorm's running statistics, with checkpointing beside those without."""
    work, found = _workload(context, kind), {}
    for how in (NONE, EVERY_BLOCK):
        engine, batch = _engine(context, work, "fp32", how)
        engine.model.train()
        with engine.precision.products(), _in_one_order():
            with engine.precision.autocast(engine.device):
                loss = engine.summed_loss(batch) / engine.count_items(batch)
            loss.backward()
        statistics = {name: buffer for name, buffer in engine.model.named_buffers() if buffer.is_floating_point()}
        found[how] = {name: p.grad for name, p in engine.model.named_parameters()}, statistics
    rows = []
    for what, with_it, without in zip(("gradients", "running statistics"), found[EVERY_BLOCK], found[NONE], strict=True):
        if without:
            difference = largest_difference(with_it, without)
            rows.append(
                context.row(
                    work.name, "relative_difference", difference, dtype="fp32",
                    params=_params(work, EVERY_BLOCK) | {"of": what}, check=f"{what} as without checkpointing",
                    check_error=difference, check_tolerance=GRADIENT_TOLERANCE,
                )
            )  # fmt: skip
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
        (found[name].double() - tensor.double()).norm().item() / max(norms[name], floor)
        for name, tensor in reference.items()
    )


def _timed(context: Context, kind: str) -> Result:
    work = _workload(context, kind)
    dtype = choose_precision(context.device, context.sizes["precision"]).dtype
    batch = workloads.random_batch(work, context.device, context.seed)
    contenders = [
        Contender(
            "no checkpointing" if how == NONE else how, dtype, {"checkpointing": how},
            partial(work.engine, dtype, context.device, context.seed, _laid_out(how)),
            work.least_flops + (work.block_flops if how == EVERY_BLOCK else 0),
        )
        for how in (NONE, EVERY_BLOCK)
    ]  # fmt: skip
    return compare_steps(context, work, batch, contenders, "")


def _kept_rows(context: Context, work: Workload, checkpointing: str) -> list[Row]:
    """What a forward pass keeps at this depth."""
    dtype = choose_precision(context.device, context.sizes["precision"]).dtype
    columns = {"dtype": dtype, "params": _depth_params(work, checkpointing)}
    try:
        kept = forward_and_backward(*_engine(context, work, dtype, checkpointing)).kept
    except torch.OutOfMemoryError as error:
        return [context.row(work.name, "allocated_memory_gib", None, value_reason=out_of_memory_reason(error), **columns)]
    return [context.row(work.name, "allocated_memory_gib", kept / GIB, **columns)]


def _depth_params(work: Workload, checkpointing: str) -> dict:
    return _params(work, checkpointing) | {"layers": work.config.layers, "what": "activations after forward"}


def _kept_forecast(work: Workload, dtype: str, checkpointing: str) -> Forecast:
    kept = work.activations(dtype in SIXTEEN_BIT).kept(checkpointing == EVERY_BLOCK)
    return Forecast(
        variant=work.name, metric="allocated_memory_gib", estimate=kept / GIB, dtype=dtype,
        params=_depth_params(work, checkpointing), basis="from shapes: what is saved for the backward pass",
    )  # fmt: skip


def _memory_forecast(work: Workload, dtype: str, checkpointing: str) -> Forecast:
    peak = work.peak_bytes(dtype in SIXTEEN_BIT, checkpointing == EVERY_BLOCK)
    return Forecast(
        variant=work.name, metric="tensor_memory_gib", estimate=peak / GIB, dtype=dtype,
        params=_params(work, checkpointing) | {"phase": "forward and backward"},
        basis="from shapes: weights, moments and batch, and the fullest moment of the backward pass",
    )  # fmt: skip
