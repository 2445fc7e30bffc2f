"""Find the devices of this machine: NVIDIA GPUs, AMD GPUs (each die of an MI250X is a device) or the CPU."""

import re
from collections.abc import Mapping

from hyperion.hardware.device import Device, HardwareError
from hyperion.hardware.facts import Facts, GpuFacts, collect_facts
from hyperion.hardware.specs import data_sheet_cache_bytes, lookup

# Variables that select the visible devices, by precedence: ROCm obeys CUDA's variable if its own is not set.
_VARIABLES = {"cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}


def detect(facts: Facts | None = None, index: int = 0) -> Device:
    """Return GPU number `index` if torch sees GPUs, else the CPU.

    Args:
        facts: facts about the machine; None reads this machine.
        index: PyTorch's device number (only visible devices are counted).

    Raises:
        HardwareError: there is no GPU of this index, or a GPU cannot be opened.
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
    """Return the CPU of this machine as a device, even if there are GPUs."""
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
    """Return, for each accelerator that can be used independently, the variables that make only it visible; [] for a CPU.

    The two dies of an MI250X share the power of the module, so work on one slows down the other. Only one die of each pair is
    returned.

    Args:
        device: the first visible device.
        count: number of visible devices.
        environment: environment variables, which may select visible devices by number or UUID.
    """
    variables = _VARIABLES.get(device.kind)
    if variables is None:
        return []
    named = next((environment[variable] for variable in variables if environment.get(variable)), "")
    names = [name.strip() for name in named.split(",")][:count] if named else [str(number) for number in range(count)]
    sheet, _ = lookup(device)
    if sheet is not None and "(one GCD)" in sheet.name:
        names = list({_module(place, name): name for place, name in reversed(list(enumerate(names)))}.values())[::-1]
    # All variables get the same value, because it depends on the build of torch which one is read.
    return [dict.fromkeys(variables, name) for name in names]


def parse_gcn_arch(name: str) -> str:
    """Return the architecture of a gcnArchName: 'gfx90a' of 'gfx90a:sramecc+:xnack-'.

    Raises:
        HardwareError: it is not a gfx name.
    """
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
    # torch reports the L2 only. An Infinity Cache behind it (256 MiB on MI300X) must be flushed, too.
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
    """Return the number of a die's module, from the die's number or, without one, from its place in the list."""
    return (int(name) if name.isdecimal() else place) // 2
