"""Facts of the machines this project has to know, as torch reports them; tests of every vendor branch inject them."""

from hyperion.hardware.cpu import CpuFacts
from hyperion.hardware.facts import GpuFacts, MachineFacts

GIB = 2**30

SERVER_CPU = CpuFacts(
    name="AMD EPYC 9374F 32-Core Processor",
    vendor="AuthenticAMD",
    family=25,
    model=17,
    machine="x86_64",
    cores=32,
    threads=64,
    memory_bytes=512 * GIB,
    last_level_cache_bytes=256 * 2**20,
    flags=("avx", "avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni"),
    nominal_clock_mhz=3850.0,
    max_clock_mhz=4300.0,
)

# name, arch or (major, minor), compute units as torch counts them, GiB, L2 MiB, clock the driver reports
GPUS = {
    "MI250X": ("AMD Instinct MI250X/MI250", "gfx90a:sramecc+:xnack-", 110, 63.98, 8, 1700),
    "MI250": ("AMD Instinct MI250X/MI250", "gfx90a:sramecc+:xnack-", 104, 63.98, 8, 1700),
    "MI210": ("AMD Instinct MI210", "gfx90a:sramecc+:xnack-", 104, 63.98, 8, 1700),
    "MI300X": ("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 304, 191.98, 4, 2100),
    "MI325X": ("AMD Instinct MI325X", "gfx942:sramecc+:xnack-", 304, 255.98, 4, 2100),
    "MI355X": ("AMD Instinct MI355X", "gfx950:sramecc+:xnack-", 256, 287.98, 4, 2400),
    "RX 7900 XTX": ("AMD Radeon RX 7900 XTX", "gfx1100", 48, 23.98, 6, 2526),
    "RX 7800 XT": ("AMD Radeon RX 7800 XT", "gfx1101", 30, 15.98, 4, 2565),
    "RX 9070 XT": ("AMD Radeon RX 9070 XT", "gfx1201", 32, 15.92, 8, 3100),
    "A100-40": ("NVIDIA A100-SXM4-40GB", (8, 0), 108, 39.49, 40, 1410),
    "A100-80": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 79.15, 40, 1410),
    "H100 SXM": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 79.19, 50, 1980),
    "H100 PCIe": ("NVIDIA H100 PCIe", (9, 0), 114, 79.19, 50, 1755),
    "H200": ("NVIDIA H200", (9, 0), 132, 139.8, 60, 1980),
    "B200": ("NVIDIA B200", (10, 0), 148, 178.36, 126, 1965),
}


def gpu(machine: str, **changes) -> GpuFacts:
    """One GPU of the table, with fields changed where asked."""
    name, arch, units, gib, l2_mib, clock = GPUS[machine]
    amd = isinstance(arch, str)
    fields = {
        "name": name,
        "total_memory_bytes": int(gib * GIB),
        "multi_processor_count": units,
        "major": 9 if amd else arch[0],
        "minor": 0 if amd else arch[1],
        "gcn_arch_name": arch if amd else name,
        "l2_cache_bytes": l2_mib * 2**20,
        "uuid": "64654e92-a282-8d45-eb16-fb2f7ea2b584",
        "pci_address": "0000:c1:00.0",
        "max_clock_mhz": float(clock),
    }
    return GpuFacts(**{**fields, **changes})


def facts(machine: str | None = None, gpus: tuple[GpuFacts, ...] = (), **changes) -> MachineFacts:
    """A machine with one GPU of the table, with the given GPUs, or with a CPU alone."""
    if machine:
        gpus = (gpu(machine),)
    amd = bool(gpus) and gpus[0].name.startswith("AMD")
    fields = {
        "python": "3.12.3",
        "torch": "2.13.0",
        "cuda": "13.0" if gpus and not amd else None,
        "hip": "7.2.0" if amd else None,
        "cpu": SERVER_CPU,
        "gpus": gpus,
    }
    return MachineFacts(**{**fields, **changes})
