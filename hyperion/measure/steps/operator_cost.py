"""Measure the host time of a kernel launch, and the host time of a training step per operator and per compiled block.

The host time of an operator is the time that Python, autograd, the dispatcher and the launch take. It is measured with a network
of tiny tensors. In a training step of this network, the device always waits for the host, so the time of the step is the host
time. In a large model, the device also waits for the host wherever a kernel takes less time than the host needs for an operator.

Convolutions and batch norms have a separate cost, because in each of their calls a library (cuDNN or MIOpen) looks up a plan and
enqueues several kernels.

Each step also has a fixed cost for the Python code of the optimizer, for starting autograd, and for clearing the gradients. To
exclude it, two steps of the same kind with different numbers of operators are timed. The cost per operator is the difference
between their times divided by the difference between their numbers of operators.
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
_SEQUENCES, _IMAGES = (2, 16, _WIDTH), (2, _WIDTH, 2, _WIDTH)  # shapes of one batch; the images have channels first
# Which operators the compiler fuses depends on their shapes. Therefore compiled blocks have realistic shapes: two heads of width
# 64, an MLP four times as wide as the layer, and many rows. In the backward pass, each bias and each norm parameter needs a sum
# over rows. Such a sum is one kernel for up to 32 rows and two kernels for more rows (`Reduction.num_splits` in the Inductor of
# PyTorch 2.13). For a GPU with 132 units, Inductor schedules 17 forward and 26 backward kernels for a layer with 32 rows, and 17
# forward and 34 backward kernels for a layer with 512 rows. These numbers are the same for widths 128 and 512.
_COMPILED_WIDTH, _COMPILED_HEADS = 128, 2
_COMPILED_SEQUENCES = (32, 16, _COMPILED_WIDTH)
_IN_A_ROW = 3  # steps per sample
_FEW_LAYERS, _MANY_LAYERS = 1, 3
_FEW_CONVOLUTIONS, _MANY_CONVOLUTIONS = 2, 6
_FEW_BLOCKS, _MANY_BLOCKS = 2, 6
_PARITY_STEPS = 200
# Tolerance for the relative difference between the mean losses of compiled and eager training. In 16-bit formats, compiled
# kernels round differently from eager kernels. On an H200, the standard deviation over 8 runs of these layers in bf16 with
# different rounding was 7e-4, so the probability of a false alarm is below 1 in 1,000,000.
_PARITY_TOLERANCE = 0.05
# About half of the 1,024 launches that fit into CUDA's queue. If the queue were full, the host would wait for the device.
_EAGER_CALLS = 500
_GRAPH_KERNELS = 1000


@dataclass(frozen=True)
class TinyTiming:
    """The timing of a step with tiny tensors, and the numbers of its operators. Views are not counted.

    Args:
        parts: number of parts of the network. A part is a transformer layer, or a convolution with batch norm and activation.
        plain: number of operators that are neither convolutions nor batch norms.
        convolutions: number of operators that are convolutions or batch norms.
        timing: seconds per step on the host's clock, averaged over several steps in a row.
    """

    parts: int
    plain: int
    convolutions: int
    timing: Timing


@dataclass(frozen=True)
class OperatorCost:
    """The host cost of operators, computed from four training steps that were timed alternately.

    Args:
        layers: timings of a step with few and of a step with many transformer layers.
        convolving: timings of a step with few and of a step with many convolutions.
        verification: check that the loss decreased in all four networks.
    """

    layers: tuple[TinyTiming, TinyTiming]
    convolving: tuple[TinyTiming, TinyTiming]
    verification: Verification

    @property
    def operators(self) -> int:
        """Difference in the number of operators between the steps with many and with few transformer layers."""
        few, many = self.layers
        return many.plain - few.plain

    @property
    def other_operators(self) -> int:
        """Difference in the number of other operators between the steps with many and with few convolutions.

        Other operators are neither convolutions nor batch norms.
        """
        few, many = self.convolving
        return many.plain - few.plain

    @property
    def convolutions(self) -> int:
        """Difference in the number of convolutions and batch norms between the steps with many and with few convolutions."""
        few, many = self.convolving
        return many.convolutions - few.convolutions

    @property
    def time_s(self) -> Estimate:
        """Host seconds per operator that reads or writes memory and is not a convolution or batch norm."""
        return self._estimates()[0]

    @property
    def convolution_time_s(self) -> Estimate:
        """Host seconds per convolution or batch norm."""
        return self._estimates()[1]

    @property
    def once_s(self) -> Estimate:
        """Fixed host seconds of a step, without its operators. The value can be negative because of noise."""
        return self._estimates()[2]

    def _estimates(self) -> list[Estimate]:
        def costs(medians) -> list[float]:
            few, many, few_convolving, many_convolving = medians
            operator = (many - few) / self.operators
            # A part with a convolution also has other operators. Subtract their time.
            convolution = (many_convolving - few_convolving - self.other_operators * operator) / self.convolutions
            return [operator, convolution, few - self.layers[0].plain * operator]

        return estimates_of_medians([step.timing.samples_s for step in (*self.layers, *self.convolving)], costs)


@dataclass(frozen=True)
class BlockCost:
    """The host cost of a compiled block, computed from two training steps that were timed alternately.

    One step has few blocks, and the other step has many blocks. Each block is a small transformer layer.

    Args:
        kernels: number of kernels per block, counted as in `predict_step`: two kernels per matrix product of the forward and the
            backward pass.
        blocks: difference between the numbers of blocks of the two steps.
        few: timing of the step with few blocks: seconds per step on the host's clock, averaged over several steps in a row.
        many: timing of the step with many blocks.
        compile_time_s: compile time in seconds. All blocks share the compiled code.
        verification: check that the mean loss of the first 200 steps agrees with eager mode.
    """

    kernels: int
    blocks: int
    few: Timing
    many: Timing
    compile_time_s: float
    verification: Verification

    @property
    def time_s(self) -> Estimate:
        """Host seconds per compiled block in the forward and backward pass, including the launches of its kernels."""
        series = [self.few.samples_s, self.many.samples_s]
        return estimates_of_medians(series, lambda medians: [(medians[1] - medians[0]) / self.blocks])[0]


def is_convolution(call: Call) -> bool:
    """Return True if an operator is a convolution or a batch norm, forward or backward."""
    return "convolution" in call.name or "batch_norm" in call.name


def measure_operator_cost(device: Device, *, time_limit_s: float = 2.0) -> OperatorCost:
    """Measure the host cost of operators with eager training steps of networks with tiny tensors.

    Args:
        time_limit_s: total seconds of sampling for all four steps. Each warm-up takes at most half as long.
    """
    layers, convolving = (_FEW_LAYERS, _MANY_LAYERS), (_FEW_CONVOLUTIONS, _MANY_CONVOLUTIONS)
    steps = [_TinyStep(device, _layers(count), _SEQUENCES) for count in layers]
    steps += [_TinyStep(device, _convolutions(count), _IMAGES) for count in convolving]
    for step in steps:
        step()  # the first step has more operators than later steps, because it creates the optimizer state
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
    """Measure the host cost of compiled blocks. The blocks are small transformer layers that are compiled separately.

    Args:
        dtype: "fp32", or "bf16" or "fp16" for autocast to this dtype.
        time_limit_s: total seconds of sampling for both steps. Compilation, which starts with empty caches, is not included.

    Raises:
        torch._dynamo.exc.TorchDynamoException: the compiler failed.
    """
    eager = [_block_step(device, count, dtype) for count in (1, _FEW_BLOCKS)]
    one, two = (sum(products_of(call) is not None for call in dispatched(step)) for step in eager)
    steps = [_block_step(device, count, dtype, compiled=True) for count in (_FEW_BLOCKS, _MANY_BLOCKS)]
    compile_time_s = measure_first_calls(lambda: [step() for step in steps], device)
    deviation = abs(steps[0].mean_loss(_PARITY_STEPS) / eager[1].mean_loss(_PARITY_STEPS) - 1)
    parity = Verification(f"loss compared with eager, mean of {_PARITY_STEPS} steps", deviation, _PARITY_TOLERANCE)
    few, many = _timed(steps, device, time_limit_s)
    torch._dynamo.reset()  # otherwise the compiled code would keep the networks alive
    # The difference between two networks counts only the products of the blocks, and not those of the layer before them.
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
        # As usual before a batch norm, the convolution has no bias. A bias would add kernels.
        convolution = nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(_WIDTH), nn.ReLU())

    return lambda: [part() for _ in range(count)]


class _TinyStep:
    """A training step of a small network on one batch. Instances with equal arguments have equal weights and batches.

    Args:
        parts: function that returns the parts of the network. A linear layer comes before them, so that their input needs a
            gradient.
        shape: shape of the batch.
        dtype: "fp32", or the dtype of autocast.
        compiled: whether each part is compiled separately.

    Attributes:
        losses: the loss of each step so far, as scalar tensors on the device.
    """

    def __init__(
        self,
        device: Device,
        parts: Callable[[], list[nn.Module]],
        shape: tuple[int, ...],
        dtype: str = "fp32",
        compiled: bool = False,
    ):
        # Use a forked CPU generator, so that the caller's random numbers do not change.
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
        """Run steps until there are at least `count` losses, and return the mean of the first `count` losses."""
        while len(self.losses) < count:
            self()
        return float(torch.stack(self.losses[:count]).double().mean())


@dataclass(frozen=True)
class LaunchCost:
    """The time to launch a minimal kernel from Python. The kernel adds 1 to one number.

    Args:
        eager: on a GPU, host seconds to enqueue one kernel. On a CPU, calls are synchronous, so `eager` is the time of the whole
            call, most of which is spent in the dispatcher.
        eager_calls: number of calls per sample of `eager`.
        graph: device seconds per kernel in a replayed CUDA or HIP graph. None if there is no graph.
        graph_kernels: number of kernels in the graph. 0 if there is no graph.
        graph_reason: reason why `graph` is None. "" if there is a graph.
        asynchronous: whether a call returns before its work is done.
        verification: check that each eager call and each call in the graph added 1 exactly once.
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
    """The size of the copy that takes as long as its launch. Smaller eager copies are launch-bound.

    Args:
        bytes: bytes read plus bytes written by this copy, interpolated between measured sizes. None if the size cannot be
            determined.
        reason: reason why `bytes` is None. "" if `bytes` is known.
        basis: description of the two times that are equal at this size.
    """

    bytes: Estimate | None
    reason: str
    basis: str


