import dataclasses
import struct
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.hardware import detect, detect_cpu
from hyperion.hardware.telemetry import (
    NVML_SLOWDOWNS,
    _read_nvml,
    amd_reader,
    cpu_reader,
    gcd_position,
    interpret_amd,
    interpret_amdsmi,
    nvml_handle,
    nvml_reader,
    nvml_throttle,
    read_amd_sysfs,
    read_gpu_metrics,
)
from tests.hardware.machines import facts, gpu

ADDRESSES = ("0000:c1:00.0", "0000:c6:00.0", "0000:c9:00.0", "0000:ce:00.0")


@pytest.fixture(autouse=True)
def no_amdsmi(monkeypatch, tmp_path):
    """On a machine with ROCm, amdsmi would answer for a made-up die that has a real one's address."""
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))


def amd_node(root, power_uw: dict[str, int]) -> None:
    """A sysfs tree of MI250X dies, each with its average power in microwatts."""
    for address in ADDRESSES:
        sensors = {
            "freq1_label": "sclk",
            "freq1_input": "1700000000",
            "freq2_label": "mclk",
            "freq2_input": "1600000000",
            "temp1_label": "edge",
            "temp1_input": "41000",
            "temp2_label": "junction",
            "temp2_input": "47000",
            "power1_average": str(power_uw[address]),
        }
        folder = root / "sys/bus/pci/devices" / address
        (folder / "hwmon/hwmon3").mkdir(parents=True)
        (folder / "device").write_text("0x7408\n")
        for name, text in sensors.items():
            (folder / "hwmon/hwmon3" / name).write_text(text + "\n")


def die(address: str):
    return detect(facts(gpus=(gpu("MI250X", pci_address=address),)))


def test_only_the_first_die_of_a_module_has_power_and_it_is_the_modules(tmp_path):
    amd_node(tmp_path, {ADDRESSES[0]: 480_000_000, ADDRESSES[1]: 0, ADDRESSES[2]: 500_000_000, ADDRESSES[3]: 0})
    first, second, third, fourth = (amd_reader(die(address), tmp_path)() for address in ADDRESSES)
    assert (first.power_w, first.power_scope) == (480.0, "module")
    assert (third.power_w, third.power_scope) == (500.0, "module")
    for odd in (second, fourth):
        assert odd.power_w is None and odd.power_scope is None and "second die" in odd.unreadable["power_w"]
        assert (odd.clock_mhz, odd.memory_clock_mhz, odd.temperature_c) == (1700.0, 1600.0, 47.0)
        assert odd.throttle is None


def test_a_number_on_the_second_die_is_not_believed():
    assert interpret_amd({"power_w": 333.0, "clock_mhz": 1700.0}, "second").power_w is None
    assert interpret_amd({"power_w": 333.0}, "device").power_scope == "device"


def test_other_amd_gpus_report_for_themselves(tmp_path):
    amd_node(tmp_path, dict.fromkeys(ADDRESSES, 300_000_000))
    for machine in ("MI210", "MI300X"):
        assert gcd_position(replace(detect(facts(machine)), pci_address="0000:ff:00.0"), tmp_path) == "device"
    assert gcd_position(die("0000:ff:00.0"), tmp_path) == "first"


def test_the_position_of_a_die_does_not_depend_on_its_name(tmp_path):
    amd_node(tmp_path, dict.fromkeys(ADDRESSES, 1))
    unnamed = [replace(die(address), name="AMD Radeon Graphics", arch="unknown") for address in ADDRESSES]
    assert [gcd_position(one, tmp_path) for one in unnamed] == ["first", "second"] * 2


def gpu_metrics(ticks: int, status: int, version: int = 3) -> bytes:
    """The table of the MI200 series, with fields in the order of struct gpu_metrics_v1_3."""
    fields = [120, 1, version, *[0] * 9, 480, ticks, 0, *[0] * 14, 0, 0, 0, 0, 0, 0, 0, *[0] * 4, 0, *[0] * 4, status]
    return struct.pack("<HBB" + "9H" + "H" + "QQ" + "14H" + "I" + "HHHH" + "II" + "4H" + "Q" + "4H" + "Q", *fields)


@pytest.mark.parametrize(
    ("status", "throttle"),
    [
        (0, "none"),
        (1 << 0, "sw_power_cap"),
        (1 << 3 | 1 << 16 | 1 << 36, "sw_power_cap+current_limit+hw_thermal"),
        (1 << 47, "board_signal"),
        (1 << 56, "status_0x100000000000000"),
        (2**64 - 1, None),
    ],
)
def test_the_drivers_table_has_the_slow_downs_and_the_energy_without_amdsmi(tmp_path, status, throttle):
    amd_node(tmp_path, dict.fromkeys(ADDRESSES, 480_000_000))
    folder = tmp_path / "sys/bus/pci/devices"
    (folder / ADDRESSES[0] / "gpu_metrics").write_bytes(gpu_metrics(1 << 20, status))
    (folder / ADDRESSES[1] / "gpu_metrics").write_bytes(gpu_metrics(1 << 20, status))
    first, second = (amd_reader(die(address), tmp_path)() for address in ADDRESSES[:2])
    assert first.throttle == second.throttle == throttle
    assert first.energy_j == 16.0 and second.energy_j is None, "the energy is that of the module"


