"""Find the devices of this machine: NVIDIA GPUs, AMD GPUs (an MI250X counts as its two dies) or the CPU."""

import re
from collections.abc import Mapping

from hyperion.hardware.device import Device, HardwareError
from hyperion.hardware.facts import Facts, GpuFacts, collect_facts
from hyperion.hardware.specs import data_sheet_cache_bytes, lookup

# Where a variable names those that are visible. PyTorch prefers ROCm's own to CUDA's, which ROCm obeys too.
_VARIABLES = {"cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}


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


def one_at_a_time(device: Device, count: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Variables that show a process one accelerator, for each that may work while the others do; none for a CPU.

    The two dies of an MI250X share the module's power: work on one slows the other, so that of each pair one counts.

    Args:
        device: the first.
        count: how many are visible.
        environment: may name those that are visible, by number or UUID.
    """
    variables = _VARIABLES.get(device.kind)
    if variables is None:
        return []
    named = next((environment[variable] for variable in variables if environment.get(variable)), "")
    names = [name.strip() for name in named.split(",")][:count] if named else [str(number) for number in range(count)]
    found, _ = lookup(device)
    if found is not None and "(one GCD)" in found.name:
        names = list({_module(place, name): name for place, name in reversed(list(enumerate(names)))}.values())[::-1]
    # All of them alike: whichever is read, it names the same one.
    return [dict.fromkeys(variables, name) for name in names]


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


def _module(place: int, name: str) -> int:
    """Which module a die belongs to: its own number tells, and without one its place among neighbours."""
    return (int(name) if name.isdecimal() else place) // 2
