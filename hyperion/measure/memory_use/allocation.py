"""Limit the memory of this process, recognise out-of-memory errors, and find the largest possible allocation."""

import contextlib
import ctypes
import gc
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.clock.verify import Verification
from hyperion.units import GIB, KIB, MIB

STEP_BYTES = 64 * MIB
_TOUCHED = 4096
_CPU_SHARE = 0.5
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h> of glibc
# Limits of glibc's mmap threshold. It starts at the smaller value, and glibc raises it up to the larger value when large buffers
# are freed.
_SMALL, _LARGE = 128 * KIB, 32 * MIB
_SHARE_OF_FREE = 0.95
_CPU_REFUSAL = "DefaultCPUAllocator: can't allocate memory"
_ONEDNN_FAILURES = ("could not create a primitive", "could not execute a primitive")
_ASKED_BYTES = 32 * MIB


class NoMemoryCap(HyperionError):
    """Raised when an allocation succeeds although it exceeds the limit that `memory_cap` has set."""


def allocator_refusal(error: Exception, device: Device) -> str | None:
    """Return the first line of the error message if an error means that memory is exhausted. Otherwise, return None.

    On a CPU, PyTorch has no exception class for out-of-memory errors, so they are recognised by the message of the allocator.
    oneDNN allocates its own memory. If this fails, its error message only says that it "could not create a primitive". For such
    an error, a test allocation decides whether memory is missing.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_REFUSAL in str(error):
        return (str(error) or "MemoryError").splitlines()[0]
    if device.kind == "cpu" and str(error).startswith(_ONEDNN_FAILURES):
        return _refusal_of(_ASKED_BYTES, device)
    return None


def _refusal_of(count: int, device: Device) -> str | None:
    try:
        torch.empty(count, dtype=torch.uint8, device=device.torch_device)
    except RuntimeError as error:
        return allocator_refusal(error, device)
    return None


@dataclass(frozen=True)
class MemoryCap:
    """A limit on the memory of this process.

    Args:
        gib: GiB that the process may allocate in addition to its memory at the time when the limit was set.
        peak_gib: the peak in GiB that `PeakMemoryRegion` reports if the process uses all of this memory.
    """

    gib: float
    peak_gib: float


@contextlib.contextmanager
def memory_cap(device: Device, gib: float) -> Iterator[MemoryCap]:
    """Context manager that limits the memory that this process can allocate for tensors.

    Allocations that exceed the limit fail as on a device whose memory is full. On a GPU, PyTorch's allocator enforces the limit
    and raises its usual error. On a CPU, the Linux kernel enforces the limit (RLIMIT_DATA). Within the context, the C library
    maps every large buffer separately and unmaps it when it is freed, so freed memory does not count.

    Args:
        device: the device whose memory is limited. For a CPU, the memory of the process on the host is limited.
        gib: limit in GiB. On a GPU, the limit is at most 95 % of the free memory.

    Raises:
        NoMemoryCap: an allocation of 1.5 times the limit succeeded.
    """
    with (_resident_cap if device.kind == "cpu" else _device_cap)(device, gib) as cap:
        # Some systems accept RLIMIT_DATA and do not enforce it. A test allocation detects this.
        if _refusal_of(int(1.5 * cap.gib * GIB), device) is None:
            raise NoMemoryCap(
                f"{1.5 * cap.gib:.3g} GiB were granted under a cap of {cap.gib:.3g} GiB",
                where=device.name,
                next_step="use a system that enforces RLIMIT_DATA, such as native Linux",
            )
        yield cap


def release_memory() -> None:
    """Free unreferenced tensors, including those in reference cycles, and the memory that PyTorch caches on the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _device_cap(device: Device, gib: float) -> Iterator[MemoryCap]:
    torch.cuda.empty_cache()  # otherwise fragmented cached blocks of earlier work remain
    free, total = torch.cuda.mem_get_info(device.torch_device)
    held = torch.cuda.memory_allocated(device.torch_device)
    allowed = held + min(gib * GIB, _SHARE_OF_FREE * free)
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device.torch_device)
    try:
        yield MemoryCap((allowed - held) / GIB, allowed / GIB)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device.torch_device)


@contextlib.contextmanager
def _resident_cap(device: Device, gib: float) -> Iterator[MemoryCap]:
    gc.collect()  # garbage that is freed later would raise the limit
    _tune_malloc(mapped_from_bytes=_SMALL, trimmed_at_bytes=_SMALL)
    mapped, resident = _status_bytes("VmData"), _status_bytes("VmRSS")
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # The limit applies to all private writable memory, so add what the process has already mapped. The hard limit is not changed,
    # because a process without privileges could not raise it again.
    resource.setrlimit(resource.RLIMIT_DATA, (int(mapped + gib * GIB), hard))
    try:
        yield MemoryCap(gib, gib + resident / GIB)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        _tune_malloc(mapped_from_bytes=_LARGE, trimmed_at_bytes=2 * _LARGE)


