"""Watch all devices of a machine while a command runs: utilisation, memory, temperature, power, clocks and throttling.

Devices are found with NVML, sysfs or psutil instead of torch, so that the monitor uses no GPU memory. Nothing is written to a
device. AMD GPUs are read through the sysfs files that ROCm's own tools also read, and through amdsmi if ROCm has installed it.
"""

import itertools
import math
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hyperion.hardware.cpu import read_cpu, system_text, usable_cpus
from hyperion.hardware.device import Device
from hyperion.hardware.telemetry import Reader, Telemetry, reader_for
from hyperion.install.machine import AMD, DISPLAY_CLASSES
from hyperion.units import GIB

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


Load = tuple[float | None, float | None]


@dataclass(frozen=True)
class Reading:
    """One reading of one device.

    Args:
        time_s: time of a monotonic clock.
        telemetry: clocks, power, temperature and throttling.
        utilization_percent: share of the time in which the device worked since the last reading, or None if it is unreadable.
        memory_bytes: used memory, or None if it is unreadable.
    """

    time_s: float
    telemetry: Telemetry
    utilization_percent: float | None = None
    memory_bytes: float | None = None


def system_devices(root: Path = Path("/"), nvml: Any = None) -> list[Device]:
    """Return all GPUs of the machine, or the CPU if there is none. Masks such as CUDA_VISIBLE_DEVICES are ignored.

    Args:
        root: folder that contains sys/.
        nvml: the module pynvml, or None to import it.
    """
    return _nvidia_devices(nvml) or _amd_devices(root) or [_cpu()]


def _nvidia_devices(nvml: Any) -> list[Device]:
    try:
        if nvml is None:
            import pynvml as nvml  # pyright: ignore[reportMissingImports]
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except Exception:  # pynvml is missing, or there is no NVIDIA driver
        return []
    devices = []
    for index in range(count):
        try:
            devices.append(_nvidia_device(nvml, index))
        except Exception as error:  # for example, the GPU is lost; the others are watched nevertheless
            warnings.warn(f"GPU {index} is not watched, because NVML cannot read it: {error}", stacklevel=2)
    return devices


