"""How each kind of device is read: NVML, amdsmi where ROCm installed it, Linux' sysfs, cpufreq.

A reader is a function without arguments; opening one finds the device by UUID or PCI address, because torch's index
counts visible devices and the libraries' index counts all of them.
"""

import importlib.util
import os
import statistics
from pathlib import Path

from hyperion.hardware.device import Device
from hyperion.hardware.telemetry import Reader, Telemetry, from_raw, unreadable

# NVML's clock event bits that mean a slow-down; idling and clocks set by an application are none.
NVML_SLOWDOWNS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
MI250_PCI_IDS = ("0x7408", "0x740c")
AMD_NOT_AVAILABLE = 0xFFFF  # gpu_metrics' value for a field that this device does not fill


def nvml_reader(device: Device) -> Reader:
    """Reader of an NVIDIA GPU, found by its UUID, else by its PCI address."""
    try:
        import pynvml
    except ImportError:
        return lambda: unreadable("nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
        handle = _nvml_handle(pynvml, device)
    except pynvml.NVMLError as error:
        reason = f"NVML: {error}"
        return lambda: unreadable(reason)
    if handle is None:
        return lambda: unreadable("torch reports neither a UUID nor a PCI address to find the GPU in NVML")
    return lambda: _read_nvml(pynvml, handle)


def _nvml_handle(pynvml, device: Device):
    if device.uuid:
        uuid = device.uuid if device.uuid.startswith(("GPU-", "MIG-")) else f"GPU-{device.uuid}"
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    return pynvml.nvmlDeviceGetHandleByPciBusId(device.pci_address) if device.pci_address else None


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
            raw[name] = query()
        except pynvml.NVMLError:
            raw[name] = None
    return from_raw(raw, "NVML does not report it for this GPU")


def nvml_throttle(bits: int) -> str:
    """'none' or the slow-down reasons of NVML's bit mask, joined by '+' (several may hold at once)."""
    return "+".join(name for bit, name in NVML_SLOWDOWNS.items() if bits & bit) or "none"


def amd_reader(device: Device, root: Path = Path("/")) -> Reader:
    """Reader of an AMD GPU: amdsmi's metrics where ROCm's library is there, sysfs for what they lack."""
    address = device.pci_address
    if not address:
        return lambda: unreadable("torch reports no PCI address to find the GPU by")
    metrics = _amdsmi_metrics(address)
    position = gcd_position(device, root)

    def read() -> Telemetry:
        raw = read_amd_sysfs(address, root)
        if metrics is not None:
            raw.update({name: value for name, value in metrics().items() if value is not None})
        return interpret_amd(raw, position)

    return read


def interpret_amd(raw: dict[str, float | str | None], position: str) -> Telemetry:
    """A reading of an AMD GPU. position is 'device', or which die of an MI250X it is: only the 'first' die of a module
    reports power, and it reports the module's; a 'second' die's power is None whatever the driver returns."""
    if position == "second":
        reading = from_raw({**raw, "power_w": None, "energy_j": None}, "the driver does not report it for this GPU")
        reading.unreadable["power_w"] = "the second die of an MI250X reports no power; the first reports the module's"
        return reading
    scope = "module" if position == "first" else "device"
    return from_raw(raw, "the driver does not report it for this GPU", power_scope=scope)


def gcd_position(device: Device, root: Path = Path("/")) -> str:
    """'first' or 'second' die of an MI250(X) module by the order of PCI addresses, 'device' for any other GPU."""
    if device.arch != "gfx90a" or "MI250" not in device.name:
        return "device"
    dies = sorted(
        folder.name
        for folder in (root / "sys/bus/pci/devices").glob("*")
        if (folder / "device").is_file() and (folder / "device").read_text().strip() in MI250_PCI_IDS
    )
    # A die missing from the listing reads as the module when it reports any power, and as nothing when it does not.
    return "second" if device.pci_address in dies and dies.index(device.pci_address) % 2 else "first"


def read_amd_sysfs(pci_address: str, root: Path = Path("/")) -> dict[str, float | str | None]:
    """Clocks in MHz, power in W and junction temperature in degrees C from the amdgpu driver's hwmon files."""
    folders = sorted((root / "sys/bus/pci/devices" / pci_address / "hwmon").glob("hwmon*"))
    if not folders:
        return {}
    folder = folders[0]
    sensors = {_text(label): label.name.removesuffix("_label") for label in folder.glob("*_label")}

    def value(sensor: str | None, suffix: str, scale: float) -> float | None:
        text = _text(folder / f"{sensor}_{suffix}") if sensor else None
        return int(text) * scale if text and text.lstrip("-").isdigit() else None

    return {
        "clock_mhz": value(sensors.get("sclk", "freq1"), "input", 1e-6),
        "memory_clock_mhz": value(sensors.get("mclk", "freq2"), "input", 1e-6),
        "power_w": value("power1", "average", 1e-6) or value("power1", "input", 1e-6),
        "temperature_c": value(sensors.get("junction", "temp1"), "input", 1e-3),
    }


def _amdsmi_metrics(pci_address: str):
    """A function that returns amdsmi's values for this GPU, or None without ROCm's own library.

    A copy of amdsmi from a package index fails on import where ROCm's library is absent, so that is looked for first.
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
        return None  # sysfs still reads everything but throttling
    return None


def _read_amdsmi(amdsmi, handle) -> dict[str, float | str | None]:
    try:
        readings = interpret_amdsmi(amdsmi.amdsmi_get_gpu_metrics_info(handle))
    except amdsmi.AmdSmiException:
        readings = {}  # this firmware has no metrics table; sysfs still reads everything but throttling
    try:
        readings["energy_j"] = interpret_amdsmi_energy(amdsmi.amdsmi_get_energy_count(handle))
    except amdsmi.AmdSmiException:
        readings["energy_j"] = None  # this device has no energy counter
    return readings


def interpret_amdsmi_energy(count: dict) -> float | None:
    """Joules of amdsmi's energy counter: ticks times the microjoules of one; ROCm 5 called the ticks 'power'."""
    ticks = count.get("energy_accumulator", count.get("power"))
    resolution_uj = count.get("counter_resolution")
    if not isinstance(ticks, int | float) or not isinstance(resolution_uj, int | float):
        return None
    return ticks * resolution_uj * 1e-6 if ticks > 0 and resolution_uj > 0 else None


def interpret_amdsmi(metrics: dict) -> dict[str, float | str | None]:
    """amdsmi's gpu_metrics as our quantities; 'N/A', 65535 and 0 mean that this device does not report the field."""

    def value(*names: str) -> float | None:
        for name in names:
            found = metrics.get(name)
            if isinstance(found, int | float) and 0 < found < AMD_NOT_AVAILABLE:
                return float(found)
        return None

    status = metrics.get("throttle_status")
    readable = isinstance(status, int) and 0 <= status < 0xFFFFFFFF
    return {
        "clock_mhz": value("current_gfxclk", "average_gfxclk_frequency"),
        "memory_clock_mhz": value("current_uclk", "average_uclk_frequency"),
        "power_w": value("current_socket_power", "average_socket_power"),
        "temperature_c": value("temperature_hotspot", "temperature_edge"),
        "throttle": (f"status_0x{status:x}" if status else "none") if readable else None,
    }


def cpu_reader(device: Device, root: Path = Path("/")) -> Reader:
    """Reader of the CPU's clock: cpufreq, else /proc/cpuinfo. A virtual machine shows a constant there: unreadable."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    files = [root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq" for cpu in cpus]
    files = [file for file in files if file.is_file()][:8]  # a handful tells the median; reading hundreds costs time
    power = "CPU power counters need rights that an ordinary user has not"

    def read() -> Telemetry:
        clock_mhz = None
        if files:
            clock_mhz = statistics.median(float(_text(file) or 0) / 1000 for file in files)
        elif "hypervisor" not in device.isa:
            clock_mhz = _cpuinfo_clock(root)
        reading = from_raw({"clock_mhz": clock_mhz}, "the system does not tell it for a CPU")
        reading.unreadable["power_w"] = power
        return reading

    return read


def _cpuinfo_clock(root: Path) -> float | None:
    lines = (_text(root / "proc/cpuinfo") or "").splitlines()
    clocks = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    return statistics.median(clocks) if clocks else None


def _text(path: Path) -> str | None:
    """A sensor's text, or None where the driver offers none (amdgpu answers EINVAL for a sensor the die lacks)."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
