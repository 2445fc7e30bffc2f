"""Predict the time of a training step before it runs, from its operators and from measured rates of the machine.

In this module, "product" means a matrix product (GEMM), a convolution or an attention. The model has three parts:

- Device time. Operators run one after the other. A product takes the larger of two times: its FLOPs divided by the rate that is
  expected for its size (`ProductRates`), and its bytes divided by the bandwidth. Every other operator takes its bytes divided by
  the bandwidth, plus a latency. Each input is read once, and each output is written once.
- Host time. Each operator takes a fixed time, and each step takes an additional fixed time.
- Total time. A GPU and the host work at the same time, so the total is the larger of device time and host time. On a CPU, it is
  their sum.

In compiled code, the operators between two products are fused into one kernel, which reads the result of one product and writes
an operand of the next. So there is one fused kernel per product, and the fused kernels move as many bytes as the products. The
host needs additional time for each block that is compiled separately, in the forward and the backward pass.

The model omits some effects that make real steps longer:

- Convolution kernels are slower than matrix products of the same size, especially in float32 without TF32.
- Norms read their input twice.
- Libraries convert memory layouts.
- Within one step, the host sometimes waits for the device, and the device sometimes waits for the host.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hyperion.errors import HyperionError
from hyperion.measure.fits import fit_nonnegative
from hyperion.measure.products.dispatch import Call, Product, dispatched, products_of
from hyperion.measure.products.gap import TILES, best_tiling, tile
from hyperion.measure.steps.operator_cost import is_convolution


@dataclass(frozen=True)
class ProductRates:
    """Predicts the rate of a matrix product of any size from the measured rates of a few square products.

    The measured products have one dtype and ran on one device. The predicted rate is the product of two factors:

    - The share of the compute units that the output tiles fill. It follows from the sizes M and N; see `best_tiling`.
    - The rate that the device would reach for this K if the tiles filled all units. For a measured product, it is the measured
      rate divided by the share. Between the measured values of K, it is interpolated over log K. Outside this range, it is
      constant. It is low for short K, because loads are not hidden, and because starting and finishing a tile cost as much as for
      long K.

    If K is long and there are few tiles, as for weight gradients, K can be split into parts. No part is shorter than the smallest
    measured K.

    Args:
        units: number of compute units of the device.
        k: measured values of K in ascending order.
        filled_tflops: for each K, the rate if the tiles fill all units, in 10¹² FLOP/s.
    """

    units: int
    k: tuple[int, ...]
    filled_tflops: tuple[float, ...]

    @classmethod
    def fit(cls, measured: Iterable[tuple[int, int, int, float]], units: int) -> "ProductRates":
        """Fit the rates to measured products. If several products have the same K, the best one is used.

        Args:
            measured: the measured products as (M, N, K, rate in 10¹² FLOP/s).
            units: number of compute units of the device.

        Raises:
            HyperionError: `measured` is empty.
        """
        filled: dict[int, float] = {}
        for m, n, k, tflops in measured:
            # Divide by the share, because the interpolation over K must not include the effect of idle units.
            filled[k] = max(filled.get(k, 0.0), tflops / best_tiling(m, n, units).share)
        if not filled:
            raise HyperionError(
                "no measured rate", where="ProductRates.fit", next_step="measure at least one product of the dtype first"
            )
        return cls(units, tuple(sorted(filled)), tuple(filled[k] for k in sorted(filled)))

    def tflops(self, product: Product) -> float:
        """Return the predicted rate of a product in 10¹² FLOP/s, with the best tile size and the best number of splits of K."""
        ways = [(size, splits) for size in TILES for splits in self._splits(product.k)]
        return max(
            tile(product.m, product.n, product.batch, self.units, size, splits).share * self._filled(product.k / splits)
            for size, splits in ways
        )

    def _splits(self, k: int) -> list[int]:
        # Candidates are powers of two up to 128.
        return [1] + [1 << power for power in range(1, 8) if k / (1 << power) >= self.k[0]]

    def _filled(self, k: float) -> float:
        # On logarithmic axes, a power law is a straight line. Outside the measured range of K, np.interp returns the value at its
        # nearest end.
        return float(np.exp(np.interp(np.log(k), np.log(self.k), np.log(self.filled_tflops))))


# Prefixes of the names of optimizer operators. `_fused_` alone would also match `_fused_rms_norm` and `_fused_dropout`.
_OPTIMIZER = ("_fused_adam", "_fused_adagrad", "_fused_sgd", "_foreach_")


@dataclass(frozen=True)
class MemoryStream:
    """The model of the time of operators that only read and write memory: time = latency + bytes / bandwidth.

    Args:
        bandwidth_gb_s: bandwidth in 10⁹ bytes/s.
        latency_s: latency of an operator in seconds.
    """

    bandwidth_gb_s: float
    latency_s: float

    @classmethod
    def fit(cls, measured: Sequence[tuple[float, float]]) -> "MemoryStream":
        """Fit latency and bandwidth by least squares on the relative errors of the times.

        The bandwidth is infinite if the times do not grow with the size.

        Args:
            measured: measured operations as (bytes, bandwidth in 10⁹ bytes/s).

        Raises:
            HyperionError: there are fewer than two different sizes.
        """
        size = np.array([traffic for traffic, _ in measured], dtype=np.float64)
        if len(set(size)) < 2:
            raise HyperionError(
                f"the number of measured sizes is {len(set(size))}, but a fit of latency and bandwidth needs at least two",
                where="MemoryStream.fit",
                next_step="measure the bandwidth at several sizes",
            )
        seconds = size / (np.array([rate for _, rate in measured]) * 1e9)
        latency_s, s_per_byte = fit_nonnegative(np.column_stack([np.ones(len(size)), size]), seconds)
        return cls(1e-9 / float(s_per_byte) if s_per_byte else math.inf, float(latency_s))


@dataclass(frozen=True)
class StepCeilings:
    """The measured rates and times of a machine. `predict_step` computes the time of a step from them.

    Args:
        products: a dict that maps a dtype of the recorded operators to the rates of matrix products in this dtype. If float32
            products use TF32 units, the entry "fp32" contains the rates of tf32.
        memory: latency and bandwidth of operators that only read and write memory.
        operator_time_s: host seconds per operator; see `measure_operator_cost`.
        overlapped: whether the device and the host work at the same time. False on a CPU.
        convolution_time_s: host seconds per convolution or batch norm. None means `operator_time_s`.
        step_overhead_s: fixed host seconds of a step. 0 if it was not measured.
    """

    products: Mapping[str, ProductRates]
    memory: MemoryStream
    operator_time_s: float
    overlapped: bool
    convolution_time_s: float | None = None
    step_overhead_s: float = 0.0

    def host_s(self, calls: Sequence[Call]) -> float:
        """Return the host seconds of a step that dispatches these operators one by one. Views take no time."""
        moving = [call for call in calls if call.moves]
        apart = 0 if self.convolution_time_s is None else sum(map(is_convolution, moving))
        operators_s = (len(moving) - apart) * self.operator_time_s + apart * (self.convolution_time_s or 0.0)
        return operators_s + self.step_overhead_s


@dataclass(frozen=True)
class CompiledHost:
    """The host cost of a training step with compiled blocks.

    Args:
        kernel_time_s: host seconds per kernel of compiled code.
        blocks: number of blocks that are compiled separately.
        entry_time_s: additional host seconds per block, in total for the forward and the backward pass. They are spent in guards,
            and in autograd around the compiled code.
    """

    kernel_time_s: float
    blocks: int = 0
    entry_time_s: float = 0.0


@dataclass(frozen=True)
class StepPrediction:
    """The predicted time of a step and its parts, in seconds.

    Args:
        products_s: device time of matrix products, convolutions and attention.
        memory_s: time to read and write memory in all other operators, except those of the optimizer.
        optimizer_s: time to read and write memory in the operators of the optimizer.
        latency_s: sum of the latencies of all operators that are not products. 0 on a CPU, where they are part of `host_s`.
        host_s: host time of the step.
        overlapped: whether the device and the host work at the same time.
        operators: number of operators that read or write memory.
        basis: text that says how the total is computed.
    """

    products_s: float
    memory_s: float
    optimizer_s: float
    latency_s: float
    host_s: float
    overlapped: bool
    operators: int
    basis: str

    @property
    def device_s(self) -> float:
        """Predicted device time of the step in seconds."""
        return self.products_s + self.memory_s + self.optimizer_s + self.latency_s

    @property
    def total_s(self) -> float:
        """Predicted time of the step in seconds."""
        return max(self.device_s, self.host_s) if self.overlapped else self.device_s + self.host_s

    def __str__(self) -> str:
        return f"{self.total_s * 1e3:.4g} ms: {self.basis}"


def training_calls(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> list[Call]:
    """Return the operators of one training step: forward pass, loss, backward pass and update.

    Call this function within `shapes_only`. It updates the model twice, so with real tensors it would change the model. The first
    update uses zero gradients and creates the optimizer state. Its operators are not returned.

    Args:
        loss: function that runs the forward pass and returns the loss.
        optimizer: the optimizer that updates the parameters.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return dispatched(step)