def _nvidia_device(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return Device(
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
        # sysfs does not contain the architecture, so it is derived from the product name. Only gfx90a matters here, because the
        # power reading of an MI250X covers two dies.
        arch = "gfx90a" if "MI2" in name else "unknown"
        devices.append(
            Device("rocm", index, name, arch, int(total), None, None, f"cuda:{index}", pci_address=folder.name, vendor="AMD")
        )
    return devices


def _cpu() -> Device:
    cpu = read_cpu()
    return Device("cpu", 0, cpu.name, cpu.machine, cpu.memory_bytes, cpu.cores, None, "cpu", isa=cpu.flags, vendor=cpu.vendor)


def monitor_reader(
    device: Device, root: Path = Path("/"), nvml: Any = None, reader: Reader | None = None
) -> Callable[[], Reading]:
    """Return a function that reads all quantities of a device once.

    Args:
        device: a device from `system_devices`.
        root: folder that contains sys/.
        nvml: the module pynvml, or None to import it.
        reader: reader of the telemetry; default: `reader_for(device)`.
    """
    state = reader or reader_for(device)
    if device.kind == "cuda":
        load = _nvidia_load(device, nvml)
    else:
        load = _amd_load(device, root) if device.kind == "rocm" else _cpu_load()
    return lambda: Reading(time.monotonic(), state(), *load())


def _nvidia_load(device: Device, nvml: Any) -> Callable[[], Load]:
    if nvml is None:
        import pynvml as nvml  # pyright: ignore[reportMissingImports]

    handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid)

    def value(query: Callable[[], Any]) -> float | None:
        try:
            return float(query())
        except nvml.NVMLError:  # this GPU does not report the quantity
            return None

    return lambda: (
        value(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        value(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
    )


def _amd_load(device: Device, root: Path) -> Callable[[], Load]:
    folder = root / "sys/bus/pci/devices" / (device.pci_address or "-")

    def load() -> Load:
        texts = (system_text(folder / name) for name in ("gpu_busy_percent", "mem_info_vram_used"))
        utilization, memory = (float(text) if text and text.isdigit() else None for text in texts)
        return utilization, memory

    return load


def _cpu_load() -> Callable[[], Load]:
    cpus = sorted(usable_cpus())
    psutil.cpu_percent(percpu=True)  # the first result is meaningless, because no interval has been measured yet

    def load() -> Load:
        by_cpu = psutil.cpu_percent(percpu=True)
        memory = psutil.virtual_memory()
        return statistics.mean(by_cpu[cpu] for cpu in cpus if cpu < len(by_cpu)), float(memory.total - memory.available)

    return load


@dataclass(frozen=True)
class DeviceSummary:
    """Summary of all readings of one device. Quantities that could not be read are None.

    Args:
        device: name of the device.
        samples: number of readings.
        rate_error: relative difference between the mean and the requested interval between readings. None with fewer than two
            readings.
        utilization_percent: mean share of the time in which the device worked.
        memory_gib: largest used memory.
        temperature_c: highest temperature.
        power_w: mean power.
        energy_j: energy from the counter of the device, else the integral of the power.
        throttle: all reasons, joined by '+', or 'none'.
        memory_growth_gib: by how much the memory still grew at the end, see `growth_at_the_end`.
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
    memory_growth_gib: float | None
    unreadable: dict[str, str]


def summarize(device: Device, readings: Sequence[Reading], interval_s: float) -> DeviceSummary:
    """Return the summary of the readings of one device."""
    telemetry = [one.telemetry for one in readings]
    powers = [one.power_w for one in telemetry if one.power_w is not None]
    temperatures = [one.temperature_c for one in telemetry if one.temperature_c is not None]
    utilizations = [one.utilization_percent for one in readings if one.utilization_percent is not None]
    memory = [one.memory_bytes for one in readings if one.memory_bytes is not None]
    states = {reason for one in telemetry if one.throttle is not None for reason in one.throttle.split("+")}
    return DeviceSummary(
        device.name,
        len(readings),
        rate_error([one.time_s for one in readings], interval_s),
        statistics.mean(utilizations) if utilizations else None,
        max(memory) / GIB if memory else None,
        max(temperatures, default=None),
        statistics.mean(powers) if powers else None,
        energy_of(readings),
        ("+".join(sorted(states - {"none"})) or "none") if states else None,
        growth_at_the_end([one / GIB for one in memory]),
        telemetry[-1].unreadable if readings else {},
    )


def rate_error(times_s: Sequence[float], interval_s: float) -> float | None:
    """Return the relative difference between the mean and the requested interval, or None with fewer than two times."""
    if len(times_s) < 2:
        return None
    return (times_s[-1] - times_s[0]) / (len(times_s) - 1) / interval_s - 1


def growth_at_the_end(memory_gib: Sequence[float]) -> float | None:
    """Return by how much the memory steadily grew after the first third of the readings, in GiB, or 0 if it did not.

    The memory of a program that repeats the same work grows in the first third and is level afterwards. The other two thirds are
    divided into quarters. The growth is steady if the median of each quarter exceeds that of the quarter before it by at least a
    tenth of the whole growth. A step, as for an evaluation, is no steady growth. Return None with fewer than 30 readings.
    """
    if len(memory_gib) < 30:
        return None
    rest = memory_gib[len(memory_gib) // 3 :]
    medians = [statistics.median(rest[n * len(rest) // 4 : (n + 1) * len(rest) // 4]) for n in range(4)]
    growth = medians[-1] - medians[0]
    return max(growth, 0.0) if all(after - before >= 0.1 * growth for before, after in itertools.pairwise(medians)) else 0.0


def energy_of(readings: Sequence[Reading]) -> float | None:
    """Return the energy in joules between the first and the last reading; None if neither energy nor power was read."""
    counter = [one.telemetry.energy_j for one in readings if one.telemetry.energy_j is not None]
    if len(counter) == len(readings) > 1 and counter[-1] > counter[0]:
        return counter[-1] - counter[0]
    powers = [(one.time_s, one.telemetry.power_w) for one in readings if one.telemetry.power_w is not None]
    if len(powers) < 2:
        return None
    return math.fsum((t1 - t0) * (p0 + p1) / 2 for (t0, p0), (t1, p1) in itertools.pairwise(powers))


def mean_power(readings: Sequence[Sequence[Reading]], start_s: float, end_s: float, devices: int | None = None) -> float | None:
    """Return the mean power of several devices together between two times, in watts.

    Return None if no device has two readings with energy or power in this time.

    Args:
        readings: the readings of each device.
        start_s, end_s: times of the clock of the readings.
        devices: number of devices that worked. The power of those with the highest power is added, because other devices only
            idle. None means all devices.
    """
    powers = []
    # If the reading of an MI250X is that of the module, it includes the power of the second die.
    modules = any(one.telemetry.power_scope == "module" for series in readings for one in series)
    for series in readings:
        inside = [one for one in series if start_s <= one.time_s <= end_s]
        energy_j = energy_of(inside)
        if energy_j is not None:
            powers.append(energy_j / (inside[-1].time_s - inside[0].time_s))
    if devices is not None:
        powers = sorted(powers, reverse=True)[: -(-devices // 2) if modules else devices]
    return math.fsum(powers) if powers else None


def csv_rows(devices: Sequence[Device], readings: Sequence[Sequence[Reading]]) -> list[dict[str, Any]]:
    """Return one row with the keys `COLUMNS` for each reading of each device. The time of the first reading is 0."""
    start = min((series[0].time_s for series in readings if series), default=0.0)
    return [
        {
            "time_s": one.time_s - start,
            "device": f"{device.index}: {device.name}",
            "utilization_percent": one.utilization_percent,
            "memory_gib": None if one.memory_bytes is None else one.memory_bytes / GIB,
            **{name: getattr(one.telemetry, name) for name in COLUMNS[4:]},
        }
        for device, series in zip(devices, readings, strict=True)
        for one in series
    ]


def next_due(due_s: float, now_s: float, interval_s: float) -> float:
    """Return the time of the next reading: the first time `due_s` + n `interval_s` after now, with n at least 1."""
    return due_s + interval_s * (1 + max(0.0, now_s - due_s) // interval_s)


class Monitor:
    """Sample all devices in a thread at a fixed rate while the code in a `with` block runs.

    The schedule is fixed: the duration of a reading and a late wake-up do not delay later readings. If the readings take longer
        than the interval, readings are skipped, and `rate_error` is above 0. If a reader raises an error, this error is raised
        again at the end of the block.

    Args:
        devices: the devices.
        interval_s: seconds between two readings.
        readers: reader of each device; default: `monitor_reader`.
    """

    def __init__(self, devices: Sequence[Device], interval_s: float, readers: Sequence[Callable[[], Reading]] | None = None):
        self.devices, self.interval_s = list(devices), interval_s
        self.readings: list[list[Reading]] = [[] for _ in devices]
        self.overhead = 0.0  # share of one core that the thread used, known at the end of the block
        self._readers = list(readers or (monitor_reader(device) for device in devices))
        self._stop, self._error = threading.Event(), None
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> "Monitor":
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and exception[0] is None:
            raise self._error

    def _run(self) -> None:
        started_s, used_s = time.monotonic(), time.thread_time()
        due_s = started_s
        try:
            while True:
                for read, series in zip(self._readers, self.readings, strict=True):
                    series.append(read())
                due_s = next_due(due_s, time.monotonic(), self.interval_s)
                if self._stop.wait(due_s - time.monotonic()):
                    break
        except Exception as error:  # raised in the caller's thread by __exit__
            self._error = error
        self.overhead = (time.thread_time() - used_s) / max(time.monotonic() - started_s, 1e-9)

    def summaries(self) -> list[DeviceSummary]:
        """Return the summary of each device."""
        pairs = zip(self.devices, self.readings, strict=True)
        return [summarize(device, readings, self.interval_s) for device, readings in pairs]
