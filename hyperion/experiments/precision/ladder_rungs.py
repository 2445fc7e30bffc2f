"""The rungs of the training ladder: each is the one below it with one thing more."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.chapter.context import Context
from hyperion.data.batches.packing import IGNORE_INDEX
from hyperion.experiments.precision.precision_variants import why_not_timed
from hyperion.hardware import Device
from hyperion.measure.steps.compilation import missing_compiler
from hyperion.parallel import ParallelPlan
from hyperion.parallel.plan import EVERY_BLOCK, NONE
from hyperion.training import TorchEngine
from hyperion.training.float8 import float8_formats, to_float8
from hyperion.workloads.memory_forecasts import laid_out
from hyperion.workloads.workloads import Workload

BASELINE = "baseline"
_CHUNKS = 4  # of a batch, when the loss is taken chunk by chunk
_ADDS = {
    BASELINE: {},
    "tf32": {"dtype": "tf32"},
    "bf16": {"dtype": "bf16"},
    "channels_last": {"channels_last": True},
    "fused optimizer": {"fused": True},
    "compile": {"compiled": True},
    "chunked loss": {"chunked": True},
    "activation checkpointing": {"checkpointing": EVERY_BLOCK},
    "fp8": {"dtype": "fp8"},
}


@dataclass(frozen=True)
class Rung:
    """One way to make a training step.

    Attributes:
        name: what it adds to the rung below.
        dtype: of the products.
        channels_last: images and kernels lie channel by channel in memory, not plane by plane.
        fused: the optimizer's update is one kernel over all parameters; else what PyTorch takes unasked.
        compiled: each block.
        chunked: the language model's loss never holds all logits, nor a float32 copy of any; else it holds both.
        checkpointing: of activations, as in ParallelPlan.
        absent: why it cannot be had here, "" when it can; the rungs above stand on the one below then.
    """

    name: str
    dtype: str = "fp32"
    channels_last: bool = False
    fused: bool = False
    compiled: bool = False
    chunked: bool = False
    checkpointing: str = NONE
    absent: str = ""

    def engine(self, work: Workload, device: Device, seed: int) -> TorchEngine:
        """A fresh engine that makes its steps this way; the same seed gives the same weights on every rung."""
        plan = ParallelPlan(checkpointing=self.checkpointing, compile_blocks=self.compiled)

        def lay_out(model: nn.Module) -> nn.Module:
            model = to_float8(model, float8_formats(device)) if self.dtype == "fp8" else model
            if work.kind == "language" and self.chunked:
                model.loss_chunk_tokens = -(-work.items // _CHUNKS)
            model = laid_out(plan, device)(model)
            return AllLogits(model) if work.kind == "language" and not self.chunked else model

        engine = work.engine(self.dtype, device, seed, lay_out)
        if not self.fused:
            for group in engine.optimizer.param_groups:
                group.update(fused=None, foreach=None)
        if work.kind == "image" and not self.channels_last:
            engine.model.to(memory_format=torch.contiguous_format)
        return engine


class AllLogits(nn.Module):
    """A language model whose loss is computed as it is usually written: all logits at once, in float32.

    Args:
        model: gives logits_BTV for inputs_BT.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """nll_BT in nats, float32; zero where the target is IGNORE_INDEX."""
        logits_MV = self.model(inputs_BT).flatten(0, 1).float()
        nll_M = F.cross_entropy(logits_MV, targets_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        return nll_M.view_as(targets_BT)


def ladder(context: Context, kind: str) -> list[Rung]:
    """The rungs that the profile names for this kind, from the bottom, those that cannot be had here among them."""
    rungs, below = [], Rung(BASELINE)
    for name in context.sizes[kind]["rungs"]:
        rung = replace(below, name=name, **_ADDS[name])
        rung = replace(rung, absent=_why_not(context.device, name))
        rungs.append(rung)
        below = below if rung.absent else rung
    return rungs


def _why_not(device: Device, name: str) -> str:
    if name == "compile":
        missing = missing_compiler(device)
        return f"unsupported: {missing}" if missing else ""
    dtype = _ADDS[name].get("dtype")
    return why_not_timed(device, dtype) if dtype else ""
