"""The least time of a language model's training step by this run's own ceilings: what a step can be told to fall short of.

Products first: their FLOPs at the fastest rate of a product that the run has measured (attention counts the half that a
causal mask leaves). Then what memory must move beside them at the fastest stream, since kernels run one after the other:

- the update, in float32: weight, gradient and two moments read, weight and moments written, and the gradient written
  before by the backward pass;
- logits, in the format of the products: written once and read once;
- activations, in the same format: each that the backward pass needs is written once and read once, 16 tensors of [B, T, D]
  in a block (hyperion.models.activations) and the last norm's input and output.

Left out, as if they cost nothing: gradients of activations, statistics of norms and of attention, copies of weights in 16
bits, the embedding's lookups, launches.
"""

from dataclasses import dataclass

from hyperion.experiments.columns import stream_ceiling
from hyperion.experiments.context import Context
from hyperion.experiments.training_rows import ADAMW_BYTES_A_PARAMETER
from hyperion.experiments.workloads import Workload
from hyperion.measure import FORMATS
from hyperion.models import TransformerConfig

_FLOAT32, _TENSORS_OF_A_BLOCK, _TENSORS_OF_THE_HEAD = 4, 16, 2


def least_traffic(config: TransformerConfig, tokens: int, dtype: str) -> dict[str, int]:
    """Bytes that a step on so many tokens cannot avoid moving beside its products, by what they are."""
    each = FORMATS[dtype].bytes
    tensors = _TENSORS_OF_A_BLOCK * config.layers + _TENSORS_OF_THE_HEAD
    return {
        "optimizer": (ADAMW_BYTES_A_PARAMETER + _FLOAT32) * config.parameter_count,
        "logits": 2 * each * tokens * config.vocab_size,
        "activations": 2 * each * tokens * config.width * tensors,
    }


@dataclass(frozen=True)
class StepRoof:
    """The least time of a step, and what it is made of.

    Attributes:
        tflops, bandwidth_gb_s: the run's ceilings.
        flops: of a step's products.
        traffic: bytes by what is moved.
    """

    tflops: float
    bandwidth_gb_s: float
    flops: float
    traffic: dict[str, int]

    @property
    def products_s(self) -> float:
        """Seconds of all products."""
        return self.flops / (self.tflops * 1e12)

    def moving_s(self, moved_bytes: float) -> float:
        """Seconds of the fastest stream for so many bytes."""
        return moved_bytes / (self.bandwidth_gb_s * 1e9)

    @property
    def time_s(self) -> float:
        """Seconds of the whole step."""
        return self.products_s + self.moving_s(sum(self.traffic.values()))

    @property
    def params(self) -> dict:
        """Both ceilings and every part's seconds, for rows."""
        parts = {"products_s": self.products_s} | {f"{name}_s": self.moving_s(b) for name, b in self.traffic.items()}
        told = {"gemm_tflops": self.tflops, "bandwidth_gb_s": self.bandwidth_gb_s, "roof_s": self.time_s} | parts
        return {name: float(f"{value:.4g}") for name, value in told.items()}

    def __str__(self) -> str:
        moved = self.time_s - self.products_s
        return (
            f"{self.products_s * 1e3:.3g} ms of products at the measured {self.tflops:.4g} TFLOPS, then {moved * 1e3:.3g} ms "
            f"for {', '.join(self.traffic)} at {self.bandwidth_gb_s:.4g} GB/s"
        )


def step_roof(context: Context, work: Workload, dtype: str) -> StepRoof | None:
    """The roof of a language workload in a dtype, None while this run has not measured both ceilings."""
    gemm, stream = context.best_upstream("gemm_tflops", dtype), stream_ceiling(context.upstream)
    if gemm is None or stream is None:
        return None
    traffic = least_traffic(work.config, work.items, dtype)
    return StepRoof(gemm.value, stream.value, work.least_flops * work.items, traffic)
