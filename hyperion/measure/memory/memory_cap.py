"""A cap on the memory of this process, so that running out of it comes soon, at a known size, and harms nobody else."""

import contextlib
import ctypes
import gc
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.memory.memory import GIB

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h> of glibc
# glibc begins with the small threshold, and its own rule ends at the large one once larger buffers have come and gone.
_SMALL, _LARGE = 128 * 1024, 32 * 2**20
_SHARE_OF_FREE = 0.95
_CPU_REFUSAL = "DefaultCPUAllocator: can't allocate memory"
_ONEDNN_FAILURES = ("could not create a primitive", "could not execute a primitive")
_ASKED_BYTES = 32 * 2**20


class NoMemoryCap(HyperionError):
    """A system that does not hold a process to a cap on its memory."""


def allocator_refusal(error: Exception, device: Device) -> str | None:
    """What an allocator said when it refused memory, in one line, or None when the error is another one.

    On a CPU torch has no class for it, only the sentence of its allocator. oneDNN, which allocates for itself, says no
    more than that it "could not create a primitive": then the allocator is asked, while all that the error left lies there.
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
    """What a process may have.

    Args:
        gib: GiB that may be added to what the process holds as the cap begins.
        peak_gib: what PeakMemoryRegion reports when all of it is used.
    """

    gib: float
    peak_gib: float


@contextlib.contextmanager
def memory_cap(device: Device, gib: float) -> Iterator[MemoryCap]:
    """Within it, tensors of this process get at most `gib` GiB; what is more is refused as on a device that is full.

    On an accelerator PyTorch's allocator is told to hold no more than that, and fails as it does on a full device, with
    the same error. On a CPU the kernel is told (RLIMIT_DATA) to map no more than that beyond what the process has mapped;
    meanwhile the C library maps each larger buffer by itself and unmaps it when it is freed, so that nothing freed counts.

    Args:
        gib: no more than 95 % of an accelerator's free memory is taken, whatever is asked for.

    Raises:
        NoMemoryCap: half as much again as the cap was granted all the same.
    """
    with (_resident_cap if device.kind == "cpu" else _device_cap)(device, gib) as cap:
        if _refusal_of(int(1.5 * cap.gib * GIB), device) is None:
            raise NoMemoryCap(
                f"{1.5 * cap.gib:.3g} GiB were granted under a cap of {cap.gib:.3g} GiB",
                where=device.name,
                next_step="run it where the system enforces RLIMIT_DATA, on Linux itself",
            )
        yield cap


@contextlib.contextmanager
def _device_cap(device: Device, gib: float) -> Iterator[MemoryCap]:
    torch.cuda.empty_cache()  # what earlier work left cached lies in pieces
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
    gc.collect()  # what is freed later would be granted on top of the cap
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
    """From which size on glibc maps a buffer by itself, and how much free memory it keeps; other libraries have no say."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, mapped_from_bytes)
        library.mallopt(_M_TRIM_THRESHOLD, trimmed_at_bytes)
        library.malloc_trim(0)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024
