"""Clock, power, temperature and throttling of a device, read once or sampled while a block of code runs.

NVIDIA GPUs are read with NVML. AMD GPUs are read with sysfs, and also with amdsmi if this environment has it. CPUs are read with
cpufreq. A quantity that cannot be read is None with a reason, and never 0. A reader is a function without arguments that returns
a `Telemetry`. It finds its device by UUID or PCI address and not by index, because torch numbers only visible devices, while NVML
and amdsmi number all devices.
"""

import functools
import importlib.util
import os
import statistics
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from hyperion.hardware.cpu import HostLoad, OtherLoad, system_text, usable_cpus
from hyperion.hardware.device import Device

QUANTITIES = ("clock_mhz", "memory_clock_mhz", "power_w", "temperature_c", "throttle")
# NVML's clock event bits that mean a slow-down. NVML has other bits for an idle GPU and for clocks that an application has set.
NVML_SLOWDOWNS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
# Bits of the amdgpu driver's status that does not depend on the device: limits of power, of current and of temperature, and
# signals from the board.
AMD_SLOWDOWNS = {
    range(8): "sw_power_cap",
    range(16, 24): "current_limit",
    range(32, 44): "hw_thermal",
    range(44, 48): "board_signal",
}
AMD_TICK_J = 2.0**-16  # joules per tick of the energy counter of the MI200 series, 15.259 uJ
BUSY = "busy"
_BUSY_SHARE = 0.1
# Product names by PCI id, from amdgpu.ids of libdrm. The library of a PyTorch wheel may not find this file, and then calls every
# GPU "AMD Radeon Graphics".
AMD_NAMES = {
    "0x7408": "AMD Instinct MI250X",
    "0x740c": "AMD Instinct MI250X / MI250",
    "0x740f": "AMD Instinct MI210",
    "0x74a1": "AMD Instinct MI300X",
    "0x74a5": "AMD Instinct MI325X",
}
MI250_PCI_IDS = ("0x7408", "0x740c")
MI200_PCI_IDS = (*MI250_PCI_IDS, "0x740f")
AMD_NOT_AVAILABLE = 0xFFFF  # value that gpu_metrics contains for a field that the device does not report


@dataclass(frozen=True)
class Telemetry:
    """One reading, or the medians of `samples` readings.

    Args:
        clock_mhz, memory_clock_mhz: clocks of the device and of its memory.
        power_w: power.
        temperature_c: temperature in degrees Celsius.
        throttle: 'none', or the reasons why the device slowed down, joined by '+'. On a CPU, the reason is 'busy' if other
            processes and other virtual machines used more than a tenth of the cores.
        power_scope: 'device', or 'module' if the power is the sum of both dies of an MI250X.
        unreadable: for each quantity that is None, the reason.
        samples: number of readings.
        energy_j: energy in joules. In a single reading, it is the value of the device's energy counter. In medians, it is the
            increase of the counter from the first to the last reading. None if the device has no counter.
        window_s: time from the first to the last reading in seconds. 0 in a single reading.
        interval_s: time between two readings in seconds. 0 in a single reading.
        host_load: shares of the CPUs of the host that other processes and other virtual machines used. None if unknown.
    """

    clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: str | None = None
    power_scope: str | None = None
    unreadable: dict[str, str] = field(default_factory=dict)
    samples: int = 1
    energy_j: float | None = None
    window_s: float = 0.0
    interval_s: float = 0.0
    host_load: HostLoad | None = None

    def row_columns(self) -> dict[str, float | str | None]:
        """Return the columns of a row that describe the state of the device and of its host."""
        load = {} if self.host_load is None else {"host_load": self.host_load.others, "host_steal": self.host_load.stolen}
        return {"clock_mhz": self.clock_mhz, "power_w": self.power_w, "throttle": self.throttle} | load


Reader = Callable[[], Telemetry]


def read(device: Device) -> Telemetry:
    """Return the current state of the device. A quantity that cannot be read is None, and `unreadable` contains the reason."""
    return reader_for(device)()


@functools.cache
def reader_for(device: Device) -> Reader:
    """Return the reader for this device. It uses NVML, amdsmi, sysfs or cpufreq."""
    return {"cuda": nvml_reader, "rocm": amd_reader, "cpu": cpu_reader}[device.kind](device)


