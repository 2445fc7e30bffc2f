"""Bandwidth by size of the working set, from the innermost cache out to memory: the same few bytes read or copied again.

Launching takes longer than a small working set does. On a GPU calls in a row are captured in a graph; on a CPU a read goes
over its working set many times within one call: it sums the rows of a matrix all of whose rows are the same memory.

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
# At 200 GB/s these take 160 microseconds, sixty times what launching the call does.
_BYTES_A_CALL = 32 * MIB
# PyTorch gives a thread of its own to each so many elements (at::internal::GRAIN_SIZE in ATen/TensorIterator.h).
_ELEMENTS_A_THREAD = 32_768


@dataclass(frozen=True)
class CacheCapacity:
    """A cache level as a sweep uses it: `count` caches of `bytes` each."""

    name: str
    bytes: int
    count: int = 1

    def room(self, sharers: int) -> int:
        """Bytes that it holds for so many cores with a part each, spread over the caches."""
        return self.bytes * min(sharers, self.count)

    @property
    def total_bytes(self) -> int:
        """Bytes of all its caches together."""
        return self.bytes * self.count


@dataclass(frozen=True)
class CachePoint:
    """One working set, read or copied again and again.

    Args:
        operation: "read" (sums over all elements) or "copy".
        working_set_bytes: different bytes that a call touches.
        bytes: bytes read plus bytes written by one call, all passes over the working set together.
        level: the innermost level with room for the working set, "memory" beyond the last, None where no level is known.
            That it has room does not mean that it serves every access.
        level_basis: the sizes behind `level`, or why it is None.
        captured: whether the calls were replayed from a graph, so that no launch lies between them.
        how: how calls were made and timed, in words.
        timing: seconds of one call.
        launch: seconds of the same call on one element, made the same way: what is left of launching it.
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
        """Whether half of the time or more is what one element takes as well: then it tells of launching, not of a cache."""
        return self.timing.estimate.value < 2 * self.launch.estimate.value


def cache_capacities(device: Device) -> tuple[CacheCapacity, ...]:
    """The levels that the device tells, innermost first: all data caches of a CPU; of a GPU the last level alone, because
    neither PyTorch nor the driver tells the others. Empty where nothing is known.
    """
    if device.kind == "cpu":
        return tuple(CacheCapacity(f"L{c.level}", min(c.sizes_bytes), len(c.sizes_bytes)) for c in data_caches())
    known = device.last_level_cache_bytes
    return (CacheCapacity("last-level cache", known),) if known else ()


def cache_level(working_set: int, sharers: int, capacities: Sequence[CacheCapacity]) -> tuple[str | None, str]:
    """(the innermost level with room for so many bytes, the sizes that say so), or (None, why it cannot be said).

    Args:
        sharers: cores that keep a part of it each, in caches of their own; 1 where each goes over all of it, and on a GPU.
    """
    if not capacities:
        return None, "the system does not tell the sizes of the caches"
    for capacity in capacities:
        room = capacity.room(sharers)
        if working_set <= room:
            return capacity.name, f"{_size(working_set)}, in {_size(room)} of {capacity.name}"
    return "memory", f"{_size(working_set)}, more than the {_size(room)} of {capacity.name}"


def sweep_sizes(capacities: Sequence[CacheCapacity], memory_bytes: int) -> list[int]:
    """Working sets in bytes, each twice the one before: from 4 KiB to four times all of the last level together (256 MiB
    where it is unknown), and to no more than an eighth of the memory.
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
    """Time one operation over each working set with caches as the call before left them, and verify what was left.

    Args:
        operation: "read" or "copy" of SWEEPS.
        sizes: working sets in bytes; those of `sweep_sizes` without any.
        time_limit_s: for each size.
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
    """Tensors of one working set, and the call that goes over them.

    Every core of a CPU reads all of a working set, so that its own caches must hold all of it. Of one that no cache holds,
    larger than `shared_up_to` bytes, each reads a part, which is enough; of a copy each does a part at any size.
    """

    def __init__(self, operation: str, size: int, dtype: str, device: Device, seed: int, shared_up_to: int):
        self.operation, self.format = operation, FORMATS[dtype]
        arrays = {"read": 1, "copy": 2}[operation]
        self.elements = max(1, size // (arrays * self.format.bytes))
        self.working_set_bytes = arrays * self.elements * self.format.bytes
        threads = torch.get_num_threads() if device.kind == "cpu" else 1
        self.passes, self.sharers = 1, min(threads, -(-self.elements // _ELEMENTS_A_THREAD))
        if device.kind == "cpu" and operation == "read" and self.working_set_bytes <= shared_up_to:
            # As many for every thread: PyTorch gives each some of the rows.
            self.passes = threads * max(1, _BYTES_A_CALL // (threads * self.working_set_bytes))
            self.sharers = 1
        options = {"device": device.torch_device, "dtype": self.format.storage}
        generator = torch.Generator(device.torch_device).manual_seed(seed)
        self.source = torch.randn(self.elements, generator=generator, **options)
        self.rows = self.source.expand(self.passes, self.elements)
        self.output = torch.empty(self.passes if operation == "read" else self.elements, **options)
        # Not a method of this: in a cycle with its captured calls it would hold its memory until somebody collects garbage.
        self.calls = RepeatedCalls(_call_of(operation, self.rows, self.source, self.output), device)

    @property
    def how(self) -> str:
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
