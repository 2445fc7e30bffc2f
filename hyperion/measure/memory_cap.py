"""A cap on the memory of this process, so that running out of it comes soon, at a known size, and harms nobody else."""

import contextlib
import ctypes
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.memory import GIB

_M_MMAP_THRESHOLD = -3  # <malloc.h> of glibc
_MAPPED_FROM_BYTES = 128 * 1024
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


@contextlib.contextmanager
def memory_cap(device: Device, gib: float) -> Iterator[float]:
    """Within it, tensors of this process get at most `gib` GiB; one more is refused as on a device that is full.

    On an accelerator PyTorch's allocator is told to hold no more than that, and fails as it does on a full device, with
    the same error. On a CPU the kernel is told (RLIMIT_DATA) to map no more than that beyond what the process has now;
    from here on the C library maps each larger buffer by itself and returns it when it is freed, so that nothing freed
    counts. That outlasts the cap: give the work a process of its own.

    Args:
        gib: no more than 95 % of an accelerator's free memory is taken, whatever is asked for.

    Yields:
        The peak, in GiB, that PeakMemoryRegion would report with the cap used up.

    Raises:
        NoMemoryCap: half as much again as the cap was granted all the same.
    """
    with (_resident_cap if device.kind == "cpu" else _device_cap)(device, gib) as (allowed_gib, peak_gib):
        if _refusal_of(int(1.5 * allowed_gib * GIB), device) is None:
            raise NoMemoryCap(
                f"{1.5 * allowed_gib:.3g} GiB were granted under a cap of {allowed_gib:.3g} GiB",
                where=device.name,
                next_step="run it where the system enforces RLIMIT_DATA, on Linux itself",
            )
        yield peak_gib


@contextlib.contextmanager
def _device_cap(device: Device, gib: float) -> Iterator[tuple[float, float]]:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device.torch_device)
    allowed = min(gib * GIB, _SHARE_OF_FREE * free)
    torch.cuda.set_per_process_memory_fraction(allowed / total, device.torch_device)
    try:
        yield allowed / GIB, allowed / GIB
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device.torch_device)


@contextlib.contextmanager
def _resident_cap(device: Device, gib: float) -> Iterator[tuple[float, float]]:
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # glibc; other C libraries map large buffers one by one as it is
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
        library.malloc_trim(0)
    mapped, resident = _status_bytes("VmData"), _status_bytes("VmRSS")
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(mapped + gib * GIB), hard))
    try:
        yield gib, gib + resident / GIB
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024
