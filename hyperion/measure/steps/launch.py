"""Measure launch overhead: of eager calls, within a graph, and the size at which a copy takes as long as its launch."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hyperion.hardware import Device
from hyperion.measure.clock.clocks import WallClock
from hyperion.measure.clock.repeated import RepeatedCalls
from hyperion.measure.clock.timing import Timing, time_function
from hyperion.measure.clock.verify import Verification
from hyperion.measure.traffic.cache_sweep import CachePoint
from hyperion.results import Estimate, estimates_of_medians

# Half of CUDA's queue of 1,024 launches: if the queue were full, the host would wait for the device.
_EAGER_CALLS = 500
_GRAPH_KERNELS = 1000


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
        samples: list[list[float]] = [[] for _ in functions]
        for _ in range(count):
            for function, series in zip(functions, samples, strict=True):
                self.synchronize()
                start = time.perf_counter_ns()
                for _ in range(self.calls):
                    function()
                series.append((time.perf_counter_ns() - start) / 1e9 / self.calls)
        return samples


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
