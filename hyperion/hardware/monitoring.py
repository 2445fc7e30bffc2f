"""Watch all devices of a machine while a command runs: utilisation, memory, temperature, power, clocks and throttling.

Devices are found without torch, with NVML, sysfs or psutil, so that the monitor takes no memory of a GPU. Nothing is written to a
device. ROCm's own tools read the same files of sysfs that are read here; amdsmi is used as well where ROCm installed it.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from hyperion.hardware.cpu import read_cpu, system_text, usable_cpus
from hyperion.hardware.device import Device
from hyperion.hardware.telemetry import Reader, Sampler, Telemetry, reader_for
from hyperion.install.machine import AMD, DISPLAY_CLASSES

COLUMNS = (
    "time_s",
    "device",
    "utilization_percent",
    "memory_gib",
    "temperature_c",
    "power_w",
    "clock_mhz",
    "memory_clock_mhz",
    "throttle",
)


def system_devices(root: Path = Path("/"), nvml=None) -> list[Device]:
    """Return all GPUs of the machine, or the CPU if there is none. Masks such as CUDA_VISIBLE_DEVICES are ignored.

    Args:
        root: folder that contains sys/.
        nvml: the module pynvml, or None to import it.
    """
    return _nvidia_devices(nvml) or _amd_devices(root) or [_cpu()]


def _nvidia_devices(nvml) -> list[Device]:
    try:
        if nvml is None:
            import pynvml as nvml  # pyright: ignore[reportMissingImports]
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [
            Device(
                "cuda",
                index,
                str(nvml.nvmlDeviceGetName(handle)),
                "sm_" + "".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(handle))),
                nvml.nvmlDeviceGetMemoryInfo(handle).total,
                None,
                None,
                f"cuda:{index}",
                uuid=str(nvml.nvmlDeviceGetUUID(handle)),
                vendor="NVIDIA",
            )
            for index, handle in enumerate(handles)
        ]
    except Exception:  # pynvml is missing, or there is no NVIDIA driver
        return []


def _amd_devices(root: Path) -> list[Device]:
    devices = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        if system_text(folder / "vendor") != AMD or (system_text(folder / "class") or "")[:6] not in DISPLAY_CLASSES:
            continue
        total = system_text(folder / "mem_info_vram_total")
        if not total:  # no amdgpu driver
            continue
        name = system_text(folder / "product_name") or f"AMD GPU {system_text(folder / 'device')}"
        index = len(devices)
        # MI250X is the only gfx90a GPU whose dies share a power reading. The rule needs the name of the product.
        arch = "gfx90a" if "MI2" in name else "unknown"
        devices.append(
            Device("rocm", index, name, arch, int(total), None, None, f"cuda:{index}", pci_address=folder.name, vendor="AMD")
        )
    return devices


def _cpu() -> Device:
    cpu = read_cpu()
    return Device("cpu", 0, cpu.name, cpu.machine, cpu.memory_bytes, cpu.cores, None, "cpu", isa=cpu.flags, vendor=cpu.vendor)


def monitor_reader(device: Device, root: Path = Path("/"), nvml=None, reader: Reader | None = None) -> Reader:
    """Return a reader that also reads utilisation in percent and used memory in bytes.

    Args:
        device: a device from `system_devices`.
        root: folder that contains sys/.
        nvml: the module pynvml, or None to import it.
        reader: reader of the other quantities; default: `reader_for(device)`.
    """
    state = reader or reader_for(device)
    load = {"cuda": _nvidia_load, "rocm": _amd_load, "cpu": _cpu_load}[device.kind](device, root, nvml)

    def read() -> Telemetry:
        utilization, memory = load()
        return replace(state(), utilization_percent=utilization, memory_bytes=memory)

    return read


def _nvidia_load(device: Device, root: Path, nvml) -> Callable[[], tuple[float | None, float | None]]:
    if nvml is None:
        import pynvml as nvml  # pyright: ignore[reportMissingImports]

    handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid)

    def load() -> tuple[float | None, float | None]:
        return _value(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu, nvml.NVMLError), _value(
            lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used, nvml.NVMLError
        )

    return load


def _value(query: Callable[[], float], error: type[Exception]) -> float | None:
    try:
        return float(query())
    except error:  # this GPU does not report the quantity
        return None


def _amd_load(device: Device, root: Path, nvml) -> Callable[[], tuple[float | None, float | None]]:
    folder = root / "sys/bus/pci/devices" / (device.pci_address or "-")

    def load() -> tuple[float | None, float | None]:
        texts = (system_text(folder / name) for name in ("gpu_busy_percent", "mem_info_vram_used"))
        utilization, memory = (float(text) if text and text.isdigit() else None for text in texts)
        return utilization, memory

    return load


def _cpu_load(device: Device, root: Path, nvml) -> Callable[[], tuple[float | None, float | None]]:
    cpus = sorted(usable_cpus())
    psutil.cpu_percent(percpu=True)  # the first call has no interval

    def load() -> tuple[float | None, float | None]:
        by_cpu = psutil.cpu_percent(percpu=True)
        memory = psutil.virtual_memory()
        return statistics.mean(by_cpu[cpu] for cpu in cpus if cpu < len(by_cpu)), float(memory.total - memory.available)

    return load


@dataclass(frozen=True)
class DeviceSummary:
    """What the monitor saw of one device. Quantities that could not be read are None.

    Args:
        device: name of the device.
        samples: number of readings.
        rate_error: relative difference of the mean interval from the requested one, or None with fewer than two readings.
        utilization_percent: mean.
        memory_gib: largest used memory.
        temperature_c: highest temperature.
        power_w: mean power.
        energy_j: energy from the counter of the device, else the integral of the power.
        throttle: all reasons, joined by '+', or 'none'.
        unreadable: for each quantity that was not read, the reason.
    """

    device: str
    samples: int
    rate_error: float | None
    utilization_percent: float | None
    memory_gib: float | None
    temperature_c: float | None
    power_w: float | None
    energy_j: float | None
    throttle: str | None
    unreadable: dict[str, str]


def summarize(device: Device, readings: Sequence[tuple[float, Telemetry]], interval_s: float) -> DeviceSummary:
    """Return the summary of the readings (time in seconds, telemetry) of one device."""
    times = [moment for moment, _ in readings]

    def values(name: str) -> list[float]:
        return [value for _, one in readings if (value := getattr(one, name)) is not None]

    powers, memory = values("power_w"), values("memory_bytes")
    states = {reason for _, one in readings if one.throttle is not None for reason in one.throttle.split("+")}
    mean_interval = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
    return DeviceSummary(
        device.name,
        len(readings),
        mean_interval / interval_s - 1 if mean_interval is not None else None,
        statistics.mean(values("utilization_percent")) if values("utilization_percent") else None,
        max(memory) / 2**30 if memory else None,
        max(values("temperature_c"), default=None),
        statistics.mean(powers) if powers else None,
        energy_of(readings),
        ("+".join(sorted(states - {"none"})) or "none") if states else None,
        readings[-1][1].unreadable if readings else {},
    )


def energy_of(readings: Sequence[tuple[float, Telemetry]]) -> float | None:
    """Return the energy in joules between the first and the last reading; None if neither energy nor power was read."""
    counter = [one.energy_j for _, one in readings if one.energy_j is not None]
    if len(counter) == len(readings) > 1 and counter[-1] > counter[0]:
        return counter[-1] - counter[0]
    powers = [(moment, one.power_w) for moment, one in readings if one.power_w is not None]
    if len(powers) < 2:
        return None
    return math.fsum((t1 - t0) * (p0 + p1) / 2 for (t0, p0), (t1, p1) in itertools.pairwise(powers))


def csv_rows(devices: Sequence[Device], readings: Sequence[Sequence[tuple[float, Telemetry]]]) -> list[dict]:
    """Return one row with the keys `COLUMNS` for each reading of each device. The time of the first reading is 0."""
    start = min((series[0][0] for series in readings if series), default=0.0)
    rows = []
    for device, series in zip(devices, readings, strict=True):
        for moment, one in series:
            memory_gib = None if one.memory_bytes is None else one.memory_bytes / 2**30
            known = {name: getattr(one, name) for name in COLUMNS if hasattr(one, name)}
            rows.append({"time_s": moment - start, "device": f"{device.index}: {device.name}", "memory_gib": memory_gib, **known})
    return rows


class Monitor:
    """Sample all devices at a fixed rate in a `with` block.

    Args:
        devices: the devices.
        interval_s: seconds between two readings.
        readers: reader of each device; default: `monitor_reader`.
    """

    def __init__(self, devices: Sequence[Device], interval_s: float, readers: Sequence[Reader] | None = None):
        self.devices, self.interval_s = list(devices), interval_s
        readers = readers or [monitor_reader(device) for device in devices]
        pairs = zip(devices, readers, strict=True)
        self._samplers = [Sampler(device, interval_s, reader) for device, reader in pairs]
        self._started, self.overhead = (0.0, 0.0), 0.0

    def __enter__(self) -> "Monitor":
        self._started = (time.monotonic(), time.process_time())
        for sampler in self._samplers:
            sampler.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        wall_s, busy_s = time.monotonic() - self._started[0], time.process_time() - self._started[1]
        self.overhead = busy_s / max(wall_s, 1e-9)  # share of one core that the monitor used
        for sampler in self._samplers:
            sampler.__exit__(*exception)

    @property
    def readings(self) -> list[list[tuple[float, Telemetry]]]:
        """The readings (time in seconds, telemetry) of each device."""
        return [sampler.readings for sampler in self._samplers]

    def summaries(self) -> list[DeviceSummary]:
        """Return the summary of each device."""
        pairs = zip(self.devices, self.readings, strict=True)
        return [summarize(device, readings, self.interval_s) for device, readings in pairs]