def _tune_malloc(mapped_from_bytes: int, trimmed_at_bytes: int) -> None:
    """Set two thresholds of glibc. With another C library, do nothing.

    Args:
        mapped_from_bytes: glibc maps buffers of at least this size separately.
        trimmed_at_bytes: glibc returns free memory to the system if it holds more than this.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, mapped_from_bytes)
        library.mallopt(_M_TRIM_THRESHOLD, trimmed_at_bytes)
        library.malloc_trim(0)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


@dataclass(frozen=True)
class LargestAllocation:
    """The largest single allocation that succeeds.

    Args:
        granted_bytes: size of the allocation, a multiple of `step_bytes`. An allocation that is larger by `step_bytes` fails.
        step_bytes: resolution of the search.
        free_bytes: free memory of the device before the search.
        memory_bytes: total memory of the device. For a CPU, the memory of the machine.
        cap_bytes: limit on the memory of this process during the search. None if there was no limit. On a CPU, there is always a
            limit, because a system that overcommits memory accepts every allocation and fails only when the memory is used.
        refusal: first line of the error message of the last allocation that failed.
        attempts: number of attempted allocations.
        verification: check that 4,096 bytes, spread from the first to the last byte of the allocation, could be written and read
            back.
    """

    granted_bytes: int
    step_bytes: int
    free_bytes: int
    memory_bytes: int
    cap_bytes: int | None
    refusal: str
    attempts: int
    verification: Verification

    @property
    def gib(self) -> float:
        """Size of the allocation in GiB."""
        return self.granted_bytes / GIB


def largest_allocation(device: Device, *, step_bytes: int = STEP_BYTES, cap_gib: float | None = None) -> LargestAllocation:
    """Find the largest single tensor that can be allocated on a device, by bisection. The memory is freed afterwards.

    Only 4,096 bytes of the tensor are written, so on a CPU, most of the allocation needs no physical memory.

    Args:
        device: the device.
        step_bytes: resolution of the search in bytes.
        cap_gib: limit in GiB on the memory of this process during the search; see `memory_cap`. None means no limit on a GPU, and
            half of the available memory on a CPU.

    Raises:
        NoMemoryCap: the system does not enforce the limit.
        HyperionError: an allocation larger than the memory of the device succeeded, or an allocation of one step failed.
    """
    free = _free_bytes(device)
    if cap_gib is None and device.kind == "cpu":
        cap_gib = _CPU_SHARE * free / GIB
    with memory_cap(device, cap_gib) if cap_gib is not None else contextlib.nullcontext() as cap:
        search = _Search(device, step_bytes)
        # This number of steps exceeds the memory of the device. If such an allocation succeeds, the device overcommits its
        # memory, and the search is meaningless.
        beyond = device.memory_bytes // step_bytes + 1
        steps, verification = search.verified(search.run(beyond, beyond if cap is None else int(cap.gib * GIB) // step_bytes))
    return LargestAllocation(
        steps * step_bytes,
        step_bytes,
        free,
        device.memory_bytes,
        None if cap is None else int(cap.gib * GIB),
        search.refusal,
        search.attempts,
        verification,
    )


class _Search:
    """Searches for the largest possible allocation on one device. The size of every allocation is a multiple of `step_bytes`."""

    def __init__(self, device: Device, step_bytes: int):
        self.device, self.step_bytes = device, step_bytes
        self.refusal, self.attempts = "", 0

    def run(self, beyond: int, most: int) -> int:
        """Return the largest number of steps that can be allocated, at most `most`.

        Args:
            beyond: number of steps (units of `step_bytes`) whose allocation must fail.
            most: upper limit of the result. It is needed under a memory cap, because other threads of this process can free
                memory during the search.
        """
        granted, refused = 0, min(beyond, most + 1)
        if self._grants(beyond):
            raise HyperionError(
                f"{beyond * self.step_bytes / GIB:.4g} GiB were granted on a device of "
                f"{self.device.memory_bytes / GIB:.4g} GiB: the device overcommits its memory",
                where=self.device.name,
                next_step="turn off memory oversubscription, or pass a cap in GiB: cap_gib=…",
            )
        while refused - granted > 1:
            middle = (granted + refused) // 2
            if self._grants(middle):
                granted = middle
            else:
                refused = middle
        if granted == 0:
            raise HyperionError(
                f"not even {self.step_bytes / MIB:.4g} MiB were granted: {self.refusal}",
                where=self.device.name,
                next_step="free some memory, or use smaller steps: step_bytes=…",
            )
        return granted

    def verified(self, steps: int) -> tuple[int, Verification]:
        """Allocate the largest size again, write bytes spread over the allocation, and read them back.

        If this allocation fails because other threads of this process have allocated memory meanwhile, allocate fewer steps.

        Returns:
            The number of steps, and a verification whose error is the share of bytes that differ.
        """
        while steps > 1 and not self._grants(steps):
            steps -= 1
        held = self._allocate(steps)
        places = torch.linspace(0, held.numel() - 1, _TOUCHED, dtype=torch.float64).long().to(held.device)
        # Values from 1 to 251, because fresh memory could contain 0.
        numbers = (torch.arange(_TOUCHED, device=held.device) % 251 + 1).to(torch.uint8)
        held[places] = numbers
        wrong = torch.count_nonzero(held[places] != numbers).item() / _TOUCHED
        del held
        self._give_back()
        return steps, Verification("written and read back", wrong, 0.0)

    def _grants(self, steps: int) -> bool:
        self.attempts += 1
        try:
            self._allocate(steps)
        except RuntimeError as error:
            refusal = allocator_refusal(error, self.device)
            if refusal is None:
                raise
            self.refusal = refusal
            return False
        finally:
            self._give_back()
        return True

    def _allocate(self, steps: int) -> torch.Tensor:
        return torch.empty(steps * self.step_bytes, dtype=torch.uint8, device=self.device.torch_device)

    def _give_back(self) -> None:
        if self.device.kind != "cpu":
            torch.cuda.empty_cache()


def _free_bytes(device: Device) -> int:
    if device.kind == "cpu":
        return min(psutil.virtual_memory().available, device.memory_bytes)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device.torch_device)[0]