def predict_step(
    step: Callable[[], object] | Sequence[Call], ceilings: StepCeilings, compiled: CompiledHost | None = None
) -> StepPrediction:
    """Predict the time of a step.

    Args:
        step: the operators of a step, from `training_calls` or `dispatched`, or a function that executes one step. The function
            is called once, preferably within `shapes_only`.
        ceilings: the measured rates and times of the machine.
        compiled: the host cost of compiled blocks. None for an eager step.

    Raises:
        HyperionError: there are no measured rates for the dtype of a product, or no operator reads or writes memory.
    """
    calls = [call for call in (dispatched(step) if callable(step) else step) if call.moves]
    if not calls:
        raise HyperionError(
            "the step runs no operator that reads or writes memory",
            where="predict_step",
            next_step="pass a function that does a complete step",
        )
    bandwidth = ceilings.memory.bandwidth_gb_s * 1e9
    products = [product for call in calls for product in products_of(call) or ()]
    others = [call for call in calls if products_of(call) is None]
    update = [call for call in others if call.name.startswith(_OPTIMIZER)]
    moved, updated = (sum(call.bytes for call in some) for some in (others, update))
    # From here on, `moved` excludes the bytes of the optimizer update, which is a separate part of the prediction.
    moved, small, host_s = moved - updated, len(others), ceilings.host_s(calls)
    if compiled is not None:
        fused = len(calls) - len(others)  # one fused kernel per product
        # Fusion cannot increase the traffic or the number of kernels, so a step with few other operators keeps its own numbers.
        moved, small = min(moved, sum(product.bytes for product in products)), min(small, fused + len(update))
        entries_s = compiled.blocks * compiled.entry_time_s
        host_s = 2 * fused * compiled.kernel_time_s + entries_s + ceilings.host_s(update)
    parts = {
        "products_s": sum(_product_s(product, ceilings) for product in products),
        "memory_s": moved / bandwidth,
        "optimizer_s": updated / bandwidth,
        # On a CPU, the latency of an operator is already in its host time.
        "latency_s": small * ceilings.memory.latency_s if ceilings.overlapped else 0.0,
        "host_s": host_s,
    }
    basis = _basis(parts, calls, sum(p.flops for p in products), ceilings, compiled)
    return StepPrediction(**parts, overlapped=ceilings.overlapped, operators=len(calls), basis=basis)


