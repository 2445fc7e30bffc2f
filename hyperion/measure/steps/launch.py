"""What launching costs: the host's time to enqueue a kernel, the device's between kernels of a graph, and the smallest kernel
that is worth it."""

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

# Half of the 1,024 launches that CUDA lets wait: one more and the host would wait for the device.
_EAGER_CALLS = 500
_GRAPH_KERNELS = 1000


@dataclass(frozen=True)
class LaunchCost:
    """The cost of launching one trivially small kernel (add 1 to one number), called from Python.

    Args:
        eager: host seconds to enqueue one; on a CPU, where a call has done its work when it returns, those of the whole call:
            what the dispatcher takes for an operator with nothing to do.
        eager_calls: calls in a row behind one sample of `eager`.
        graph: device seconds from one such kernel to the next within a replayed CUDA or HIP graph; None without graphs.
        graph_kernels: kernels in that graph, 0 without.
        graph_reason: why `graph` is None, else "".
        asynchronous: whether a call returns before its work is done, so that host and device work at the same time.
        verification: every call did its work once: the number counts them, eager and replayed.
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
    """The smallest kernel that is worth its launch.

    Args:
        bytes: read plus written by a copy that works as long as launching it eagerly takes, interpolated between measured
            sizes; None with the reason. A smaller kernel, launched eagerly, spends most of its time being launched.
        reason: why `bytes` is None, else "".
        basis: what was set equal, in words.
    """

    bytes: Estimate | None
    reason: str
    basis: str


def measure_launch(device: Device, *, time_limit_s: float = 1.0) -> LaunchCost:
    """Time launches of one kernel that adds 1 to one number: eagerly, and 1,000 of them in a graph where the device has any.

    Args:
        time_limit_s: for each of the two.
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
    """From which size on a copy works longer than launching it takes.

    On a GPU the time of a copy within a graph is set equal to that of an eager launch: a loop of larger copies keeps the
    device busy, one of smaller copies the host. On a CPU, where a call's time holds both, the whole call is set equal to
    twice the launch.

    Args:
        copies: points of `measure_cache_sweep("copy", …)` in order of size, at least two. Above the last point at which the
            copy is the shorter, size and time are interpolated on logarithmic scales. The interval comes from resampling all
            timings; it ends where the measured sizes end.
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
    """The size at which times, in order of size, pass the target for the last time; an end of the sizes where they do not."""
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
    """The monotonic clock around `calls` calls in a row on an idle device, not waiting for the work that they enqueue."""

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
    """Does the number count the calls? As many eager ones as a sample has, then one replay."""
    counter.zero_()
    for _ in range(_EAGER_CALLS):
        call()
    expected = _EAGER_CALLS
    if repeated.graph is not None:
        repeated.graph.replay()
        expected += repeated.calls
    return Verification("calls counted", abs(counter.item() - expected) / expected, 0.0)
