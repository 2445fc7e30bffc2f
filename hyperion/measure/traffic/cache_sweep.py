"""Measure bandwidth by size of the working set, from the innermost cache to memory, by reading or copying it repeatedly.

Launching a call takes longer than reading a small working set. On a GPU, calls in a row are therefore captured in a graph. On a
CPU, one call reads its working set many times: it sums the rows of a matrix whose rows are all the same memory.

Source of the method: McVoy and Staelin, lmbench: portable tools for performance analysis, USENIX 1996, section 5.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hyperion.hardware import Device
from hyperion.hardware.cpu import data_caches
from hyperion.measure.clock.dtypes import FORMATS
from hyperion.measure.clock.repeated import RepeatedCalls
from hyperion.measure.clock.timing import Timing
from hyperion.measure.clock.verify import Verification, verify_elementwise, verify_sum
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