def _product_s(product: Product, ceilings: StepCeilings) -> float:
    if product.dtype not in ceilings.products:
        raise HyperionError(
            f"no measured rate of {product.dtype} for {product}",
            where="predict_step",
            next_step=f"measure products of {product.dtype} first; measured: {', '.join(ceilings.products) or 'none'}",
        )
    arithmetic = product.flops / (ceilings.products[product.dtype].tflops(product) * 1e12)
    return max(arithmetic, product.bytes / (ceilings.memory.bandwidth_gb_s * 1e9))


def _basis(
    parts: dict[str, float], calls: Sequence[Call], flops: int, ceilings: StepCeilings, compiled: CompiledHost | None
) -> str:
    device_s = sum(parts.values()) - parts["host_s"]
    if not ceilings.overlapped:
        together = "the device's time and the host's time add up"
    elif parts["host_s"] > device_s:
        together = "the host's time decides, because it is longer"
    else:
        together = "the device's time decides, because it is longer"
    apart = 0 if ceilings.convolution_time_s is None else sum(map(is_convolution, calls))
    rest, each = "the other operators", f"{len(calls) - apart} operators of {ceilings.operator_time_s * 1e6:.3g} us each"
    if apart and ceilings.convolution_time_s is not None:
        each += f" and {apart} convolutions and batch norms of {ceilings.convolution_time_s * 1e6:.3g} us each"
    if compiled is not None:
        rest, each = "the fused operators between them", f"two kernels per product of {compiled.kernel_time_s * 1e6:.3g} us each"
        if compiled.blocks:
            each += f", {compiled.blocks} blocks entered for {compiled.entry_time_s * 1e6:.3g} us each"
        each += ", and the operators of the update"
    if ceilings.step_overhead_s:
        each += f", {ceilings.step_overhead_s * 1e6:.3g} us once per step"
    return (
        f"on the device, matrix products of {flops / 1e9:.4g} GFLOP at the measured rates of their sizes take "
        f"{parts['products_s'] * 1e3:.3g} ms, {rest} move their bytes at {ceilings.memory.bandwidth_gb_s:.4g} GB/s in "
        f"{parts['memory_s'] * 1e3:.3g} ms, the optimizer update takes {parts['optimizer_s'] * 1e3:.3g} ms, and latencies take "
        f"{parts['latency_s'] * 1e3:.3g} ms; on the host, {each} = {parts['host_s'] * 1e3:.3g} ms; {together}"
    )
