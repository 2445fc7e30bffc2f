"""The least time of a language model's training step by this run's own ceilings: what a step can be told to fall short of.

Products first, and there are two answers. All FLOPs at the fastest rate of any product that the run has measured (attention
counts the half that a causal mask leaves) is what the arithmetic units could do. Or the products of the step themselves, one
after the other and nothing between them, timed in turn with whole steps (`products_alone`): what is left
to the loop around them. Then what memory must move at the fastest stream for what no product reads or writes itself, since
kernels run one after the other:

- the update, in float32: weight, gradient and two moments read, weight and moments written; and, where products write
  16 bits, the gradient written in float32 before;
- logits, in the format of the products: read once, for the loss;
- activations, in the same format, in units of one tensor [B, T, D]: of a block its input and the sum after attention are
  written, and read by the backward pass (4), both norms' outputs and the MLP's after GELU are written (2 + 4), the MLP's
  before GELU are read by the backward pass (4); of the head the last norm's input likewise (2) and its output (1).

Left out, as if they cost nothing: gradients of activations, second reads of the forward pass, statistics of norms and of
attention, copies of weights in 16 bits, the embedding's lookups, launches. A kernel that did a norm or a GELU within a product
would be below this roof; none does here.
"""

from dataclasses import dataclass

from hyperion.chapter.context import Context
from hyperion.chapter.rows import stream_ceiling
from hyperion.measure import FORMATS, Timing
from hyperion.models import TransformerConfig
from hyperion.results.statistics import Estimate, ratio_estimate
from hyperion.workloads.training_rows import ADAMW_BYTES_A_PARAMETER
from hyperion.workloads.workloads import Workload

_FLOAT32, _PASSES_OF_A_BLOCK, _PASSES_OF_THE_HEAD = 4, 14, 3


def least_traffic(config: TransformerConfig, tokens: int, dtype: str) -> dict[str, int]:
    """Bytes that a step on so many tokens cannot avoid moving outside of its products, by what they are."""
    each = FORMATS[dtype].bytes
    passes = _PASSES_OF_A_BLOCK * config.layers + _PASSES_OF_THE_HEAD
    rounded = _FLOAT32 if each < _FLOAT32 else 0
    return {
        "optimizer": (ADAMW_BYTES_A_PARAMETER + rounded) * config.parameter_count,
        "logits": each * tokens * config.vocab_size,
        "activations": each * tokens * config.width * passes,
    }


@dataclass(frozen=True)
class StepRoof:
    """The least time of a step, and what it is made of.

    Attributes:
        products: seconds by what multiplies.
        how: their rate or times were found.
        ceilings: of the run that the roof rests on, by name.
        bandwidth_gb_s: of the run's fastest stream.
        traffic: bytes by what is moved.
        together: the time of all products in turn with whole steps, where that was measured.
    """

    products: dict[str, float]
    how: str
    ceilings: dict[str, float]
    bandwidth_gb_s: float
    traffic: dict[str, int]
    together: Timing | None = None

    def moving_s(self, moved_bytes: float) -> float:
        """Seconds of the fastest stream for so many bytes."""
        return moved_bytes / (self.bandwidth_gb_s * 1e9)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part of the step."""
        return self.products | {name: self.moving_s(moved) for name, moved in self.traffic.items()}

    @property
    def time_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())

    def share_of(self, step: Timing) -> Estimate:
        """How much of a step's time this would take, as uncertain as the step's time or, in turn, its ratio to the products'."""
        if self.together is None:
            return step.estimate.map(lambda seconds: self.time_s / seconds)
        return ratio_estimate(step.samples_s, self.together.samples_s + self.time_s - sum(self.products.values()))

    @property
    def params(self) -> dict:
        """The ceilings and every part's seconds, for rows."""
        told = self.ceilings | {"bandwidth_gb_s": self.bandwidth_gb_s, "roof_s": self.time_s}
        told |= {f"{name}_s": seconds for name, seconds in self.parts.items()}
        return {name: float(f"{value:.4g}") for name, value in told.items()}

    def __str__(self) -> str:
        multiplied = sum(self.products.values())
        return (
            f"{multiplied * 1e3:.3g} ms of {' and '.join(self.products)} {self.how}, then {(self.time_s - multiplied) * 1e3:.3g} "
            f"ms for {', '.join(self.traffic)} at {self.bandwidth_gb_s:.4g} GB/s"
        )


def step_roof(context: Context, work: Workload, dtype: str) -> StepRoof | None:
    """The roof of a language workload with all products at the rate of the fastest; None while this run has not measured
    both ceilings."""
    gemm, stream = context.best_upstream("gemm_tflops", dtype), stream_ceiling(context.upstream)
    if gemm is None or stream is None:
        return None
    products, how = (
        {"products": work.least_flops * work.items / (gemm.value * 1e12)},
        f"at the measured {gemm.value:.4g} TFLOPS",
    )
    traffic = least_traffic(work.config, work.items, dtype)
    return StepRoof(products, how, {"gemm_tflops": gemm.value}, stream.value, traffic)


def own_roof(context: Context, work: Workload, dtype: str, together: Timing) -> StepRoof | None:
    """The roof with the step's own products; None while this run has measured no stream.

    Args:
        together: all of them, timed in turn with the steps that are held against it.
    """
    stream = stream_ceiling(context.upstream)
    if stream is None:
        return None
    products, how = {"products": together.estimate.value}, "one after the other at their own sizes"
    return StepRoof(products, how, {}, stream.value, least_traffic(work.config, work.items, dtype), together)
