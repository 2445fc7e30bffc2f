"""Predict the time of a step from measured ceilings and its operators, before it runs.

Device: operators run one after the other. The time of a matrix product is the larger of its FLOPs / the rate expected for its
size (`ProductRates`) and its bytes / bandwidth. The time of any other operator is its bytes / bandwidth (each input read once,
each output written once) plus a latency.

Host: a time per operator, plus a fixed time per step. A GPU works in parallel to the host, so the slower of the two decides. On a
CPU, both times add up.

Compiled code fuses the operators between two products: an operand of a product is written once, and its result is read once. So
the other operators move as many bytes as the products, in one kernel per product. The host also pays for entering each block that
is compiled separately, forward and backward.

The model omits effects that make real steps longer: convolution kernels slower than products of their size (mostly float32
without TF32), norms that read their input twice, layout conversions inside libraries, and host and device waiting for each other
in turn.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hyperion.errors import HyperionError
from hyperion.measure.products.dispatch import Call, Product, dispatched, products_of
from hyperion.measure.products.gap import TILES, best_tiling, tile
from hyperion.measure.steps.operator_cost import is_convolution


@dataclass(frozen=True)
class ProductRates:
    """Expected rates of products of any size, from measured rates of a few square ones of one dtype on one device.

    The model: rate = share of the units that the tiles fill x rate of a full device for this K. The share follows from the sizes.
    The second factor is measured rate / share, interpolated over log K and constant outside of the measured K. It is low for
    short K, because loads are not hidden and the start and end of a tile cost as much as for long K. If K is long and there are
    few tiles, as for weight gradients, K is split, down to the shortest measured K.

    Args:
        units: number of compute units.
        k: measured values of K, ascending.
        filled_tflops: rate of a full device at each K, in 10¹² FLOP/s.
    """

    units: int
    k: tuple[int, ...]
    filled_tflops: tuple[float, ...]

    @classmethod
    def fit(cls, measured: Iterable[tuple[int, int, int, float]], units: int) -> "ProductRates":
        """Fit to measured products (M, N, K, 10¹² FLOP/s); for each K the fastest one counts.

        Raises:
            HyperionError: there are no measured products.
        """
        filled: dict[int, float] = {}
        for m, n, k, tflops in measured:
            filled[k] = max(filled.get(k, 0.0), tflops / best_tiling(m, n, units).share)
        if not filled:
            raise HyperionError(
                "no measured rate", where="ProductRates.fit", next_step="measure at least one product of the dtype first"
            )
        return cls(units, tuple(sorted(filled)), tuple(filled[k] for k in sorted(filled)))

    def tflops(self, product: Product) -> float:
        """Return the expected rate of a product in 10¹² FLOP/s, for the best tile size and number of splits."""
        ways = [(size, splits) for size in TILES for splits in self._splits(product.k)]
        return max(
            tile(product.m, product.n, product.batch, self.units, size, splits).share * self._filled(product.k / splits)
            for size, splits in ways
        )

    def _splits(self, k: int) -> list[int]:
        return [1] + [1 << power for power in range(1, 8) if k / (1 << power) >= self.k[0]]

    def _filled(self, k: float) -> float:
        return float(np.exp(np.interp(np.log(k), np.log(self.k), np.log(self.filled_tflops))))


# Prefixes of optimizer operators. (`_fused_rms_norm` and `_fused_dropout` are other operators.)
_OPTIMIZER = ("_fused_adam", "_fused_adagrad", "_fused_sgd", "_foreach_")


@dataclass(frozen=True)
class MemoryStream:
    """time = latency + bytes / bandwidth of operators that only move memory.

    Args:
        bandwidth_gb_s: bandwidth in 10⁹ bytes/s.
        latency_s: seconds of an operator that moves no bytes.
    """

    bandwidth_gb_s: float
    latency_s: float

    @classmethod
    def fit(cls, measured: Sequence[tuple[float, float]]) -> "MemoryStream":
        """Fit to measured streams (bytes, GB/s) by least squares of the relative errors in time.

        Raises:
            HyperionError: there are fewer than two sizes.
        """
        size = np.array([traffic for traffic, _ in measured], dtype=np.float64)
        if len(set(size)) < 2:
            raise HyperionError(
                f"{len(set(size))} stream sizes, but a fit of latency and bandwidth needs two",
                where="MemoryStream.fit",
                next_step="measure the bandwidth at several sizes",
            )
        seconds = size / (np.array([rate for _, rate in measured]) * 1e9)
        columns = np.column_stack([1 / seconds, size / size.max() / seconds])
        from scipy.optimize import nnls  # imported here because it takes half a second in every worker process

        latency, slope = nnls(columns, np.ones(len(size)))[0]
        return cls(float(size.max() / slope / 1e9), float(latency))


@dataclass(frozen=True)
class StepCeilings:
    """The measurements for a prediction.

    Args:
        products: rates by captured dtype; if float32 products use TF32 units, "fp32" has the rates of tf32.
        memory: latency and bandwidth of streams.
        operator_time_s: host seconds per operator, see `measure_operator_cost`.
        overlapped: whether the device works in parallel to the host; False on a CPU.
        convolution_time_s: host seconds per convolution and batch norm; None if they count as other operators.
        step_overhead_s: fixed host seconds of a step; 0 if not measured.
    """

    products: Mapping[str, ProductRates]
    memory: MemoryStream
    operator_time_s: float
    overlapped: bool
    convolution_time_s: float | None = None
    step_overhead_s: float = 0.0

    def host_s(self, calls: Sequence[Call]) -> float:
        """Return the host seconds of a step that dispatches these operators one by one; views are free."""
        moving = [call for call in calls if call.moves]
        apart = 0 if self.convolution_time_s is None else sum(map(is_convolution, moving))
        operators_s = (len(moving) - apart) * self.operator_time_s + apart * (self.convolution_time_s or 0.0)
        return operators_s + self.step_overhead_s


@dataclass(frozen=True)
class CompiledHost:
    """The host cost of a step with compiled blocks, forward and backward.

    Args:
        kernel_time_s: seconds per kernel of compiled code.
        blocks: number of blocks that are compiled separately.
        entry_time_s: seconds per block besides its kernels: guards, and autograd around the compiled code.
    """

    kernel_time_s: float
    blocks: int = 0
    entry_time_s: float = 0.0


@dataclass(frozen=True)
class StepPrediction:
    """The predicted parts of a step in seconds.

    Args:
        products_s: matrix products, convolutions and attention.
        memory_s: memory time of all other operators except the optimizer's.
        optimizer_s: memory time of the optimizer's operators.
        latency_s: latencies of all operators that are not products; 0 on a CPU, where they are part of the host time.
        host_s: host time of all operators and of the step.
        overlapped: whether device and host work in parallel.
        operators: number of operators that move memory.
        basis: description of how the total is computed.
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
        """Seconds of the device."""
        return self.products_s + self.memory_s + self.optimizer_s + self.latency_s

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return max(self.device_s, self.host_s) if self.overlapped else self.device_s + self.host_s

    def __str__(self) -> str:
        return f"{self.total_s * 1e3:.4g} ms: {self.basis}"


