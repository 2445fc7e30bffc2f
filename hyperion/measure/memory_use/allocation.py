"""The largest piece of memory that a device grants at once, found by bisection, proven to be there, and given back."""

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

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h> of glibc
# glibc begins with the small threshold, and its own rule ends at the large one once larger buffers have come and gone.
_SMALL, _LARGE = 128 * KIB, 32 * MIB
_SHARE_OF_FREE = 0.95
_CPU_REFUSAL = "DefaultCPUAllocator: can't allocate memory"
_ONEDNN_FAILURES = ("could not create a primitive", "could not execute a primitive")
_ASKED_BYTES = 32 * MIB


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


STEP_BYTES = 64 * MIB
_TOUCHED = 4096
_CPU_SHARE = 0.5


@dataclass(frozen=True)
class LargestAllocation:
    """The largest single allocation that was granted.

    Args:
        granted_bytes: a multiple of `step_bytes` that was granted; one step more was refused.
        step_bytes: how finely it was searched for.
        free_bytes: what the device said was free when the search began.
        memory_bytes: the device's memory; the machine's on a CPU.
        cap_bytes: the cap on this process under which it was found; None where the device itself refused. On a CPU there
            always is one: a system that promises more memory than it has refuses nothing and freezes later.
        refusal: the allocator's words, one line.
        attempts: allocations that were asked for.
        verification: numbers written at 4,096 places from the first byte to the last were read back.
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
        """GiB of the allocation."""
        return self.granted_bytes / GIB

    @property
    def share_of_memory(self) -> float:
        """Of the device's memory, 0 to 1."""
        return self.granted_bytes / self.memory_bytes


def largest_allocation(device: Device, *, step_bytes: int = STEP_BYTES, cap_gib: float | None = None) -> LargestAllocation:
    """Find the largest single tensor that a device grants, in steps; all of it is freed again.

    Nothing is written but at 4,096 places, so that a host stays as it was.

    Args:
        step_bytes: the answer is a multiple of this.
        cap_gib: GiB that this process may have meanwhile (see `memory_cap`). None is no cap on an accelerator, and half of the
            memory that is available on a CPU.

    Raises:
        NoMemoryCap: the system does not hold this process to the cap.
        HyperionError: an allocation beyond the device's memory was granted, so that no refusal could be found; or not even
            one step was.
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
    """Asks one device for whole steps of memory."""

    def __init__(self, device: Device, step_bytes: int):
        self.device, self.step_bytes = device, step_bytes
        self.refusal, self.attempts = "", 0

    def run(self, beyond: int, most: int) -> int:
        """The most steps that are granted, up to `most`; `beyond` must be refused.

        Under a cap more than that may be granted too, where other threads of this process have freed memory meanwhile.
        """
        granted, refused = 0, min(beyond, most + 1)
        if self._grants(beyond):
            raise HyperionError(
                f"{beyond * self.step_bytes / GIB:.4g} GiB were granted on a device of "
                f"{self.device.memory_bytes / GIB:.4g} GiB: it promises memory that it does not have",
                where=self.device.name,
                next_step="turn off memory oversubscription, or give a cap in GiB: cap_gib=…",
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
                next_step="free some memory, or search in smaller steps: step_bytes=…",
            )
        return granted

    def verified(self, steps: int) -> tuple[int, Verification]:
        """Hold the largest once more, or less where another thread has taken of it meanwhile; write numbers all over it and
        read them back.

        Returns:
            How many steps were held, and the share of the numbers that differ.
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
