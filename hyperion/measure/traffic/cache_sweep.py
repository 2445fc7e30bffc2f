"""Measure bandwidth by size of the working set, from the innermost cache to memory, by reading or copying it repeatedly.

Launching a call takes longer than reading a small working set. On a GPU, calls in a row are therefore captured in a graph. On a
CPU, one call reads its working set many times: it sums the rows of a matrix whose rows are all the same memory. `RepeatedCalls`
serves any calls that are shorter than their launch: in a graph, kernels follow each other without waiting for the host, and a
replay of some milliseconds is long compared with the resolution of the clock.

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
# At 200 GB/s this takes 160 microseconds, sixty times as long as the launch of the call.
_BYTES_A_CALL = 32 * MIB
# PyTorch uses one thread per this many elements (at::internal::GRAIN_SIZE in ATen/TensorIterator.h).
_ELEMENTS_A_THREAD = 32_768
_BLOCK_S = 2e-3
NO_GRAPHS = "unavailable: a CPU has no graphs"


@dataclass(frozen=True)
class CacheCapacity:
    """A cache level: `count` caches of `bytes` each."""

    name: str
    bytes: int
    count: int = 1

    def room(self, sharers: int) -> int:
        """Return the bytes that fit if this many cores use a part each, spread over the caches."""
        return self.bytes * min(sharers, self.count)

    @property
    def total_bytes(self) -> int:
        """Bytes of all caches of this level."""
        return self.bytes * self.count


@dataclass(frozen=True)
class CachePoint:
    """The timing of one working set.

    Args:
        operation: "read" (sum over all elements) or "copy".
        working_set_bytes: distinct bytes that a call accesses.
        bytes: bytes read plus bytes written by one call, summed over all passes.
        level: the innermost level in which the working set fits, "memory" if it fits in none, None if no level is known. The
            level does not necessarily serve every access.
        level_basis: the sizes behind `level`, or why it is None.
        captured: whether the calls were replayed from a graph, without launches between them.
        how: how calls were made and timed.
        timing: seconds of one call.
        launch: seconds of the same call on one element: the remaining launch overhead.
    """

    operation: str
    dtype: str
    working_set_bytes: int
    bytes: int
    level: str | None
    level_basis: str
    captured: bool
    how: str
    timing: Timing
    launch: Timing
    verification: Verification

    @property
    def bandwidth_gb_s(self) -> Estimate:
        """GB/s with its 95 % interval."""
        return self.timing.estimate.map(lambda seconds: self.bytes / seconds / 1e9)

    @property
    def launch_bound(self) -> bool:
        """Whether launch overhead is at least half of the time, so that the point says nothing about caches."""
        return self.timing.estimate.value < 2 * self.launch.estimate.value


def cache_capacities(device: Device) -> tuple[CacheCapacity, ...]:
    """Return the known cache levels of a device, innermost first; empty if none is known.

    A CPU reports all data caches. For a GPU only the last level is known, because PyTorch and the driver do not report the
    others.
    """
    if device.kind == "cpu":
        return tuple(CacheCapacity(f"L{c.level}", min(c.sizes_bytes), len(c.sizes_bytes)) for c in data_caches())
    known = device.last_level_cache_bytes
    return (CacheCapacity("last-level cache", known),) if known else ()


def cache_level(working_set: int, sharers: int, capacities: Sequence[CacheCapacity]) -> tuple[str | None, str]:
    """Return the innermost level in which a working set fits and the sizes behind it, or (None, the reason).

    Args:
        working_set: bytes.
        sharers: number of cores that access one part each, in their own caches; 1 if each core accesses all of it, and on a GPU.
        capacities: cache levels, innermost first.
    """
    if not capacities:
        return None, "the system does not tell the sizes of the caches"
    for capacity in capacities:
        room = capacity.room(sharers)
        if working_set <= room:
            return capacity.name, f"{_size(working_set)}, in {_size(room)} of {capacity.name}"
    return "memory", f"{_size(working_set)}, more than the {_size(room)} of {capacity.name}"


def sweep_sizes(capacities: Sequence[CacheCapacity], memory_bytes: int) -> list[int]:
    """Return working sets in bytes, each twice the previous one, from 4 KiB to four times the last level.

    The largest is 256 MiB if the last level is unknown, and never more than an eighth of the memory.
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
    """Time one operation over each working set with hot caches, and verify its output.

    Args:
        operation: "read" or "copy".
        sizes: working sets in bytes; None means those of `sweep_sizes`.
        time_limit_s: seconds for each size.
    """
    capacities = cache_capacities(device)
    shared_up_to = capacities[-1].total_bytes if capacities else _BYTES_A_CALL
    launch = _Work(operation, 1, dtype, device, seed, shared_up_to=0).calls.time(time_limit_s)
    points = []
    for size in sizes or sweep_sizes(capacities, device.memory_bytes):
        work = _Work(operation, size, dtype, device, seed, shared_up_to)
        level, basis = cache_level(work.working_set_bytes, work.sharers, capacities)
        work.poison()
        timing = work.calls.time(time_limit_s)
        points.append(
            CachePoint(
                operation,
                dtype,
                work.working_set_bytes,
                work.passes * work.working_set_bytes,
                level,
                basis,
                work.calls.graph is not None,
                work.how,
                timing,
                launch,
                work.verify(),
            )
        )
    return points


