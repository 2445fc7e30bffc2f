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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from hyperion.hardware.cpu import read_cpu, system_text, usable_cpus
from hyperion.hardware.device import Device
from hyperion.hardware.telemetry import AMD_NAMES, Reader, Telemetry, reader_for
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

# Utilisation in percent, used memory in bytes, and for each column that cannot be read the reason.
Load = tuple[float | None, float | None, dict[str, str]]
_LOAD_COLUMNS = ("utilization_percent", "memory_gib")


@dataclass(frozen=True)
class Reading:
    """One reading of one device.

    Args:
        time_s: time of a monotonic clock.
        telemetry: clocks, power, temperature and throttling.
        utilization_percent: share of the time in which the device worked since the last reading, or None if it is unreadable.
        memory_bytes: used memory, or None if it is unreadable.
        unreadable: for utilisation and memory, by their names in `COLUMNS`, why they are None. `telemetry` has its own reasons.
        scheduled: whether the reading has its place in the schedule. The reading after the end of the command has none.
    """

    time_s: float
    telemetry: Telemetry
    utilization_percent: float | None = None
    memory_bytes: float | None = None
    unreadable: dict[str, str] = field(default_factory=dict)
    scheduled: bool = True


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
        _nvidia_memory(nvml, handle),
        None,
        None,
        f"cuda:{index}",
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        vendor="NVIDIA",
    )


def _nvidia_memory(nvml: Any, handle: Any) -> int:
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle).total
    except nvml.NVMLError_NotSupported:  # a GPU without memory of its own, such as GB10, uses that of the machine
        return psutil.virtual_memory().total


def _amd_devices(root: Path) -> list[Device]:
    devices = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        if system_text(folder / "vendor") != AMD or (system_text(folder / "class") or "")[:6] not in DISPLAY_CLASSES:
            continue
        total = system_text(folder / "mem_info_vram_total")
        if not total:  # no amdgpu driver
            continue
        pci_id = system_text(folder / "device") or ""
        name = system_text(folder / "product_name") or AMD_NAMES.get(pci_id, f"AMD GPU {pci_id}")
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

    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid)
    except nvml.NVMLError as error:
        reason = f"NVML: {error}"
        return lambda: (None, None, dict.fromkeys(_LOAD_COLUMNS, reason))
    queries = {
        "utilization_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
    }

    def load() -> Load:
        values, unreadable = {}, {}
        for name, query in queries.items():
            try:
                values[name] = float(query())
            except nvml.NVMLError as error:
                unreadable[name] = f"NVML does not report it for this GPU: {error}"
        return values.get("utilization_percent"), values.get("memory_gib"), unreadable

    return load


def _amd_load(device: Device, root: Path) -> Callable[[], Load]:
    folder = root / "sys/bus/pci/devices" / (device.pci_address or "-")

    def load() -> Load:
        values, unreadable = [], {}
        for column, name in zip(_LOAD_COLUMNS, ("gpu_busy_percent", "mem_info_vram_used"), strict=True):
            text = system_text(folder / name) or ""
            values.append(float(text) if text.isdigit() else None)
            if values[-1] is None:
                unreadable[column] = f"the driver does not report it for this GPU: no number in {name}"
        return values[0], values[1], unreadable

    return load


def _cpu_load() -> Callable[[], Load]:
    cpus = sorted(usable_cpus())
    psutil.cpu_percent(percpu=True)  # the first result is meaningless, because no interval has been measured yet

    def load() -> Load:
        by_cpu = psutil.cpu_percent(percpu=True)
        memory = psutil.virtual_memory()
        return statistics.mean(by_cpu[cpu] for cpu in cpus if cpu < len(by_cpu)), float(memory.total - memory.available), {}

    return load


@dataclass(frozen=True)
class DeviceSummary:
    """Summary of all readings of one device. Quantities that could not be read are None.

    Args:
        index: index of the device among all devices of the machine.
        device: name of the device.
        samples: number of readings.
        rate_error: relative difference between the mean and the requested interval between readings. The reading after the end
            does not count. None with fewer than two other readings.
        utilization_percent: mean share of the time in which the device worked, see `mean_utilization`.
        memory_gib: largest used memory.
        temperature_c: highest temperature.
        power_w: mean power over the time.
        energy_j: energy from the counter of the device, else the integral of the power.
        throttle: all reasons, joined by '+', or 'none'.
        memory_growth_gib: by how much the memory still grew at the end, see `growth_at_the_end`.
        unreadable: for each quantity that was not read, the reason.
        errors: the errors of failed readings, and how often each occurred.
    """

    index: int
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
    errors: dict[str, int] = field(default_factory=dict)