def test_tables_of_other_gpus_and_damaged_tables_are_not_read(tmp_path):
    amd_node(tmp_path, dict.fromkeys(ADDRESSES, 1))
    folder = tmp_path / "sys/bus/pci/devices" / ADDRESSES[0]
    for content in (gpu_metrics(1, 1, version=4), gpu_metrics(1, 1)[:100], b""):
        (folder / "gpu_metrics").write_bytes(content)
        assert read_gpu_metrics(ADDRESSES[0], tmp_path) == {}
    (folder / "gpu_metrics").write_bytes(gpu_metrics(1, 1))
    assert read_gpu_metrics(ADDRESSES[0], tmp_path)["throttle"] == "sw_power_cap"
    (folder / "device").write_text("0x74a1\n")
    assert read_gpu_metrics(ADDRESSES[0], tmp_path) == {}


def test_sysfs_without_sensors_reads_nothing(tmp_path):
    assert read_amd_sysfs("0000:01:00.0", tmp_path) == {}
    reading = amd_reader(detect(facts("MI300X")), tmp_path)()
    assert reading.power_w is None and reading.clock_mhz is None and reading.unreadable


def test_without_an_address_nothing_is_guessed_from_the_index():
    blind = dataclasses.replace(detect(facts("MI300X")), pci_address=None)
    assert "PCI address" in amd_reader(blind)().unreadable["clock_mhz"]


def test_amdsmi_marks_of_absence_are_nulls():
    metrics = {
        "current_gfxclk": 0xFFFF,
        "average_gfxclk_frequency": 1650,
        "current_uclk": "N/A",
        "current_socket_power": 0,
        "average_socket_power": 0xFFFF,
        "temperature_hotspot": 51,
        "throttle_status": 0,
    }
    assert interpret_amdsmi(metrics) == {
        "clock_mhz": 1650.0,
        "memory_clock_mhz": None,
        "power_w": None,
        "temperature_c": 51.0,
        "throttle": "none",
    }
    assert interpret_amdsmi({"throttle_status": 0x12})["throttle"] == "status_0x12"
    assert interpret_amdsmi({"throttle_status": "N/A"})["throttle"] is None


@given(st.sets(st.sampled_from(sorted(NVML_SLOWDOWNS))), st.sampled_from([0, 1, 2, 0x100, 0x103]))
def test_every_nvml_slowdown_is_named_whatever_else_is_set(bits, others):
    named = nvml_throttle(sum(bits) | others)
    assert set(named.split("+")) == ({NVML_SLOWDOWNS[bit] for bit in bits} or {"none"})


def test_nvml_finds_the_gpu_by_uuid_or_address_never_by_index():
    asked = []
    nvml = SimpleNamespace(
        nvmlDeviceGetHandleByUUID=lambda uuid: asked.append(uuid) or "by uuid",
        nvmlDeviceGetHandleByPciBusId=lambda address: asked.append(address) or "by address",
    )
    device = detect(facts("H200"))
    assert nvml_handle(nvml, device) == "by uuid"
    assert nvml_handle(nvml, dataclasses.replace(device, uuid=None)) == "by address"
    assert nvml_handle(nvml, dataclasses.replace(device, uuid=None, pci_address=None)) is None
    assert asked == ["GPU-64654e92-a282-8d45-eb16-fb2f7ea2b584", "0000:c1:00.0"]


def test_nvmls_milliwatts_and_millijoules_become_watts_and_joules():
    nvml = SimpleNamespace(
        NVMLError=KeyError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetClockInfo=lambda handle, clock: {1: 1980, 2: 2619}[clock],
        nvmlDeviceGetPowerUsage=lambda handle: 700_000,
        nvmlDeviceGetTemperature=lambda handle, sensor: 45,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x04,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 12_345_000,
    )
    found = _read_nvml(nvml, "handle")
    assert (found.clock_mhz, found.memory_clock_mhz, found.power_w, found.temperature_c) == (1980, 2619, 700.0, 45)
    assert (found.throttle, found.energy_j) == ("sw_power_cap", 12_345.0)


def test_an_nvidia_gpu_that_nvml_does_not_know_is_null_with_nvmls_reason():
    reading = nvml_reader(detect(facts("H200")))()
    assert reading.power_w is None and reading.unreadable["power_w"].startswith("NVML")


@pytest.mark.parametrize(
    ("isa", "files", "clock"),
    [
        ((), {"proc/cpuinfo": "cpu MHz\t: 3000.0\ncpu MHz\t: 3200.0\n"}, 3100.0),
        (("hypervisor",), {"proc/cpuinfo": "cpu MHz\t: 2596.1\n"}, None),  # a constant there, no reading
        ((), {}, None),
    ],
)
def test_cpu_clock_from_cpuinfo_only_where_it_moves(tmp_path, isa, files, clock):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    reading = cpu_reader(dataclasses.replace(detect_cpu(facts()), isa=isa), tmp_path)()
    assert reading.clock_mhz == clock
    assert reading.power_w is None and "rights" in reading.unreadable["power_w"]


def test_cpu_clock_from_cpufreq(tmp_path):
    import os

    for cpu in os.sched_getaffinity(0):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text("3400000\n")
    assert cpu_reader(detect_cpu(facts()), tmp_path)().clock_mhz == 3400.0