class Sampler:
    """Read a device about every `interval_s` seconds in a separate thread while the code in a `with` block runs.

        with Sampler(device) as sampler:
            work()
        sampler.telemetry            # medians over the block

    The sampler takes at least one reading. If the reader raises an error, this error is raised at the end of the block.

    Args:
        device: the device.
        interval_s: seconds between two readings.
        reader: function that reads the device; default: `reader_for(device)`.
    """

    def __init__(self, device: Device, interval_s: float = 0.1, reader: Reader | None = None):
        self._read = reader or reader_for(device)
        self._interval_s = interval_s
        self._readings: list[Telemetry] = []
        self._moments_s: list[float] = []
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        # The ranks of a job share the cores, and a rank cannot tell the load of other ranks from the load of other users.
        alone = os.environ.get("WORLD_SIZE", "1") in ("", "1")
        self._measures_load, self._slows_down = alone, device.kind == "cpu"
        self._host_load: HostLoad | None = None

    def __enter__(self) -> "Sampler":
        self._load = OtherLoad() if self._measures_load else None
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        self._thread.join()
        self._host_load = self._load.shares() if self._load else None
        if self._error is not None and exception[0] is None:
            raise self._error

    def _run(self) -> None:
        try:
            while True:
                reading = self._read()
                # The time is appended first, so that another thread that reads both lists finds a time for each reading.
                self._moments_s.append(time.monotonic())
                self._readings.append(reading)
                if self._stop.wait(self._interval_s):
                    return
        except Exception as error:  # raised in the caller's thread by __exit__
            self._error = error

    @property
    def telemetry(self) -> Telemetry:
        """Medians of all readings taken so far. `throttle` joins the reasons of all readings.

        The load of the host is known only after the end of the block. On a CPU, so is `throttle`. It is "busy" if other processes
        and other virtual machines used more than a tenth of the cores.
        """
        readings = list(self._readings)
        moments_s = self._moments_s[: len(readings)]
        window_s = moments_s[-1] - moments_s[0] if readings else 0.0
        load = self._host_load
        medians = replace(median_of(readings), window_s=window_s, interval_s=self._interval_s, host_load=load)
        if load is None or not self._slows_down:
            return medians
        unread = {name: why for name, why in medians.unreadable.items() if name != "throttle"}
        return replace(medians, throttle=BUSY if load.total > _BUSY_SHARE else "none", unreadable=unread)


def unreadable(reason: str, samples: int = 1) -> Telemetry:
    """Return a reading in which every quantity is None, with the given reason."""
    return Telemetry(unreadable=dict.fromkeys(QUANTITIES, reason), samples=samples)


def from_raw(raw: dict[str, float | str | None], reason: str, power_scope: str = "device") -> Telemetry:
    """Return a reading with the values that a library returned.

    Args:
        raw: a dict that maps the name of a quantity to its value. A value that is missing or 0 becomes None in the reading.
        reason: text that is stored in `unreadable` for each quantity that is None.
        power_scope: part of the hardware whose power was read.
    """
    values: dict[str, Any] = {name: raw.get(name) or None for name in QUANTITIES}
    missing = {name: reason for name, value in values.items() if value is None}
    scope = power_scope if values["power_w"] else None
    energy_j = cast(float | None, raw.get("energy_j") or None)
    return Telemetry(**values, power_scope=scope, unreadable=missing, energy_j=energy_j)


def median_of(readings: list[Telemetry]) -> Telemetry:
    """Return the medians of several readings.

    If no reading contains a quantity, its median is None, and its reason is copied from the readings.
    """
    if not readings:
        return unreadable("no reading was taken", samples=0)
    medians = {}
    for name in ("clock_mhz", "memory_clock_mhz", "power_w", "temperature_c"):
        values = [value for reading in readings if (value := getattr(reading, name)) is not None]
        medians[name] = statistics.median(values) if values else None
    states = [reading.throttle for reading in readings if reading.throttle is not None]
    reasons = sorted({reason for state in states for reason in state.split("+")} - {"none"})
    medians["throttle"] = ("+".join(reasons) or "none") if states else None
    reason_of = {name: why for reading in readings for name, why in reading.unreadable.items()}
    scopes = [reading.power_scope for reading in readings if reading.power_scope]
    return Telemetry(
        **medians,
        power_scope=scopes[0] if scopes else None,
        unreadable={name: reason_of[name] for name, value in medians.items() if value is None and name in reason_of},
        samples=len(readings),
        energy_j=_counted_between(readings[0].energy_j, readings[-1].energy_j),
    )