class _Work:
    """The tensors of one working set, and the call that accesses them.

    On a CPU every core reads the whole working set, so that it must fit in the core's own caches. If it is larger than
    `shared_up_to` bytes, no cache holds it, and each core reads only a part. For a copy, each core always copies a part.
    """

    def __init__(self, operation: str, size: int, dtype: str, device: Device, seed: int, shared_up_to: int):
        self.operation, self.format = operation, FORMATS[dtype]
        arrays = {"read": 1, "copy": 2}[operation]
        self.elements = max(1, size // (arrays * self.format.bytes))
        self.working_set_bytes = arrays * self.elements * self.format.bytes
        threads = torch.get_num_threads() if device.kind == "cpu" else 1
        self.passes, self.sharers = 1, min(threads, -(-self.elements // _ELEMENTS_A_THREAD))
        if device.kind == "cpu" and operation == "read" and self.working_set_bytes <= shared_up_to:
            # A multiple of the threads, because PyTorch distributes the rows over them.
            self.passes = threads * max(1, _BYTES_A_CALL // (threads * self.working_set_bytes))
            self.sharers = 1
        options = {"device": device.torch_device, "dtype": self.format.storage}
        generator = torch.Generator(device.torch_device).manual_seed(seed)
        self.source = torch.randn(self.elements, generator=generator, **options)
        self.rows = self.source.expand(self.passes, self.elements)
        self.output = torch.empty(self.passes if operation == "read" else self.elements, **options)
        # Not a method: a reference cycle with the captured calls would keep the memory until garbage collection.
        self.calls = RepeatedCalls(_call_of(operation, self.rows, self.source, self.output), device)

    @property
    def how(self) -> str:
        """How calls were made and timed."""
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


def _size(count: int) -> str:
    return f"{count / MIB:g} MiB" if count >= MIB else f"{count / KIB:g} KiB"


class RepeatedCalls:
    """A function prepared to be called many times in a row.

    Construction calls the function, so poison its output after construction and before `time`.

    Args:
        function: does one unit of work on existing tensors. To be captured in a graph, it must not allocate or synchronise.
        calls: calls per sample; 0 means as many as fill 2 ms, at most 1000.

    Attributes:
        calls: calls per sample.
        graph: the captured graph; None on a CPU and if capturing failed.
        not_captured: why there is no graph, else "".
    """

    def __init__(self, function: Callable[[], object], device: Device, calls: int = 0):
        self.function, self.device = function, device
        self.calls = calls or _calls_in_a_block(function, device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.not_captured = NO_GRAPHS
        if device.kind == "cpu":
            return
        try:
            self.graph, self.not_captured = _captured(function, self.calls, device), ""
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.not_captured = f"unavailable: capturing it failed: {str(error).splitlines()[0]}"

    @property
    def how(self) -> str:
        """Description of how the calls are made and timed."""
        if self.graph is not None:
            return f"{self.calls} calls captured in one graph, on the device's clock"
        loop = f"{self.calls} calls in a row, on the host's clock"
        return loop if self.device.kind == "cpu" else f"{loop}, launches included (a graph is {self.not_captured})"

    def time(self, time_limit_s: float) -> Timing:
        """Time one call with hot caches; each sample is the mean of `calls` calls in a row."""
        if self.graph is None:
            return time_function(self.function, self.device, cold=False, back_to_back=self.calls, time_limit_s=time_limit_s)
        return time_function(self.graph.replay, self.device, cold=False, time_limit_s=time_limit_s).per_call(self.calls)


def _calls_in_a_block(function: Callable, device: Device) -> int:
    _, *seconds = device_clock(device).sample([function], None, 4)[0]
    return calls_that_fill(_BLOCK_S, min(seconds))


def _captured(function: Callable, calls: int, device: Device) -> torch.cuda.CUDAGraph:
    with torch.cuda.device(device.torch_device):
        before = torch.cuda.current_stream()
        # Use a stream of this device: torch's default capture stream belongs to the device that captured first.
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            function()  # the set-up that libraries do on the first call on a stream cannot be captured
        before.wait_stream(stream)
        try:
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(calls):
                    function()
        finally:
            torch.cuda.set_stream(before)  # torch.cuda.graph does not restore the stream if capturing fails
    return graph