def training_calls(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> list[Call]:
    """Return the operators of a training step (forward, loss, backward, update) with an initialised optimizer.

    Call this within `shapes_only`. On real tensors it changes the model: it runs an update with zero gradients and a step.

    Args:
        loss: runs the forward pass and returns the loss.
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
        step: a function that does one step, called once, preferably within `shapes_only`; or the operators of a step from
            `training_calls` or `dispatched`.
        ceilings: measured ceilings.
        compiled: host cost of compiled blocks; None for an eager step.

    Raises:
        HyperionError: the dtype of a product has no rate, or no operator moves memory.
    """
    calls = [call for call in (dispatched(step) if callable(step) else step) if call.moves]
    if not calls:
        raise HyperionError(
            "no operator of the step moves memory", where="predict_step", next_step="pass a function that does a complete step"
        )
    bandwidth = ceilings.memory.bandwidth_gb_s * 1e9
    products = [product for call in calls for product in products_of(call) or ()]
    others = [call for call in calls if products_of(call) is None]
    update = [call for call in others if call.name.startswith(_OPTIMIZER)]
    moved, updated = (sum(call.bytes for call in some) for some in (others, update))
    moved, small, host_s = moved - updated, len(others), ceilings.host_s(calls)
    if compiled is not None:
        fused = len(calls) - len(others)  # one fused kernel per product
        moved, small = min(moved, sum(product.bytes for product in products)), min(small, fused + len(update))
        entries_s = compiled.blocks * compiled.entry_time_s
        host_s = 2 * fused * compiled.kernel_time_s + entries_s + ceilings.host_s(update)
    parts = {
        "products_s": sum(_product_s(product, ceilings) for product in products),
        "memory_s": moved / bandwidth,
        "optimizer_s": updated / bandwidth,
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
        together = "one after the other"
    elif parts["host_s"] > device_s:
        together = "the host's time decides"
    else:
        together = "the device's time decides"
    apart = 0 if ceilings.convolution_time_s is None else sum(map(is_convolution, calls))
    rest, each = "other operators' bytes", f"{len(calls) - apart} operators of {ceilings.operator_time_s * 1e6:.3g} us"
    if apart and ceilings.convolution_time_s is not None:
        each += f" and {apart} convolutions and batch norms of {ceilings.convolution_time_s * 1e6:.3g} us"
    if compiled is not None:
        rest, each = "what is fused between them", f"two kernels a product of {compiled.kernel_time_s * 1e6:.3g} us"
        if compiled.blocks:
            each += f", {compiled.blocks} blocks entered for {compiled.entry_time_s * 1e6:.3g} us each"
        each += ", and the update"
    if ceilings.step_overhead_s:
        each += f", {ceilings.step_overhead_s * 1e6:.3g} us once"
    return (
        f"products of {flops / 1e9:.4g} GFLOP at measured rates of their size {parts['products_s'] * 1e3:.3g} ms, "
        f"{rest} at {ceilings.memory.bandwidth_gb_s:.4g} GB/s {parts['memory_s'] * 1e3:.3g} ms, "
        f"update {parts['optimizer_s'] * 1e3:.3g} ms, latencies {parts['latency_s'] * 1e3:.3g} ms; "
        f"host {each} = {parts['host_s'] * 1e3:.3g} ms; {together}"
    )
