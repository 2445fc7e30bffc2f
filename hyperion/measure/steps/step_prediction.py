"""How long should a step take? From measured ceilings and from what it dispatches, before it has run once.

The device does the step's operators one after the other. A matrix product takes as long as its FLOPs at the rate that its
size should reach (`ProductRates`), or as its traffic, whichever is longer; any other operator as long as its traffic, every
input read once and every output written once, and the latency that even the smallest stream has. The host meanwhile spends
its own time on every operator, and some more once a step. An accelerator works while the host goes on, and the slower of the
two decides; a CPU is host and device in one, and the times add up.

Compiled code fuses what lies between two products: an operand of a product is written once, by what made it, and its result
is read once, by what uses it. So the rest moves as many bytes as the products themselves, and launches one kernel for each.
What was compiled block by block is entered block by block, forward and backward, and the host pays for each entry.

What it does not know makes steps longer than foretold: convolutions whose kernels are slower than products of their sizes
(float32 without TF32 above all), norms that read their input twice, layouts that a library turns round before it multiplies,
and a host and a device that wait for each other by turns.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hyperion.errors import HyperionError
from hyperion.measure.products.dispatch import Call, dispatched
from hyperion.measure.products.gap import TILES, best_tiling, tile
from hyperion.measure.products.product_formulas import Product, products_of
from hyperion.measure.steps.operator_cost import is_convolution


@dataclass(frozen=True)
class ProductRates:
    """Rates of products of one dtype on one device.

    Args:
        units: compute units that tiles are dealt to.
        k: lengths of K that were measured, ascending.
        filled_tflops: at each, the rate over the share of the units that the product's tiles fill.
    """

    units: int
    k: tuple[int, ...]
    filled_tflops: tuple[float, ...]

    @classmethod
    def fit(cls, measured: Iterable[tuple[int, int, int, float]], units: int) -> "ProductRates":
        """From (M, N, K, TFLOPS) of measured products; of several with the same K the fastest counts.

        Raises:
            HyperionError: nothing was measured.
        """
        filled: dict[int, float] = {}
        for m, n, k, tflops in measured:
            filled[k] = max(filled.get(k, 0.0), tflops / best_tiling(m, n, units).share)
        if not filled:
            raise HyperionError(
                "no rate to go by", where="ProductRates.fit", next_step="measure at least one product of the dtype first"
            )
        return cls(units, tuple(sorted(filled)), tuple(filled[k] for k in sorted(filled)))

    def tflops(self, product: Product) -> float:
        """The rate of a product, by the tile size and the number of splits that promise most."""
        ways = [(size, splits) for size in TILES for splits in self._splits(product.k)]
        return max(
            tile(product.m, product.n, product.batch, self.units, size, splits).share * self._filled(product.k / splits)
            for size, splits in ways
        )

    def _splits(self, k: int) -> list[int]:
        return [1] + [1 << power for power in range(1, 8) if k / (1 << power) >= self.k[0]]

    def _filled(self, k: float) -> float:
        return float(np.exp(np.interp(np.log(k), np.log(self.k), np.log(self.filled_tflops))))


# `_fused_rms_norm` and `_fused_dropout` are no part of an update.
_OPTIMIZER = ("_fused_adam", "_fused_adagrad", "_fused_sgd", "_foreach_")


@dataclass(frozen=True)
class MemoryStream:
    """time = latency + bytes / bandwidth of operators that only move memory.

    Args:
        latency_s: seconds of one that moves nothing.
    """

    bandwidth_gb_s: float
    latency_s: float

    @classmethod
    def fit(cls, measured: Sequence[tuple[float, float]]) -> "MemoryStream":
        """From (bytes, GB/s) of measured streams, by least squares of relative distances in time.

        Raises:
            HyperionError: fewer than two sizes: neither number follows from one.
        """
        size = np.array([traffic for traffic, _ in measured], dtype=np.float64)
        if len(set(size)) < 2:
            raise HyperionError(
                f"{len(set(size))} sizes of streams: a latency and a bandwidth need two",
                where="MemoryStream.fit",
                next_step="measure the bandwidth at several sizes",
            )
        seconds = size / (np.array([rate for _, rate in measured]) * 1e9)
        columns = np.column_stack([1 / seconds, size / size.max() / seconds])
        from scipy.optimize import nnls  # here: it takes half a second, which every worker process would pay

        latency, slope = nnls(columns, np.ones(len(size)))[0]
        return cls(float(size.max() / slope / 1e9), float(latency))


@dataclass(frozen=True)
class StepCeilings:
    """The measurements that a prediction rests on.

    Args:
        products: rates by dtype as it is captured; where float32 products run on TF32 units, under "fp32" those of tf32.
        memory: of streams.
        operator_time_s: host seconds for each operator, see `measure_operator_cost`.
        overlapped: whether the device works while the host goes on; false on a CPU.
        convolution_time_s: host seconds for each convolution and batch norm; None where they count as any operator.
        step_overhead_s: host seconds of a step beyond its operators: what the update's Python and the start of autograd
            cost once; 0 where it was not measured.
    """

    products: Mapping[str, ProductRates]
    memory: MemoryStream
    operator_time_s: float
    overlapped: bool
    convolution_time_s: float | None = None
    step_overhead_s: float = 0.0

    def host_s(self, calls: Sequence[Call]) -> float:
        """The host's seconds for a step that dispatches these operators one by one; views are free."""
        moving = [call for call in calls if call.moves]
        apart = 0 if self.convolution_time_s is None else sum(map(is_convolution, moving))
        operators_s = (len(moving) - apart) * self.operator_time_s + apart * (self.convolution_time_s or 0.0)
        return operators_s + self.step_overhead_s