def summarize(
    device: Device, readings: Sequence[Reading], interval_s: float, errors: Mapping[str, int] | None = None
) -> DeviceSummary:
    """Return the summary of the readings of one device, and of the errors of its failed readings."""
    telemetry = [one.telemetry for one in readings]
    temperatures = [one.temperature_c for one in telemetry if one.temperature_c is not None]
    memory = [one.memory_bytes for one in readings if one.memory_bytes is not None]
    states = {reason for one in telemetry if one.throttle is not None for reason in one.throttle.split("+")}
    return DeviceSummary(
        device.index,
        device.name,
        len(readings),
        rate_error([one.time_s for one in readings if one.scheduled], interval_s),
        mean_utilization(readings),
        max(memory) / GIB if memory else None,
        max(temperatures, default=None),
        _mean_of_powers(readings),
        energy_of(readings),
        ("+".join(sorted(states - {"none"})) or "none") if states else None,
        growth_at_the_end([one / GIB for one in memory]),
        telemetry[-1].unreadable | readings[-1].unreadable if readings else {},
        dict(errors or {}),
    )


def rate_error(times_s: Sequence[float], interval_s: float) -> float | None:
    """Return the relative difference between the mean and the requested interval, or None with fewer than two times."""
    if len(times_s) < 2:
        return None
    return (times_s[-1] - times_s[0]) / (len(times_s) - 1) / interval_s - 1


def mean_utilization(readings: Sequence[Reading]) -> float | None:
    """Return the mean share of the time in which the device worked in percent, or None if it was never read.

    A value covers the time since the reading before it, and has the weight of this time. So the value of the first reading
    counts only if there is no other.
    """
    known = [
        (one.utilization_percent, one.time_s - before.time_s)
        for before, one in itertools.pairwise([*readings[:1], *readings])
        if one.utilization_percent is not None
    ]
    duration_s = math.fsum(weight_s for _, weight_s in known)
    if duration_s > 0:
        return math.fsum(value * weight_s for value, weight_s in known) / duration_s
    return statistics.mean(value for value, _ in known) if known else None


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
    powers = _powers(readings)
    return _integral(powers) if len(powers) > 1 else None


def _powers(readings: Sequence[Reading]) -> list[tuple[float, float]]:
    """Return the times in seconds and the powers in watts of the readings that have a power."""
    return [(one.time_s, one.telemetry.power_w) for one in readings if one.telemetry.power_w is not None]


def _integral(points: Sequence[tuple[float, float]]) -> float:
    return math.fsum((t1 - t0) * (p0 + p1) / 2 for (t0, p0), (t1, p1) in itertools.pairwise(points))


def _mean_of_powers(readings: Sequence[Reading]) -> float | None:
    powers = _powers(readings)
    if not powers:
        return None
    duration_s = powers[-1][0] - powers[0][0]
    return _integral(powers) / duration_s if duration_s > 0 else statistics.mean(power for _, power in powers)


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
    """Sample all devices in a thread at a fixed rate while the code in a `with` block runs, and once more at its end.

    The schedule is fixed: the duration of a reading and a late wake-up do not delay later readings. If the readings take longer
    than the interval, readings are skipped, and `rate_error` is above 0. Errors of failed readings are counted in `errors`. The
    other devices, later readings and the code in the block are not affected.

    Args:
        devices: the devices.
        interval_s: seconds between two readings.
        readers: reader of each device; default: `monitor_reader`.
    """

    def __init__(self, devices: Sequence[Device], interval_s: float, readers: Sequence[Callable[[], Reading]] | None = None):
        self.devices, self.interval_s = list(devices), interval_s
        self.readings: list[list[Reading]] = [[] for _ in devices]
        self.errors: list[Counter[str]] = [Counter() for _ in devices]
        self.overhead = 0.0  # share of one core that the thread used, known at the end of the block
        self._readers = list(readers or (monitor_reader(device) for device in devices))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> "Monitor":
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        started_s, used_s = time.monotonic(), time.thread_time()
        due_s = started_s
        while True:
            self._read(scheduled=True)
            due_s = next_due(due_s, time.monotonic(), self.interval_s)
            if self._stop.wait(due_s - time.monotonic()):
                break
        # Without this reading, up to an interval of energy would be missing.
        self._read(scheduled=False)
        self.overhead = (time.thread_time() - used_s) / max(time.monotonic() - started_s, 1e-9)

    def _read(self, scheduled: bool) -> None:
        for read, series, errors in zip(self._readers, self.readings, self.errors, strict=True):
            try:
                series.append(replace(read(), scheduled=scheduled))
            except Exception as error:
                errors[f"{type(error).__name__}: {error}"] += 1

    def summaries(self) -> list[DeviceSummary]:
        """Return the summary of each device."""
        return [
            summarize(device, readings, self.interval_s, errors)
            for device, readings, errors in zip(self.devices, self.readings, self.errors, strict=True)
        ]
