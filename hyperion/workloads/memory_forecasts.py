"""Estimates of the memory of a workload's training step, for the experiments that measure it."""

import functools
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from hyperion.hardware import Device
from hyperion.models import layout_of
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.parallel.parallelize import BUDGET, EVERY_BLOCK
from hyperion.processes import world
from hyperion.training import TorchEngine
from hyperion.training.memory_estimate import MemoryEstimate, estimate_memory, fewest_checkpointed
from hyperion.workloads.workloads import Batch, ImageSizes, LanguageSizes, Workload, random_batch, workload

BASIS = "the estimator: this very step on tensors that have shapes and no memory"


def applied(plan: ParallelPlan, device: Device) -> Callable[[nn.Module], nn.Module]:
    """Return a function that applies the plan to a model on this device alone."""
    return lambda model: parallelize(model, plan, replace(world(), device=device))


def build_step(work: Workload, dtype: str, plan: ParallelPlan, device: Device, seed: int = 0) -> tuple[TorchEngine, Batch]:
    """Return an engine under the plan and a random batch, on the device."""
    return work.engine(dtype, device, seed, applied(plan, device)), random_batch(work, device, seed)


def estimate_step(work: Workload, dtype: str, plan: ParallelPlan, device: Device) -> MemoryEstimate:
    """Return the estimate of a steady step's memory.

    If the device is an accelerator, it is asked what its libraries need. Estimates are cached: the policies of a chapter ask
    for the same ones again and again.
    """
    return _estimate(work.sizes, dtype, plan, device)


@functools.lru_cache(maxsize=256)
def _estimate(sizes: LanguageSizes | ImageSizes, dtype: str, plan: ParallelPlan, device: Device) -> MemoryEstimate:
    work = workload(sizes)
    return estimate_memory(lambda where: build_step(work, dtype, plan, where), device, ask=device.kind != "cpu")


def plan_within_budget(work: Workload, dtype: str, device: Device, share: float) -> ParallelPlan:
    """Return the plan that checkpoints the fewest blocks which still lower the peak as far as asked.

    Args:
        share: how far, as a share of what checkpointing every block saves.
    """
    blocks = len(layout_of(work.build()).blocks)
    ends = {0: ParallelPlan(), blocks: ParallelPlan(checkpointing=EVERY_BLOCK)}

    def peak(checkpointed: int) -> int:
        plan = ends.get(checkpointed) or ParallelPlan(checkpointing=BUDGET, checkpointed_blocks=checkpointed)
        return estimate_step(work, dtype, plan, device).peak_bytes

    budget = peak(0) - share * (peak(0) - peak(blocks))
    return ParallelPlan(checkpointing=BUDGET, checkpointed_blocks=fewest_checkpointed(peak, blocks, int(budget)))