def _counted_between(first: float | None, last: float | None) -> float | None:
    """Return the increase of a counter between two readings. Return None if there is no counter, or if the counter was reset."""
    return last - first if first is not None and last is not None and last > first else None


def nvml_reader(device: Device) -> Reader:
    """Return the reader for an NVIDIA GPU. NVML finds the GPU by its UUID, or else by its PCI address."""
    try:
        import pynvml
    except ImportError:
        return lambda: unreadable("nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
        handle = nvml_handle(pynvml, device)
    except pynvml.NVMLError as error:
        reason = f"NVML: {error}"
        return lambda: unreadable(reason)
    if handle is None:
        return lambda: unreadable("torch reports neither a UUID nor a PCI address to find the GPU in NVML")
    return lambda: _read_nvml(pynvml, handle)


def nvml_handle(pynvml: Any, device: Device) -> Any:
    """Return the handle of the GPU in the library `pynvml`, or None if torch reports neither a UUID nor a PCI address."""
    if device.uuid:
        # torch reports the UUID without the prefix that NVML needs.
        uuid = device.uuid if device.uuid.startswith(("GPU-", "MIG-")) else f"GPU-{device.uuid}"
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    return pynvml.nvmlDeviceGetHandleByPciBusId(device.pci_address) if device.pci_address else None


def nvml_uncorrected_errors(device: Device, nvml: Any = None) -> int | None:
    """Return the number of uncorrected memory errors of an NVIDIA GPU since its driver was loaded.

    Return None if NVML does not report it, as for a GPU without error correction (ECC).

    Args:
        device: the GPU.
        nvml: the module pynvml, or None to import it.
    """
    try:
        if nvml is None:
            import pynvml as nvml
        nvml.nvmlInit()
        handle = nvml_handle(nvml, device)
        if handle is None:
            return None
        return nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    except Exception:  # pynvml is missing, there is no driver, or the GPU has no ECC
        return None


def _read_nvml(pynvml, handle) -> Telemetry:
    queries = {
        "clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "throttle": lambda: nvml_throttle(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        "energy_j": lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
    }
    raw = {}
    for name, query in queries.items():
        try:
            # Each query has its own try: a GPU without one sensor still reports the others.
            raw[name] = query()
        except pynvml.NVMLError:
            raw[name] = None
    return from_raw(raw, "NVML does not report it for this GPU")


def nvml_throttle(bits: int) -> str:
    """Return the slow-down reasons in NVML's bit mask, joined by '+', or 'none'."""
    return "+".join(name for bit, name in NVML_SLOWDOWNS.items() if bits & bit) or "none"


def amd_reader(device: Device, root: Path = Path("/")) -> Reader:
    """Return the reader for an AMD GPU.

    It uses amdsmi if that is installed, and sysfs for quantities that amdsmi does not report. `make setup` does not install
    amdsmi, which is a part of ROCm.
    """
    address = device.pci_address
    if not address:
        return lambda: unreadable("torch reports no PCI address to find the GPU by")
    metrics = _amdsmi_metrics(address)
    position = gcd_position(device, root)

    def read() -> Telemetry:
        raw = read_amd_sysfs(address, root) | read_gpu_metrics(address, root)
        if metrics is not None:
            raw.update({name: value for name, value in metrics().items() if value is not None})
        return interpret_amd(raw, position)

    return read


def interpret_amd(raw: dict[str, float | str | None], position: str) -> Telemetry:
    """Return a reading of an AMD GPU.

    Args:
        raw: the values that the driver returned.
        position: 'first' or 'second' for a die of an MI250X, 'device' for any other GPU. Only the first die reports power, which
            is the power of the whole module. The power of the second die is None, whatever the driver returns.
    """
    if position == "second":
        reading = from_raw({**raw, "power_w": None, "energy_j": None}, "the driver does not report it for this GPU")
        reading.unreadable["power_w"] = "the second die of an MI250X reports no power; the first reports the module's"
        return reading
    scope = "module" if position == "first" else "device"
    return from_raw(raw, "the driver does not report it for this GPU", power_scope=scope)


def gcd_position(device: Device, root: Path = Path("/")) -> str:
    """Return 'first' or 'second' for a die (GCD) of an MI250(X) module, and 'device' for any other GPU.

    The two dies of a module have neighbouring PCI addresses. The first die has the lower address.
    """
    dies = sorted(
        folder.name for folder in (root / "sys/bus/pci/devices").glob("*") if system_text(folder / "device") in MI250_PCI_IDS
    )
    if device.pci_address not in dies and (device.arch != "gfx90a" or "MI250" not in device.name):
        return "device"
    # A die that is not listed counts as the first die. If it reports a power, this is the power of the whole module.
    return "second" if device.pci_address in dies and dies.index(device.pci_address) % 2 else "first"


def read_amd_sysfs(pci_address: str, root: Path = Path("/")) -> dict[str, float | str | None]:
    """Return clocks in MHz, power in W and junction temperature in degrees C from the amdgpu driver's hwmon files."""
    folders = sorted((root / "sys/bus/pci/devices" / pci_address / "hwmon").glob("hwmon*"))
    if not folders:
        return {}
    folder = folders[0]
    # The numbers of sensors differ between GPUs, so sensors are found by their labels, such as "sclk" or "junction".
    sensors = {system_text(label): label.name.removesuffix("_label") for label in folder.glob("*_label")}

    def value(sensor: str | None, suffix: str, scale: float) -> float | None:
        text = system_text(folder / f"{sensor}_{suffix}") if sensor else None
        return int(text) * scale if text and text.lstrip("-").isdigit() else None

    return {
        "clock_mhz": value(sensors.get("sclk", "freq1"), "input", 1e-6),
        "memory_clock_mhz": value(sensors.get("mclk", "freq2"), "input", 1e-6),
        # hwmon reports Hz, microwatts and thousandths of a degree. Some GPUs report the current power ("input") and no average.
        "power_w": value("power1", "average", 1e-6) or value("power1", "input", 1e-6),
        "temperature_c": value(sensors.get("junction", "temp1"), "input", 1e-3),
    }


def read_gpu_metrics(pci_address: str, root: Path = Path("/")) -> dict[str, float | str | None]:
    """Return the slow-down reasons and the energy counter in joules from the file gpu_metrics of the amdgpu driver.

    Only the table of the MI200 series is read, which has version 1.3. The result is {} for other GPUs.

    Source: struct gpu_metrics_v1_3 in drivers/gpu/drm/amd/include/kgd_pp_interface.h of Linux 6.12, and the bits of
    indep_throttle_status in drivers/gpu/drm/amd/pm/swsmu/inc/amdgpu_smu.h. No device was available to test it.
    """
    folder = root / "sys/bus/pci/devices" / pci_address
    if system_text(folder / "device") not in MI200_PCI_IDS:
        return {}
    try:
        table = (folder / "gpu_metrics").read_bytes()
    except OSError:
        return {}
    if len(table) < 120 or struct.unpack_from("<HBB", table) != (120, 1, 3):
        return {}
    ticks, status = (struct.unpack_from("<Q", table, place)[0] for place in (24, 112))
    # All bits set means that the device does not report the field.
    reasons = [name for bits, name in AMD_SLOWDOWNS.items() if any(status >> bit & 1 for bit in bits)]
    unknown = status & ~sum(1 << bit for bits in AMD_SLOWDOWNS for bit in bits)
    reasons += [f"status_0x{unknown:x}"] if unknown else []
    return {
        "throttle": None if status == 2**64 - 1 else "+".join(reasons) or "none",
        "energy_j": ticks * AMD_TICK_J if 0 < ticks < 2**64 - 1 else None,
    }


def _amdsmi_metrics(pci_address: str):
    """Return a function that reads this GPU with amdsmi, or None if ROCm's library libamd_smi.so is not installed.

    The library is checked first, because without it the import of an amdsmi package from PyPI fails.
    """
    library = Path(os.environ.get("ROCM_PATH", "/opt/rocm")) / "lib" / "libamd_smi.so"
    if not library.is_file() or importlib.util.find_spec("amdsmi") is None:
        return None
    import amdsmi  # pyright: ignore[reportMissingImports]  # part of ROCm, not of our requirements

    try:
        amdsmi.amdsmi_init()
        for handle in amdsmi.amdsmi_get_processor_handles():
            if amdsmi.amdsmi_get_gpu_device_bdf(handle).casefold() == pci_address.casefold():
                return lambda: _read_amdsmi(amdsmi, handle)
    except amdsmi.AmdSmiException:
        return None  # sysfs still provides all quantities except throttling
    return None


def _read_amdsmi(amdsmi, handle) -> dict[str, float | str | None]:
    try:
        readings = interpret_amdsmi(amdsmi.amdsmi_get_gpu_metrics_info(handle))
    except amdsmi.AmdSmiException:
        readings = {}  # this firmware has no metrics table; sysfs still provides all quantities except throttling
    try:
        readings["energy_j"] = interpret_amdsmi_energy(amdsmi.amdsmi_get_energy_count(handle))
    except amdsmi.AmdSmiException:
        readings["energy_j"] = None  # this device has no energy counter
    return readings


def interpret_amdsmi_energy(count: dict) -> float | None:
    """Return the energy in joules from amdsmi's counter: ticks times microjoules per tick. ROCm 5 calls the ticks 'power'."""
    ticks = count.get("energy_accumulator", count.get("power"))
    resolution_uj = count.get("counter_resolution")
    if not isinstance(ticks, int | float) or not isinstance(resolution_uj, int | float):
        return None
    return ticks * resolution_uj * 1e-6 if ticks > 0 and resolution_uj > 0 else None


def interpret_amdsmi(metrics: dict) -> dict[str, float | str | None]:
    """Return the values of amdsmi's gpu_metrics under the names in `QUANTITIES`.

    The values 'N/A', 65535 and 0 mean that the device does not report the field.
    """

    def value(*names: str) -> float | None:
        for name in names:
            number = metrics.get(name)
            if isinstance(number, int | float) and 0 < number < AMD_NOT_AVAILABLE:
                return float(number)
        return None

    status = metrics.get("throttle_status")
    return {
        "clock_mhz": value("current_gfxclk", "average_gfxclk_frequency"),
        "memory_clock_mhz": value("current_uclk", "average_uclk_frequency"),
        "power_w": value("current_socket_power", "average_socket_power"),
        "temperature_c": value("temperature_hotspot", "temperature_edge"),
        "throttle": _amdsmi_throttle(status),
    }


def _amdsmi_throttle(status: object) -> str | None:
    """Return the slow-down reasons in amdsmi's status. Newer releases return a bool that says whether the device slowed down."""
    # All bits set means that the device does not report the field.
    if not isinstance(status, int) or not 0 <= status < 0xFFFFFFFF:
        return None
    if not status:
        return "none"
    return "unknown_reason" if isinstance(status, bool) else f"status_0x{status:x}"


def cpu_reader(device: Device, root: Path = Path("/")) -> Reader:
    """Return a reader for the CPU's clock frequency.

    The reader uses cpufreq if it is available, and otherwise /proc/cpuinfo. In a virtual machine, /proc/cpuinfo contains a
    constant and is not used.
    """
    files = [root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq" for cpu in usable_cpus()]
    files = [file for file in files if file.is_file()][:8]  # a few files are enough for the median; reading hundreds takes long
    power = "CPU power counters need rights that an ordinary user has not"

    def read() -> Telemetry:
        clock_mhz = None
        if files:
            clock_mhz = statistics.median(float(system_text(file) or 0) / 1000 for file in files)
        elif "hypervisor" not in device.isa:
            clock_mhz = _cpuinfo_clock(root)
        reading = from_raw({"clock_mhz": clock_mhz}, "the system does not report it for a CPU")
        reading.unreadable["power_w"] = power
        return reading

    return read


def _cpuinfo_clock(root: Path) -> float | None:
    lines = (system_text(root / "proc/cpuinfo") or "").splitlines()
    clocks = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    return statistics.median(clocks) if clocks else None