@dataclass(frozen=True)
class CompiledHost:
    """The host's seconds in a step whose blocks are compiled, forward and backward.

    Args:
        kernel_time_s: for each kernel that compiled code launches.
        blocks: compiled by themselves.
        entry_time_s: for each of them beside its kernels: guards, and autograd around what was compiled.
    """

    kernel_time_s: float
    blocks: int = 0
    entry_time_s: float = 0.0


@dataclass(frozen=True)
class StepPrediction:
    """A step in its parts, in seconds.

    Args:
        products_s: matrix products, convolutions and attention.
        memory_s: bytes of all other operators but the optimizer's.
        optimizer_s: bytes of the optimizer's operators.
        latency_s: latencies of the operators that are no product; 0 on a CPU, where it is the host's.
        host_s: the host's time for all operators, and once for the step.
        overlapped: whether the device's parts and the host's run at the same time.
        operators: those that move memory.
        basis: how the total comes about, in words.
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
        return self.products_s + self.memory_s + self.optimizer_s + self.latency_s

    @property
    def total_s(self) -> float:
        return max(self.device_s, self.host_s) if self.overlapped else self.device_s + self.host_s

    def __str__(self) -> str:
        return f"{self.total_s * 1e3:.4g} ms: {self.basis}"


def training_calls(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> list[Call]:
    """What a training step dispatches once the optimizer has its state: forward with loss, backward, update.

    Args:
        loss: does the forward pass. Call this within `shapes_only`, with everything in it: on real tensors it is a step, and
            an update with gradients of zero before it.
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
    """Predict how long a step takes.

    Args:
        step: what does it, called once, best within `shapes_only`; or what `training_calls` or `dispatched` listed of it.
        compiled: what the host does for a step whose blocks are compiled; None for one that is dispatched operator by
            operator.

    Raises:
        HyperionError: a product's dtype has no rate, or the step dispatches nothing that moves memory.
    """
    calls = [call for call in (dispatched(step) if callable(step) else step) if call.moves]
    if not calls:
        raise HyperionError("the step moves nothing", where="predict_step", next_step="pass a function that does a whole step")
    bandwidth = ceilings.memory.bandwidth_gb_s * 1e9
    products = [product for call in calls for product in products_of(call) or ()]
    others = [call for call in calls if products_of(call) is None]
    update = [call for call in others if call.name.startswith(_OPTIMIZER)]
    moved, updated = (sum(call.bytes for call in some) for some in (others, update))
    moved, small, host_s = moved - updated, len(others), ceilings.host_s(calls)
    if compiled is not None:
        fused = len(calls) - len(others)  # a kernel beside each call of a product
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
            f"no measured rate of {product.dtype}, which {product} is in",
            where="predict_step",
            next_step=f"measure products of {product.dtype} first; there are {', '.join(ceilings.products) or 'none'}",
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
    if apart:
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
