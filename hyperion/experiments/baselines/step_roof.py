"""A roof for training steps of the language model: an estimate of the least time of a step.

The roof is computed from rates measured in this run and has two parts, because kernels run one after the other: the time of the
matrix products, and the time to move all other bytes through memory.

The time of the matrix products is determined in one of two ways:

- All FLOPs run at the highest matrix-product rate measured in this run. Of the attention FLOPs, only the half that a causal mask
  leaves is counted.
- The step's own matrix products run one after the other. Their calls are timed in alternation with whole steps (see
  `products_alone`).

The other bytes are those that no matrix product reads or writes. The roof assumes that they move at the rate of the fastest
memory stream. These bytes are counted:

- The optimizer works in float32. It reads the weight, the gradient and the two AdamW moments, and writes the weight and the
  moments. Where matrix products write 16-bit numbers, the gradient is first converted to float32 and written.
- The loss reads the logits once, in the number format of the matrix products.
- Activations have the same format. They are counted in tensors of [B, T, D]. Each block writes its input and the sum after
  attention, and reads both in the backward pass (4 tensors). It writes the outputs of both norms and of GELU (2 + 4 tensors). It
  reads the input of GELU in the backward pass (4 tensors). The head writes and reads the input of the last norm (2 tensors) and
  writes its output (1 tensor).

The roof omits gradients of activations, repeated reads in the forward pass, the statistics of norms and of attention, 16-bit
copies of weights, embedding lookups, and kernel launches. A kernel that fuses a norm or a GELU with a matrix product could be
faster than this roof. Neither loop uses such a kernel.
"""

from dataclasses import dataclass

from hyperion.chapter.context import Context
from hyperion.chapter.rows import stream_ceiling
from hyperion.errors import not_none
from hyperion.measure import FORMATS, Timing
from hyperion.models import TransformerConfig
from hyperion.results import Estimate, ratio_estimate
from hyperion.workloads.workloads import ADAMW_BYTES_A_PARAMETER, Workload

_FLOAT32, _PASSES_OF_A_BLOCK, _PASSES_OF_THE_HEAD = 4, 14, 3


def least_traffic(config: TransformerConfig, tokens: int, dtype: str) -> dict[str, int]:
    """Return a dict that maps each cause, such as the optimizer, to the bytes that a step must move outside matrix products."""
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
    """A roof: an estimate of the least time of a training step, as the sum of the times of its parts.

    Attributes:
        products: a dict that maps each part of the step, such as "attention", to the time of its matrix products in seconds.
        how: how these times were determined, worded to follow the names of the parts in a sentence.
        ceilings: a dict that maps names to the measured rates that the roof uses in addition to the bandwidth.
        bandwidth_gb_s: bandwidth of the run's fastest memory stream in GB/s.
        traffic: a dict that maps each cause, such as the optimizer, to the bytes that it moves, without bytes of matrix products.
        together: timing of all matrix products of a step, one after the other, in alternation with whole steps. None if they were
            not timed.
    """

    products: dict[str, float]
    how: str
    ceilings: dict[str, float]
    bandwidth_gb_s: float
    traffic: dict[str, int]
    together: Timing | None = None

    def moving_s(self, moved_bytes: float) -> float:
        """Return the time in seconds that the run's fastest memory stream needs for this number of bytes."""
        return moved_bytes / (self.bandwidth_gb_s * 1e9)

    @property
    def parts(self) -> dict[str, float]:
        """A dict that maps each part of the step to its time in seconds."""
        return self.products | {name: self.moving_s(moved) for name, moved in self.traffic.items()}

    @property
    def time_s(self) -> float:
        """Time of the whole step in seconds."""
        return sum(self.parts.values())

    def share_of(self, step: Timing) -> Estimate:
        """Return the time of the roof divided by the measured step time, with an interval.

        If the timings of the matrix products and the steps alternated, the interval comes from pairs of their samples. Otherwise
        it comes from the step samples only.
        """
        if self.together is None:
            return step.estimate.map(lambda seconds: self.time_s / seconds)
        # Each sample has its own time of the products. The time of the memory traffic is a constant, added to every sample.
        return ratio_estimate(step.samples_s, self.together.samples_s + self.time_s - sum(self.products.values()))

    @property
    def params(self) -> dict:
        """Params of a row: the rates that the roof uses, and the time of each part in seconds."""
        values = self.ceilings | {"bandwidth_gb_s": self.bandwidth_gb_s, "roof_s": self.time_s}
        values |= {f"{name}_s": seconds for name, seconds in self.parts.items()}
        return {name: float(f"{value:.4g}") for name, value in values.items()}

    def __str__(self) -> str:
        multiplied = sum(self.products.values())
        return (
            f"{multiplied * 1e3:.3g} ms of {' and '.join(self.products)} {self.how}, then {(self.time_s - multiplied) * 1e3:.3g} "
            f"ms for {', '.join(self.traffic)} at {self.bandwidth_gb_s:.4g} GB/s"
        )


def step_roof(context: Context, work: Workload, dtype: str) -> StepRoof | None:
    """Return the roof with all matrix products at the highest measured rate.

    Return None if this run has measured no matrix product or no memory stream.
    """
    gemm, stream = context.best_gemm(dtype), stream_ceiling(context.upstream)
    if gemm is None or stream is None:
        return None
    tflops, how = not_none(gemm.value), f"at the measured {gemm.value:.4g} TFLOPS"
    products = {"products": work.least_flops * work.items / (tflops * 1e12)}
    traffic = least_traffic(not_none(work.config), work.items, dtype)
    return StepRoof(products, how, {"gemm_tflops": tflops}, not_none(stream.value), traffic)


def own_roof(context: Context, work: Workload, dtype: str, together: Timing) -> StepRoof | None:
    """Return the roof with the measured time of the step's own matrix products.

    Args:
        together: timing of all matrix products, in alternation with the steps that the roof is compared with.

    Returns:
        The roof, or None if this run has measured no memory stream.
    """
    stream = stream_ceiling(context.upstream)
    if stream is None:
        return None
    products, how = {"products": together.estimate.value}, "one after the other at their own sizes"
    traffic = least_traffic(not_none(work.config), work.items, dtype)
    return StepRoof(products, how, {}, not_none(stream.value), traffic, together)
