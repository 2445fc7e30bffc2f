"""The largest piece of memory that a device grants at once, found by bisection, proven to be there, and given back."""

import contextlib
from dataclasses import dataclass

import psutil
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.clock.verify import Verification
from hyperion.measure.memory.memory import GIB
from hyperion.measure.memory.memory_cap import allocator_refusal, memory_cap

STEP_BYTES = 64 * 2**20
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
                f"not even {self.step_bytes / 2**20:.4g} MiB were granted: {self.refusal}",
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
