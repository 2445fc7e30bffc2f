"""Measure the bandwidth of the caches and of the memory.

A sweep reads or copies working sets of increasing size. A working set is the memory that a call reads and writes. The smallest
working sets fit into the innermost cache, and the largest fit only into memory.

Launching a call takes longer than reading a small working set. Therefore, on a GPU, many calls are captured in a CUDA or HIP
graph. On a CPU, one call reads its working set many times: it sums the rows of a matrix, and all rows share the same memory.

`RepeatedCalls` can time any call that is shorter than its launch. In a graph, kernels follow each other without waiting for the
host. A replay of the graph takes a few milliseconds, which is long compared with the resolution of the clock.

Source of the method: McVoy and Staelin, lmbench: portable tools for performance analysis, USENIX 1996, section 5.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hyperion.hardware import Device
from hyperion.hardware.cpu import data_caches
from hyperion.measure.clock.clocks import calls_that_fill, device_clock
from hyperion.measure.clock.timing import Timing, time_function
from hyperion.measure.clock.verify import FORMATS, Verification, verify_elementwise, verify_sum
from hyperion.results import Estimate
from hyperion.units import KIB, MIB

SWEEPS = ("read", "copy")
_SMALLEST, _LARGEST_UNKNOWN = 4 * KIB, 256 * MIB
_LAST_LEVELS = 4
_SHARE_OF_MEMORY = 8
# At 200 GB/s, reading this many bytes takes 160 microseconds, which is sixty times as long as launching the call.
_BYTES_A_CALL = 32 * MIB
# PyTorch uses one thread per this many elements (at::internal::GRAIN_SIZE in ATen/TensorIterator.h).
_ELEMENTS_A_THREAD = 32_768
_BLOCK_S = 2e-3
# A call that takes at least this time in seconds hides the launch of the next call, so it needs no graph. A graph would also
# change the result: in a CUDA graph, a copy of 512 MiB or 1 GiB reaches only two thirds of the bandwidth that it reaches outside
# of a graph.
_LONG_CALL_S = 2e-4
NO_GRAPHS = "unavailable: a CPU has no graphs"


@dataclass(frozen=True)
class CacheCapacity:
    """The caches of one level.

    Args:
        name: name of the level, such as "L2".
        bytes: size of one cache.
        count: number of caches of this level.
    """

    name: str
    bytes: int
    count: int = 1

    def room(self, sharers: int) -> int:
        """Return the size in bytes of the largest working set that fits into the caches of this level.

        Args:
            sharers: number of cores that access the working set. Each core accesses a different part of it. The cores are
                spread over the caches.
        """
        return self.bytes * min(sharers, self.count)

    @property
    def total_bytes(self) -> int:
        """Total size in bytes of all caches of this level."""
        return self.bytes * self.count


@dataclass(frozen=True)
class CachePoint:
    """The timing of one working set.

    Args:
        operation: "read" (sum over all elements) or "copy".
        dtype: dtype of the elements.
        working_set_bytes: number of distinct bytes that a call accesses.
        bytes: bytes read plus bytes written by one call, over all passes.
        level: name of the innermost cache level into which the working set fits. "memory" if it fits into no cache. None if the
            sizes of the caches are unknown. Other levels may also serve some of the accesses.
        captured: whether the calls were captured in a graph, so that there are no launches between them.
        long: whether a call on a GPU takes so long that it hides the launch of the next call. Such calls are not captured.
        how: description of how the calls are made and timed.
        timing: seconds of one call.
        launch: seconds of the same call on one element. This is the launch overhead that `timing` includes.
        verification: check of the output.
    """

    operation: str
    dtype: str
    working_set_bytes: int
    bytes: int
    level: str | None
    captured: bool
    long: bool
    how: str
    timing: Timing
    launch: Timing
    verification: Verification

    @property
    def bandwidth_gb_s(self) -> Estimate:
        """Bandwidth in GB/s (10⁹ bytes per second), with its 95 % confidence interval."""
        return self.timing.estimate.map(lambda seconds: self.bytes / seconds / 1e9)

    @property
    def launch_bound(self) -> bool:
        """Whether the launch overhead is at least half of the time. The bandwidth then says nothing about the caches."""
        return self.timing.estimate.value < 2 * self.launch.estimate.value


def cache_capacities(device: Device) -> tuple[CacheCapacity, ...]:
    """Return the known cache levels of a device, innermost first, or an empty tuple if no level is known.

    For a CPU, the sizes of all data caches are known. For a GPU, only the last level is known, because PyTorch and the driver do
    not report the other levels.
    """
    if device.kind == "cpu":
        return tuple(CacheCapacity(f"L{c.level}", min(c.sizes_bytes), len(c.sizes_bytes)) for c in data_caches())
    known = device.last_level_cache_bytes
    return (CacheCapacity("last-level cache", known),) if known else ()


def cache_level(working_set: int, sharers: int, capacities: Sequence[CacheCapacity]) -> str | None:
    """Return the name of the innermost cache level into which a working set fits.

    The result is "memory" if it fits into no cache, and None if `capacities` is empty.

    Args:
        working_set: size of the working set in bytes.
        sharers: number of cores that share the working set, so that each core accesses a different part of it. Pass 1 for a GPU,
            or if each core accesses the whole working set.
        capacities: cache levels, innermost first.
    """
    if not capacities:
        return None
    return next((capacity.name for capacity in capacities if working_set <= capacity.room(sharers)), "memory")


def sweep_sizes(capacities: Sequence[CacheCapacity], memory_bytes: int) -> list[int]:
    """Return the working-set sizes of a sweep in bytes. Each size is twice the previous one.

    The sizes range from 4 KiB to four times the size of the last cache level, or to 256 MiB if no level is known. No size is
    larger than an eighth of the memory.
    """
    largest = max((_LAST_LEVELS * c.total_bytes for c in capacities), default=_LARGEST_UNKNOWN)
    sizes = [_SMALLEST]
    while sizes[-1] < largest and 2 * sizes[-1] <= memory_bytes // _SHARE_OF_MEMORY:
        sizes.append(2 * sizes[-1])
    return sizes


def measure_cache_sweep(
    operation: str,
    device: Device,
    *,
    dtype: str = "fp32",
    sizes: Sequence[int] | None = None,
    time_limit_s: float = 0.3,
    seed: int = 0,
) -> list[CachePoint]:
    """Time one operation with hot caches on working sets of several sizes, and verify its outputs.

    Args:
        operation: "read" or "copy".
        dtype: dtype of the elements, a key of `FORMATS`.
        sizes: sizes of the working sets in bytes. None means the result of `sweep_sizes`.
        time_limit_s: time limit in seconds for each size; see `time_function`.
        seed: seed of the elements.
    """
    capacities = cache_capacities(device)
    shared_up_to = capacities[-1].total_bytes if capacities else _BYTES_A_CALL
    # The time of the same call on one element is the overhead that every other point includes.
    launch = _Work(operation, 1, dtype, device, seed, shared_up_to=0).calls.time(time_limit_s)
    points = []
    for size in sizes or sweep_sizes(capacities, device.memory_bytes):
        work = _Work(operation, size, dtype, device, seed, shared_up_to)
        # Fill the output now, because the constructor has already called the function.
        work.poison()
        timing = work.calls.time(time_limit_s)
        points.append(
            CachePoint(
                operation,
                dtype,
                work.working_set_bytes,
                work.passes * work.working_set_bytes,
                cache_level(work.working_set_bytes, work.sharers, capacities),
                work.calls.graph is not None,
                work.calls.long,
                work.how,
                timing,
                launch,
                work.verify(),
            )
        )
    return points


class _Work:
    """The tensors of one working set, and the call that accesses these tensors.

    On a CPU, the operation "read" works in one of two ways. A working set of at most `shared_up_to` bytes fits into the caches of
    each core, and every core reads the whole working set. A larger working set fits into no cache, and each core reads only a
    part of it. In the operation "copy", each core always copies only a part of the working set.
    """

    def __init__(self, operation: str, size: int, dtype: str, device: Device, seed: int, shared_up_to: int):
        self.operation, self.format = operation, FORMATS[dtype]
        arrays = {"read": 1, "copy": 2}[operation]
        self.elements = max(1, size // (arrays * self.format.bytes))
        self.working_set_bytes = arrays * self.elements * self.format.bytes
        threads = torch.get_num_threads() if device.kind == "cpu" else 1
        self.passes, self.sharers = 1, min(threads, -(-self.elements // _ELEMENTS_A_THREAD))
        if device.kind == "cpu" and operation == "read" and self.working_set_bytes <= shared_up_to:
            # PyTorch distributes the rows over the threads, so the number of rows must be a multiple of the number of threads.
            self.passes = threads * max(1, _BYTES_A_CALL // (threads * self.working_set_bytes))
            self.sharers = 1
        options = {"device": device.torch_device, "dtype": self.format.storage}
        generator = torch.Generator(device.torch_device).manual_seed(seed)
        self.source = torch.randn(self.elements, generator=generator, **options)
        # With a stride of 0, all rows are the same memory, so a sum over the rows reads the working set `passes` times.
        self.rows = self.source.expand(self.passes, self.elements)
        self.output = torch.empty(self.passes if operation == "read" else self.elements, **options)
        # The call is not a method of this object. Otherwise, this object and the captured calls would refer to each other, and
        # their memory would not be freed until the next garbage collection.
        self.calls = RepeatedCalls(_call_of(operation, self.rows, self.source, self.output), device)

    @property
    def how(self) -> str:
        """Description of how the calls are made and timed."""
        return self.calls.how if self.passes == 1 else f"{self.passes} passes a call, {self.calls.how}"

    def poison(self) -> None:
        self.output.fill_(float("nan"))

    def verify(self) -> Verification:
        if self.operation == "read":
            return verify_sum(self.output, (self.source,), self.format)
        return verify_elementwise(self.output, lambda source: source, (self.source,), tolerance=0.0)


def _call_of(operation: str, rows: torch.Tensor, source: torch.Tensor, output: torch.Tensor) -> Callable[[], object]:
    if operation == "read":
        return lambda: torch.sum(rows, dim=1, out=output)
    return lambda: output.copy_(source)


class RepeatedCalls:
    """Calls a function many times in a row and times the calls. On a GPU, the calls are captured in a graph if possible.

    On a GPU, a call that takes at least 0.2 ms is not captured. Such calls are timed one by one on the device's clock.

    The constructor already calls the function. To check that the timed calls write their output, fill the output with invalid
    values between the construction and the call to `time`.

    Args:
        function: function that does one unit of work on existing tensors. It can be captured in a graph only if it does not
            allocate memory and does not synchronise.
        calls: number of calls per sample. 0 means as many calls as take 2 ms in total, but at most 1000.

    Attributes:
        calls: number of calls per sample.
        long: whether a call is so long that calls are timed one by one.
        graph: the captured graph. None on a CPU, or if the capture failed.
        not_captured: reason why there is no graph. "" if there is a graph.
    """

    def __init__(self, function: Callable[[], object], device: Device, calls: int = 0):
        self.function, self.device = function, device
        seconds = 0.0 if calls else _seconds_of_a_call(function, device)
        self.long = is_long(seconds, device)
        self.calls = calls or (1 if self.long else calls_that_fill(_BLOCK_S, seconds))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.not_captured = NO_GRAPHS
        if device.kind == "cpu":
            return
        if self.long:
            self.not_captured = "not needed: a call hides the launch of the next one"
            return
        try:
            self.graph, self.not_captured = _captured(function, self.calls, device), ""
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.not_captured = f"unavailable: capturing it failed: {str(error).splitlines()[0]}"

    @property
    def how(self) -> str:
        """Description of how the calls are made, and of the clock that times them."""
        if self.graph is not None:
            return f"{self.calls} calls captured in one graph, on the device's clock"
        if self.long:
            return "call by call, on the device's clock"
        loop = f"{self.calls} calls in a row, on the host's clock"
        return loop if self.device.kind == "cpu" else f"{loop}, launches included (a graph is {self.not_captured})"

    def time(self, time_limit_s: float) -> Timing:
        """Return the timing of one call with hot caches. Each sample is the mean over `calls` calls in a row."""
        if self.long:
            return time_function(self.function, self.device, cold=False, time_limit_s=time_limit_s)
        if self.graph is None:
            return time_function(self.function, self.device, cold=False, back_to_back=self.calls, time_limit_s=time_limit_s)
        return time_function(self.graph.replay, self.device, cold=False, time_limit_s=time_limit_s).per_call(self.calls)


def is_long(seconds: float, device: Device) -> bool:
    """Return True if a call on a GPU takes so long that it hides the launch of the next call. On a CPU, return False."""
    return device.kind != "cpu" and seconds >= _LONG_CALL_S


def _seconds_of_a_call(function: Callable, device: Device) -> float:
    # The first call loads a kernel. The minimum of the other times is the least disturbed one.
    _, *seconds = device_clock(device).sample([function], None, 4)[0]
    return min(seconds)


def _captured(function: Callable, calls: int, device: Device) -> torch.cuda.CUDAGraph:
    with torch.cuda.device(device.torch_device):
        before = torch.cuda.current_stream()
        # torch's default capture stream belongs to the device that captured a graph first, so use a new stream of this device.
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        # The inputs were written on the other stream.
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            function()  # on the first call on a stream, libraries do set-up work that cannot be captured
        before.wait_stream(stream)
        try:
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(calls):
                    function()
        finally:
            torch.cuda.set_stream(before)  # torch.cuda.graph does not restore the stream if capturing fails
    return graph