def measure_launch(device: Device, *, time_limit_s: float = 1.0) -> LaunchCost:
    """Measure the time to launch a minimal kernel, which adds 1 to one number.

    The kernel is launched eagerly. If the device supports graphs, 1,000 launches are also captured in a graph and replayed.

    Args:
        time_limit_s: time limit in seconds for the eager launches, and separately for the graph; see `time_function`.
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

    On a GPU, this is the size at which the device time of a copy (measured in a graph) equals the host time of an eager launch.
    In a loop that launches larger copies, the device limits the speed. With smaller copies, the host limits the speed. On a CPU,
    the time of a call contains both the launch and the copy, so this is the size at which a call takes twice the launch time.

    Between measured sizes, time and size are interpolated on logarithmic scales. The interval of the result is a bootstrap
    interval over all timings, and is limited to the measured range.

    Args:
        cost: result of `measure_launch`.
        copies: at least two points of `measure_cache_sweep("copy", …)`, in ascending order of size.
    """
    factor, basis = 1.0, "a copy's time on the device = the host's time to launch a kernel eagerly"
    if not cost.asynchronous:
        factor, basis = 2.0, "a copy's whole call = twice the call of an operator with nothing to do"
    elif not all(point.captured or point.long for point in copies):  # a long call hides its launch
        uncaptured = next(point for point in copies if not point.captured and not point.long)
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
    """Return the largest size at which the time of a copy equals `target`, interpolated between the measured sizes.

    Return the first size if all times are above the target, and the last size if the last time is at or below the target.
    """
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
    """A host clock that measures how long it takes to enqueue `calls` calls in a row.

    The clock waits for the device before the calls, but not after them.
    """

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        return in_turn(functions, count, self._enqueue)

    def _enqueue(self, function: Callable) -> float:
        self.synchronize()
        start = time.perf_counter_ns()
        for _ in range(self.calls):
            function()
        return (time.perf_counter_ns() - start) / 1e9 / self.calls


def _verify_counts(counter: torch.Tensor, call: Callable[[], None], repeated: RepeatedCalls) -> Verification:
    """Run the calls of one eager sample and one replay of the graph, and check that the counter equals the number of calls."""
    counter.zero_()
    for _ in range(_EAGER_CALLS):
        call()
    expected = _EAGER_CALLS
    if repeated.graph is not None:
        repeated.graph.replay()
        expected += repeated.calls
    return Verification("calls counted", abs(counter.item() - expected) / expected, 0.0)
