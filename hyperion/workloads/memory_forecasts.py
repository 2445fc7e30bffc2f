"""The memory of a workload's step as the estimator foretells it, for the experiments that measure it afterwards."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from hyperion.hardware import Device
from hyperion.models import layout_of
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.parallel.plan import BUDGET, EVERY_BLOCK, NONE
from hyperion.processes import world
from hyperion.training import TorchEngine
from hyperion.training.memory_estimate import MemoryEstimate, estimate_memory, fewest_checkpointed
from hyperion.workloads import workloads
from hyperion.workloads.workloads import Batch, Workload

# What a step's memory depends on beside the model's vocabulary and depth. Rates are needed and change nothing.
_SHAPES, _RATES = ("model", "sequence_length", "width", "batch_size"), {"learning_rate": 1e-4, "warmup_steps": 2}


def policy(checkpointing: str = NONE, checkpointed_blocks: int | None = None) -> ParallelPlan:
    """A plan of one device."""
    return ParallelPlan(checkpointing=checkpointing, checkpointed_blocks=checkpointed_blocks)


def workload(kind: str, sizes: dict) -> Workload:
    """As `workloads.workload`, from sizes that may leave out what changes no memory."""
    return workloads.workload(kind, _RATES | sizes, sizes.get("vocabulary", 0))


def laid_out(plan: ParallelPlan, device: Device) -> Callable[[nn.Module], nn.Module]:
    """What makes of a plain model one that is laid out by the plan, alone on a device."""
    return lambda model: parallelize(model, plan, replace(world(), device=device))


def made(work: Workload, dtype: str, plan: ParallelPlan, device: Device, seed: int = 0) -> tuple[TorchEngine, Batch]:
    """An engine and a batch on a device."""
    engine = work.engine(dtype, device, seed, laid_out(plan, device))
    return engine, workloads.random_batch(work, device, seed)


def foretold(work: Workload, dtype: str, plan: ParallelPlan, device: Device) -> MemoryEstimate:
    """The estimate; an accelerator that is there is asked what its libraries need. Made once a process."""
    shape = {"vocabulary": work.config.vocab_size, "layers": work.config.layers} if work.config else {}
    sizes = {name: work.sizes[name] for name in _SHAPES if name in work.sizes}
    return _foretold(work.kind, json.dumps(sizes), json.dumps(shape), dtype, plan, device)


@functools.lru_cache(maxsize=256)
def _foretold(kind: str, sizes: str, shape: str, dtype: str, plan: ParallelPlan, device: Device) -> MemoryEstimate:
    work = workloads.workload(kind, _RATES | json.loads(sizes), **json.loads(shape))
    return estimate_memory(lambda where: made(work, dtype, plan, where), device, ask=device.kind != "cpu")


def within_budget(work: Workload, dtype: str, device: Device, share: float) -> ParallelPlan:
    """The plan that checkpoints the fewest blocks which bring the peak down by this share of what all of them save."""

    blocks = len(layout_of(work.build()).blocks)
    ends = {0: policy(), blocks: policy(EVERY_BLOCK)}

    def peak(checkpointed: int) -> int:
        plan = ends.get(checkpointed) or policy(BUDGET, checkpointed)
        return foretold(work, dtype, plan, device).peak_bytes

    budget = peak(0) - share * (peak(0) - peak(blocks))
    return policy(BUDGET, fewest_checkpointed(peak, blocks, int(budget)))
