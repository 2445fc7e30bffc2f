"""Measure host time: of a launch, and of a training step per operator (Python, autograd, dispatch, launch), block and step.

In a step of a network with tiny tensors, the device always waits for the host, so the time of the step is the host time. Large
models are limited by the host in the same way wherever their kernels are shorter.

Convolutions and batch norms have a separate cost, because a library (cuDNN, MIOpen) looks up a plan for every call and enqueues
several kernels.

Each step also has a fixed cost: the optimizer's Python code, the start of autograd, clearing the gradients. To exclude it, the
cost per operator is the difference between a longer and a shorter step of the same kind.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hyperion.hardware import Device
from hyperion.measure.clock.clocks import WallClock, in_turn
from hyperion.measure.clock.timing import Timing, time_function, time_interleaved
from hyperion.measure.clock.verify import FORMATS, Verification
from hyperion.measure.products.dispatch import Call, dispatched, products_of
from hyperion.measure.steps.compilation import measure_first_calls
from hyperion.measure.traffic.cache_sweep import CachePoint, RepeatedCalls
from hyperion.results import Estimate, estimates_of_medians

_WIDTH = 16
_SEQUENCES, _IMAGES = (2, 16, _WIDTH), (2, _WIDTH, 2, _WIDTH)  # shapes of one batch; images are channels first
# The compiler fuses depending on shapes, so compiled blocks have realistic shapes: two heads of 64, an MLP four times as wide,
# and many rows. A sum over rows (one per bias and per norm parameter in the backward pass) is one kernel for up to 32 rows and
# two kernels for more (`Reduction.num_splits` in the Inductor of PyTorch 2.13). For a GPU with 132 units, Inductor schedules 17
# forward and 26 backward kernels for a layer of 32 rows, and 17 and 34 for 512 rows, for widths of 128 and 512 alike.
_COMPILED_WIDTH, _COMPILED_HEADS = 128, 2
_COMPILED_SEQUENCES = (32, 16, _COMPILED_WIDTH)
_IN_A_ROW = 3  # steps per sample
_FEW_LAYERS, _MANY_LAYERS = 1, 3
_FEW_CONVOLUTIONS, _MANY_CONVOLUTIONS = 2, 6
_FEW_BLOCKS, _MANY_BLOCKS = 2, 6
_PARITY_STEPS = 200
# Compiled 16-bit kernels round differently. On an H200, runs of these layers with different rounding scatter by 7e-4 (standard
# deviation of 8 runs, bf16), so a false alarm is rarer than 1 in 1,000,000.
_PARITY_TOLERANCE = 0.05
# Half of CUDA's queue of 1,024 launches: if the queue were full, the host would wait for the device.
_EAGER_CALLS = 500
_GRAPH_KERNELS = 1000


@dataclass(frozen=True)
class TinyTiming:
    """The timing of a step with tiny tensors, and the number of operators that move memory (without views).

    Args:
        parts: number of layers, or of convolutions with batch norm and activation.
        plain, convolutions: number of operators that are not `is_convolution`, and that are.
        timing: time of the whole step by the host's clock, steps in a row.
    """

    parts: int
    plain: int
    convolutions: int
    timing: Timing


@dataclass(frozen=True)
class OperatorCost:
    """The host cost of operators, from four steps timed in turn: few and many transformer layers, few and many convolutions.

    Args:
        layers, convolving: (few, many).
        verification: check that the loss decreased in all four.
    """

    layers: tuple[TinyTiming, TinyTiming]
    convolving: tuple[TinyTiming, TinyTiming]
    verification: Verification

    @property
    def operators(self) -> int:
        """Number of operators by which the two steps of layers differ."""
        few, many = self.layers
        return many.plain - few.plain

    @property
    def other_operators(self) -> int:
        """Number of other operators by which the two steps of convolutions differ."""
        few, many = self.convolving
        return many.plain - few.plain

    @property
    def convolutions(self) -> int:
        """Number of convolutions and batch norms by which the two steps of convolutions differ."""
        few, many = self.convolving
        return many.convolutions - few.convolutions

    @property
    def time_s(self) -> Estimate:
        """Host seconds per operator that moves memory and is not a convolution."""
        return self._estimates()[0]

    @property
    def convolution_time_s(self) -> Estimate:
        """Host seconds per convolution or batch norm, without the other operators of the same parts."""
        return self._estimates()[1]

    @property
    def once_s(self) -> Estimate:
        """Fixed host seconds of a step beyond its operators; can be negative if it is below the noise."""
        return self._estimates()[2]

    def _estimates(self) -> list[Estimate]:
        def costs(medians) -> list[float]:
            few, many, few_convolving, many_convolving = medians
            operator = (many - few) / self.operators
            convolution = (many_convolving - few_convolving - self.other_operators * operator) / self.convolutions
            return [operator, convolution, few - self.layers[0].plain * operator]

        return estimates_of_medians([step.timing.samples_s for step in (*self.layers, *self.convolving)], costs)


@dataclass(frozen=True)
class BlockCost:
    """The host cost of a compiled block, from steps with few and many blocks timed in turn.

    Each block is a small transformer layer.

    Args:
        kernels: kernels per block as `predict_step` counts them: two per product, forward and backward.
        blocks: number of blocks by which the two steps differ.
        few, many: time of whole steps by the host's clock, steps in a row.
        compile_time_s: compile time in seconds; all blocks share the compiled code.
        verification: check of the mean loss of the first 200 steps against eager mode.
    """

    kernels: int
    blocks: int
    few: Timing
    many: Timing
    compile_time_s: float
    verification: Verification

    @property
    def time_s(self) -> Estimate:
        """Host seconds per compiled block, forward and backward, including the launches of its kernels."""
        series = [self.few.samples_s, self.many.samples_s]
        return estimates_of_medians(series, lambda medians: [(medians[1] - medians[0]) / self.blocks])[0]


def is_convolution(call: Call) -> bool:
    """Return whether an operator is a convolution or a batch norm, forward or backward."""
    return "convolution" in call.name or "batch_norm" in call.name


def measure_operator_cost(device: Device, *, time_limit_s: float = 2.0) -> OperatorCost:
    """Measure the host cost of operators with eager training steps of networks with tiny tensors.

    Args:
        time_limit_s: seconds of sampling for all four steps; each warm-up takes at most half as long.
    """
    layers, convolving = (_FEW_LAYERS, _MANY_LAYERS), (_FEW_CONVOLUTIONS, _MANY_CONVOLUTIONS)
    steps = [_TinyStep(device, _layers(count), _SEQUENCES) for count in layers]
    steps += [_TinyStep(device, _convolutions(count), _IMAGES) for count in convolving]
    for step in steps:
        step()  # creates the state of the optimizer, which later steps do not
    calls = [[call for call in dispatched(step) if call.moves] for step in steps]
    apart = [sum(map(is_convolution, some)) for some in calls]
    timings = _timed(steps, device, time_limit_s)
    steps_timed = [
        TinyTiming(parts, len(some) - convolutions, convolutions, timing)
        for parts, some, convolutions, timing in zip((*layers, *convolving), calls, apart, timings, strict=True)
    ]
    learned = Verification("last loss / first loss", max(float(s.losses[-1] / s.losses[0]) for s in steps), 1.0)
    return OperatorCost((steps_timed[0], steps_timed[1]), (steps_timed[2], steps_timed[3]), learned)


def measure_block_cost(device: Device, dtype: str = "fp32", *, time_limit_s: float = 2.0) -> BlockCost:
    """Measure the host cost of compiled blocks: small transformer layers, each compiled separately.

    Args:
        dtype: fp32, or bf16 or fp16 with autocast.
        time_limit_s: as in `measure_operator_cost`; compilation with empty caches is not included.

    Raises:
        torch._dynamo.exc.TorchDynamoException: the compiler failed.
    """
    eager = [_block_step(device, count, dtype) for count in (1, _FEW_BLOCKS)]
    one, two = (sum(products_of(call) is not None for call in dispatched(step)) for step in eager)
    steps = [_block_step(device, count, dtype, compiled=True) for count in (_FEW_BLOCKS, _MANY_BLOCKS)]
    compile_time_s = measure_first_calls(lambda: [step() for step in steps], device)
    deviation = abs(steps[0].mean_loss(_PARITY_STEPS) / eager[1].mean_loss(_PARITY_STEPS) - 1)
    parity = Verification(f"loss beside eager, mean of {_PARITY_STEPS} steps", deviation, _PARITY_TOLERANCE)
    few, many = _timed(steps, device, time_limit_s)
    torch._dynamo.reset()  # compiled code holds references to the networks
    kernels = 2 * (two - one) // (_FEW_BLOCKS - 1)
    return BlockCost(kernels, _MANY_BLOCKS - _FEW_BLOCKS, few, many, compile_time_s, parity)


def _timed(steps: list, device: Device, time_limit_s: float) -> list[Timing]:
    return time_interleaved(steps, device, cold=False, back_to_back=_IN_A_ROW, time_limit_s=time_limit_s)


def _block_step(device: Device, count: int, dtype: str, compiled: bool = False) -> "_TinyStep":
    parts = _layers(count, _COMPILED_WIDTH, _COMPILED_HEADS, 4 * _COMPILED_WIDTH)
    return _TinyStep(device, parts, _COMPILED_SEQUENCES, dtype, compiled)


def _layers(count: int, width: int = _WIDTH, heads: int = 2, hidden: int = _WIDTH) -> Callable[[], list[nn.Module]]:
    return lambda: [nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True) for _ in range(count)]


def _convolutions(count: int) -> Callable[[], list[nn.Module]]:
    def part() -> nn.Module:
        # No bias before a batch norm, as usual: a bias would add kernels of its own.
        convolution = nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(_WIDTH), nn.ReLU())

    return lambda: [part() for _ in range(count)]


class _TinyStep:
    """A training step of a small network on one batch; weights and batch are the same for every instance.

    Args:
        parts: returns the parts of the network. A linear layer precedes them, so that their input has a gradient.
        shape: shape of the batch.
        compiled: whether each part is compiled separately.

    Attributes:
        losses: loss of every step, scalars on the device.
    """

    def __init__(
        self,
        device: Device,
        parts: Callable[[], list[nn.Module]],
        shape: tuple[int, ...],
        dtype: str = "fp32",
        compiled: bool = False,
    ):
        # Drawn on the host in a fork of its generator, so that the caller's random numbers do not change.
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(0)
            blocks, inputs = parts(), torch.randn(shape)
            self._network = nn.Sequential(nn.Linear(shape[-1], shape[-1]), *blocks).to(device.torch_device)
        self._inputs = inputs.to(device.torch_device)
        for block in blocks if compiled else ():
            block.forward = torch.compile(block.forward, dynamic=False)
        half = None if dtype == "fp32" else FORMATS[dtype].storage
        self._autocast = torch.autocast(self._inputs.device.type, half, enabled=half is not None)
        self._optimizer = torch.optim.AdamW(self._network.parameters(), lr=1e-3, fused=True)
        self.losses: list[Tensor] = []

    def __call__(self) -> None:
        with self._autocast:
            loss = self._network(self._inputs).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.detach())

    def mean_loss(self, count: int) -> float:
        """Return the mean loss of the first `count` steps; missing steps run now."""
        while len(self.losses) < count:
            self()
        return float(torch.stack(self.losses[:count]).double().mean())


@dataclass(frozen=True)
class LaunchCost:
    """The launch overhead of a minimal kernel (add 1 to one number) from Python.

    Args:
        eager: host seconds to enqueue one kernel. On a CPU, where a call is synchronous, seconds of the whole call: the time
            of the dispatcher for an operator without work.
        eager_calls: calls per sample of `eager`.
        graph: device seconds per kernel in a replayed CUDA or HIP graph; None without graphs.
        graph_kernels: kernels in the graph; 0 without graphs.
        graph_reason: why `graph` is None, else "".
        asynchronous: whether a call returns before its work is done.
        verification: check that every call, eager and replayed, did its work once.
    """

    eager: Timing
    eager_calls: int
    graph: Timing | None
    graph_kernels: int
    graph_reason: str
    asynchronous: bool
    verification: Verification


@dataclass(frozen=True)
class WorthwhileSize:
    """The size of the copy that takes as long as its launch.

    Args:
        bytes: bytes read plus bytes written by this copy, interpolated between measured sizes; None for the reason in
            `reason`. Smaller eager copies are launch-bound.
        reason: why `bytes` is None, else "".
        basis: the compared times.
    """

    bytes: Estimate | None
    reason: str
    basis: str


def measure_launch(device: Device, *, time_limit_s: float = 1.0) -> LaunchCost:
    """Time launches of a kernel that adds 1 to one number: eagerly, and 1,000 of them in a graph if supported.

    Args:
        time_limit_s: seconds for each of the two.
    """
    counter = torch.zeros(1, dtype=torch.int64, device=device.torch_device)

    def call() -> None:
        counter.add_(1)

    clock = _EnqueueClock(device, _EAGER_CALLS)
    eager = time_function(call, device, cold=False, time_limit_s=time_limit_s, clock=clock)
    repeated = RepeatedCalls(call, device, calls=_GRAPH_KERNELS)
    graph = repeated.time(time_limit_s) if repeated.graph is not None else None
    verification = _verify_counts(counter, call, repeated)
    kernels = repeated.calls if graph is not None else 0
    return LaunchCost(eager, _EAGER_CALLS, graph, kernels, repeated.not_captured, device.kind != "cpu", verification)


def worthwhile_size(cost: LaunchCost, copies: Sequence[CachePoint]) -> WorthwhileSize:
    """Return the size at which a copy takes as long as its launch.

    On a GPU, the time of a copy in a graph equals the time of an eager launch at this size: a loop of larger copies is limited by
    the device, a loop of smaller copies by the host. On a CPU, whose call time contains both, the whole call equals twice the
    launch. Between measured sizes, size and time are interpolated on logarithmic scales. The interval is a bootstrap over all
    timings, limited to the measured sizes.

    Args:
        cost: result of `measure_launch`.
        copies: at least two points of `measure_cache_sweep("copy", …)` in order of size.
    """
    factor, basis = 1.0, "a copy's time on the device = the host's time to launch a kernel eagerly"
    if not cost.asynchronous:
        factor, basis = 2.0, "a copy's whole call = twice the call of an operator with nothing to do"
    elif not all(point.captured for point in copies):
        uncaptured = next(point for point in copies if not point.captured)
        return WorthwhileSize(None, f"the copies' times hold their launches: {uncaptured.how}", basis)
    target = factor * cost.eager.estimate.value
    times = [point.timing.estimate.value for point in copies]
    if times[-1] <= target:
        largest = copies[-1].bytes
        return WorthwhileSize(None, f"even a copy of {largest:,} bytes works no longer than its launch takes", basis)
    if min(times) >= target:
        smallest = copies[0].bytes
        return WorthwhileSize(None, f"even a copy of {smallest:,} bytes works longer than its launch takes", basis)
    sizes = [point.bytes for point in copies]
    series = [cost.eager.samples_s, *(point.timing.samples_s for point in copies)]
    [size] = estimates_of_medians(series, lambda medians: [_crossing(factor * medians[0], medians[1:], sizes)])
    return WorthwhileSize(size, "", basis)


def _crossing(target: float, times: np.ndarray, sizes: Sequence[int]) -> float:
    """Return the largest size at which the times cross the target; the first or last size if they do not."""
    below = np.flatnonzero(np.asarray(times) <= target)
    if len(below) == 0:
        return float(sizes[0])
    last = below[-1]
    if last == len(sizes) - 1:
        return float(sizes[-1])
    ends = np.log(times[last : last + 2])
    share = (np.log(target) - ends[0]) / (ends[1] - ends[0])
    return float(sizes[last] * (sizes[last + 1] / sizes[last]) ** share)


class _EnqueueClock(WallClock):
    """The monotonic clock around `calls` calls in a row that start on an idle device, without waiting for their work."""

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        return in_turn(functions, count, self._enqueue)

    def _enqueue(self, function: Callable) -> float:
        self.synchronize()
        start = time.perf_counter_ns()
        for _ in range(self.calls):
            function()
        return (time.perf_counter_ns() - start) / 1e9 / self.calls


def _verify_counts(counter: torch.Tensor, call: Callable[[], None], repeated: RepeatedCalls) -> Verification:
    """Check that the counter equals the number of calls: those of one eager sample, then one replay."""
    counter.zero_()
    for _ in range(_EAGER_CALLS):
        call()
    expected = _EAGER_CALLS
    if repeated.graph is not None:
        repeated.graph.replay()
        expected += repeated.calls
    return Verification("calls counted", abs(counter.item() - expected) / expected, 0.0)
