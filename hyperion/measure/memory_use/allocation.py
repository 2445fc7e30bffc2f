"""Cap the memory of this process, recognise refusals of an allocator, and find the largest possible allocation."""

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
# glibc starts with the small threshold and raises it up to the large one after larger buffers were freed.
_SMALL, _LARGE = 128 * KIB, 32 * MIB
_SHARE_OF_FREE = 0.95
_CPU_REFUSAL = "DefaultCPUAllocator: can't allocate memory"
_ONEDNN_FAILURES = ("could not create a primitive", "could not execute a primitive")
_ASKED_BYTES = 32 * MIB


class NoMemoryCap(HyperionError):
    """Raised when the system does not enforce a memory cap."""


def allocator_refusal(error: Exception, device: Device) -> str | None:
    """Return the first line of an out-of-memory error, or None if the error has another cause.

    On a CPU, torch has no exception class for it, only the message of its allocator. oneDNN, which allocates its own memory,
    reports only that it "could not create a primitive"; then a test allocation decides.
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
    """A memory cap.

    Args:
        gib: GiB that the process may allocate after the start of the cap.
        peak_gib: the peak that PeakMemoryRegion reports when all of it is used.
    """

    gib: float
    peak_gib: float


@contextlib.contextmanager
def memory_cap(device: Device, gib: float) -> Iterator[MemoryCap]:
    """Cap the memory that this process can allocate for tensors; beyond it, allocations fail as on a full device.

    On a GPU, PyTorch's allocator enforces the cap with its usual error. On a CPU, the kernel enforces it (RLIMIT_DATA); within
    this context the C library maps every larger buffer separately and unmaps it when it is freed, so that freed memory does
    not count.

    Args:
        gib: cap in GiB; at most 95 % of the free memory of a GPU is used.

    Raises:
        NoMemoryCap: an allocation of 1.5 times the cap succeeded.
    """
    with (_resident_cap if device.kind == "cpu" else _device_cap)(device, gib) as cap:
        if _refusal_of(int(1.5 * cap.gib * GIB), device) is None:
            raise NoMemoryCap(
                f"{1.5 * cap.gib:.3g} GiB were granted under a cap of {cap.gib:.3g} GiB",
                where=device.name,
                next_step="run it on a system that enforces RLIMIT_DATA, such as native Linux",
            )
        yield cap


@contextlib.contextmanager
def _device_cap(device: Device, gib: float) -> Iterator[MemoryCap]:
    torch.cuda.empty_cache()  # cached blocks of earlier work are fragmented
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
    gc.collect()  # memory that is freed later would be available on top of the cap
    _tune_malloc(mapped_from_bytes=_SMALL, trimmed_at_bytes=_SMALL)
    mapped, resident = _status_bytes("VmData"), _status_bytes("VmRSS")
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(mapped + gib * GIB), hard))
    try:
        yield MemoryCap(gib, gib + resident / GIB)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        _tune_malloc(mapped_from_bytes=_LARGE, trimmed_at_bytes=2 * _LARGE)


def _tune_malloc(mapped_from_bytes: int, trimmed_at_bytes: int) -> None:
    """Set the size from which glibc maps buffers separately, and how much free memory it keeps. Other C libraries: no-op."""
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
        granted_bytes: size of the allocation, a multiple of `step_bytes`; one step more fails.
        step_bytes: resolution of the search.
        free_bytes: free memory of the device before the search.
        memory_bytes: memory of the device; of the machine for a CPU.
        cap_bytes: the memory cap of this process during the search; None without a cap. On a CPU there is always a cap,
            because a system that overcommits memory refuses nothing and fails later.
        refusal: first line of the allocator's error.
        attempts: number of allocations.
        verification: check that bytes written at 4,096 places, from the first to the last, were read back.
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

    @property
    def share_of_memory(self) -> float:
        """Share of the device's memory, 0 to 1."""
        return self.granted_bytes / self.memory_bytes


def largest_allocation(device: Device, *, step_bytes: int = STEP_BYTES, cap_gib: float | None = None) -> LargestAllocation:
    """Find the largest single tensor that can be allocated on a device, by bisection. The memory is freed again.

    Only 4,096 bytes are written, so a CPU does not have to back the allocation with physical memory.

    Args:
        step_bytes: resolution of the search.
        cap_gib: cap in GiB on this process during the search, see `memory_cap`. None means no cap on a GPU, and half of the
            available memory on a CPU.

    Raises:
        NoMemoryCap: the system does not enforce the cap.
        HyperionError: an allocation larger than the device's memory succeeded, or even one step failed.
    """
    free = _free_bytes(device)
    if cap_gib is None and device.kind == "cpu":
        cap_gib = _CPU_SHARE * free / GIB
    with memory_cap(device, cap_gib) if cap_gib is not None else contextlib.nullcontext() as cap:
        search = _Search(device, step_bytes)
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
    """Allocations of whole steps on one device."""

    def __init__(self, device: Device, step_bytes: int):
        self.device, self.step_bytes = device, step_bytes
        self.refusal, self.attempts = "", 0

    def run(self, beyond: int, most: int) -> int:
        """Return the largest number of steps that can be allocated, at most `most`; `beyond` must fail.

        `most` is needed under a cap, because other threads of this process can free memory during the search.
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
        """Allocate the largest size again, write numbers at places spread over it, and read them back.

        Fewer steps are allocated if other threads of this process have taken memory meanwhile.

        Returns:
            Number of steps, and the share of numbers that differ.
        """
        while steps > 1 and not self._grants(steps):
            steps -= 1
        held = self._allocate(steps)
        places = torch.linspace(0, held.numel() - 1, _TOUCHED, dtype=torch.float64).long().to(held.device)
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
