"""Which device is this: one frozen description for NVIDIA GPUs, AMD GPUs (an MI250X shows its two dies) and CPUs."""

import re
from dataclasses import dataclass

from hyperion.errors import HyperionError
from hyperion.hardware import precision
from hyperion.hardware.facts import Facts, GpuFacts, collect_facts
from hyperion.hardware.specs import data_sheet_cache_bytes

# No processor that PyTorch runs on lies outside; a clock given in kHz or GHz does.
_CLOCKS_MHZ = (50, 20_000)


class HardwareError(HyperionError):
    """A device that cannot be used or described."""


@dataclass(frozen=True)
class Device:
    """One device as PyTorch enumerates it.

    kind is 'cuda' (NVIDIA), 'rocm' (AMD) or 'cpu'; arch is 'sm_90', 'gfx90a', 'x86_64'. compute_units are the SMs, CUs
    or cores that PyTorch or the operating system count (a Radeon card counts pairs of CUs). max_clock_mhz is what the
    driver reports, None when it does not. isa holds a CPU's relevant instruction sets.
    """

    kind: str
    index: int
    name: str
    arch: str
    memory_bytes: int
    compute_units: int | None
    last_level_cache_bytes: int | None
    torch_device: str
    max_clock_mhz: float | None = None
    nominal_clock_mhz: float | None = None
    uuid: str | None = None
    pci_address: str | None = None
    isa: tuple[str, ...] = ()
    vendor: str = ""
    family: int | None = None

    def __post_init__(self):
        """Refuse a clock in another unit: a limit made of it would let every value pass.

        Raises:
            HardwareError: a clock that is none in MHz.
        """
        for name in ("max_clock_mhz", "nominal_clock_mhz"):
            clock_mhz = getattr(self, name)
            if clock_mhz is not None and not _CLOCKS_MHZ[0] <= clock_mhz <= _CLOCKS_MHZ[1]:
                raise HardwareError(
                    f"{name} is {clock_mhz:g}, which is no clock in MHz",
                    where=self.name,
                    next_step="the driver may tell kHz, Hz or nothing: convert it, or leave the clock None",
                )

    def supports(self, dtype_name: str) -> tuple[bool, str]:
        """Whether matrix products of this type run here, with the reason; see `precision.supports`."""
        return precision.supports(self, dtype_name)


def parse_gcn_arch(name: str) -> str:
    """'gfx90a:sramecc+:xnack-' -> 'gfx90a'. Raises HardwareError when it is no gfx name."""
    base = name.split(":", 1)[0]
    if not re.fullmatch(r"gfx[0-9a-f]{3,5}", base):
        raise HardwareError(
            f"{name!r} is not an AMD architecture name.",
            where="gcnArchName of the torch device properties",
            next_step="Check that this is a ROCm build: python -c 'import torch; print(torch.version.hip)'",
        )
    return base


def detect(facts: Facts | None = None, index: int = 0) -> Device:
    """The device this machine would compute on: GPU number `index` where torch sees GPUs, else the CPU.

    Args:
        facts: what was read from torch and the system; None reads this machine.
        index: PyTorch's device number, counted after CUDA_VISIBLE_DEVICES and its kin.
    Raises HardwareError when the index does not exist or a GPU is there but cannot be opened.
    """
    facts = facts or collect_facts()
    if facts.gpu_error:
        raise HardwareError(
            f"PyTorch sees a GPU but cannot open it: {facts.gpu_error}",
            where=f"torch {facts.torch}, driver {facts.driver}",
            next_step="Check the driver with nvidia-smi or rocm-smi, and that its version suits this PyTorch build.",
        )
    if not facts.gpus:
        return detect_cpu(facts)
    if not 0 <= index < len(facts.gpus):
        raise HardwareError(
            f"There is no GPU number {index}: PyTorch sees {len(facts.gpus)}.",
            where=f"visible-device variables: {facts.visible_devices or 'none set'}",
            next_step=f"Choose an index from 0 to {len(facts.gpus) - 1}, or change the visible-device variable.",
        )
    return _detect_gpu(facts, facts.gpus[index], index)


def detect_cpu(facts: Facts | None = None) -> Device:
    """The CPU of this machine as a device, also where there are GPUs."""
    cpu = (facts or collect_facts()).cpu
    return Device(
        kind="cpu",
        index=0,
        name=cpu.name,
        arch=cpu.machine,
        memory_bytes=cpu.memory_bytes,
        compute_units=cpu.cores,
        last_level_cache_bytes=cpu.last_level_cache_bytes,
        torch_device="cpu",
        max_clock_mhz=cpu.max_clock_mhz,
        nominal_clock_mhz=cpu.nominal_clock_mhz,
        isa=cpu.flags,
        vendor=cpu.vendor,
        family=cpu.family,
    )


def _detect_gpu(facts: Facts, gpu: GpuFacts, index: int) -> Device:
    rocm = bool(facts.hip)
    arch = parse_gcn_arch(gpu.gcn_arch_name or "") if rocm else f"sm_{gpu.major}{gpu.minor}"
    # torch knows the L2 only; an Infinity Cache behind it (256 MiB on MI300X) must be flushed as well.
    caches = [size for size in (gpu.l2_cache_bytes, data_sheet_cache_bytes(gpu.name, arch)) if size]
    return Device(
        kind="rocm" if rocm else "cuda",
        index=index,
        name=gpu.name,
        arch=arch,
        memory_bytes=gpu.total_memory_bytes,
        compute_units=gpu.multi_processor_count,
        last_level_cache_bytes=max(caches, default=None),
        torch_device=f"cuda:{index}",
        max_clock_mhz=gpu.max_clock_mhz,
        uuid=gpu.uuid,
        pci_address=gpu.pci_address,
        vendor="AMD" if rocm else "NVIDIA",
    )
