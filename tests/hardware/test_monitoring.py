"""The monitor: devices and readings of injected NVML and sysfs, energies, the sampling rate, and the command around a program."""

import csv
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from hyperion.cli import app
from hyperion.commands.monitor import csv_text, energy_line, plot_png, run_watched, summary_lines
from hyperion.errors import HyperionError
from hyperion.hardware import monitoring
from hyperion.hardware.monitoring import (
    COLUMNS,
    Monitor,
    Reading,
    csv_rows,
    energy_of,
    growth_at_the_end,
    mean_power,
    monitor_reader,
    next_due,
    rate_error,
    summarize,
    system_devices,
)
from hyperion.hardware.telemetry import Telemetry

CHECKOUT = Path(__file__).resolve().parents[2]


class FakeNvml:
    """The calls of pynvml that the monitor makes; every other call, such as one that sets a clock, fails."""

    NVMLError = RuntimeError

    class NVMLError_NotSupported(RuntimeError):
        pass

    def __init__(self, utilization=73):
        self.utilization = utilization

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return int(uuid[-1])

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H200"

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return (9, 0)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=141 << 30, used=(handle + 1) << 30)

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-000{handle}"

    def nvmlDeviceGetUtilizationRates(self, handle):
        if self.utilization is None:
            raise RuntimeError("Not Supported")
        return SimpleNamespace(gpu=self.utilization, memory=1)


class Unknown(FakeNvml):
    """NVML that no longer finds a GPU."""

    def nvmlDeviceGetHandleByUUID(self, uuid):
        raise RuntimeError("Not Found")


class NoNvml:
    def nvmlInit(self):
        raise RuntimeError("Driver Not Loaded")


def fixed() -> Telemetry:
    return Telemetry(clock_mhz=1980.0, power_w=600.0, throttle="none")


def amd_node(root: Path, dies: int = 2) -> Path:
    for number in range(dies):
        folder = root / f"sys/bus/pci/devices/0000:{number + 1}1:00.0"
        hwmon = folder / "hwmon/hwmon3"
        hwmon.mkdir(parents=True)
        files = {
            "vendor": "0x1002",
            "class": "0x038000",
            "device": "0x740c",
            "product_name": "AMD INSTINCT MI250X",
            "mem_info_vram_total": str(64 << 30),
            "mem_info_vram_used": str(12 << 30),
            "gpu_busy_percent": "88",
        }
        sensors = {
            "freq1_label": "sclk",
            "freq1_input": "1700000000",
            "power1_average": "430000000",
            "temp2_label": "junction",
            "temp2_input": "61000",
        }
        for place, texts in ((folder, files), (hwmon, sensors)):
            for name, text in texts.items():
                (place / name).write_text(text)
    display = root / "sys/bus/pci/devices/0000:c1:00.0"
    display.mkdir()
    for name, text in {"vendor": "0x1a03", "class": "0x030000"}.items():
        (display / name).write_text(text)
    return root


def test_nvidia_devices_are_found_without_torch_and_read_by_uuid():
    nvml = FakeNvml()
    devices = system_devices(nvml=nvml)
    assert [(d.kind, d.arch, d.uuid) for d in devices] == [("cuda", "sm_90", "GPU-0000"), ("cuda", "sm_90", "GPU-0001")]
    reading = monitor_reader(devices[1], nvml=nvml, reader=fixed)()
    assert (reading.utilization_percent, reading.memory_bytes, reading.telemetry.power_w) == (73.0, 2 << 30, 600.0)
    assert monitor_reader(devices[0], nvml=FakeNvml(0), reader=fixed)().utilization_percent == 0.0


def test_utilisation_and_memory_that_cannot_be_read_have_reasons_in_the_summary():
    nvml = FakeNvml(None)
    device = system_devices(nvml=nvml)[0]
    reading = monitor_reader(device, nvml=nvml, reader=fixed)()
    assert reading.utilization_percent is None and reading.memory_bytes == 1 << 30
    reason = "  utilization_percent: NVML does not report it for this GPU: Not Supported"
    assert reason in summary_lines([summarize(device, [reading], 1.0)], 0.0)
    reading = monitor_reader(replace(device, uuid="GPU-000x"), nvml=Unknown(), reader=fixed)()
    assert reading.unreadable == dict.fromkeys(("utilization_percent", "memory_gib"), "NVML: Not Found")


def test_a_gpu_without_memory_of_its_own_is_watched():
    """Such as GB10, whose NVML does not support the query."""
    nvml = FakeNvml()

    def unsupported(handle):
        raise FakeNvml.NVMLError_NotSupported("Not Supported")

    nvml.nvmlDeviceGetMemoryInfo = unsupported
    devices = system_devices(nvml=nvml)
    assert [device.uuid for device in devices] == ["GPU-0000", "GPU-0001"] and devices[0].memory_bytes > 0
    reading = monitor_reader(devices[0], nvml=nvml, reader=fixed)()
    assert (reading.utilization_percent, reading.memory_bytes) == (73.0, None)
    assert reading.unreadable == {"memory_gib": "NVML does not report it for this GPU: Not Supported"}


def test_the_power_of_a_module_is_that_of_two_dies():
    busy, idle = series(*[500.0] * 5), series(*[90.0] * 5)
    modules = [[replace(one, telemetry=replace(one.telemetry, power_scope="module")) for one in each] for each in (busy, idle)]
    none = series(*[None] * 5)  # the second dies
    assert [mean_power([modules[0], none, modules[1], none], 10, 18, devices=count) for count in (1, 2, 3)] == [500, 500, 590]


def test_a_lost_gpu_hides_no_other_gpu():
    nvml = FakeNvml()
    found = nvml.nvmlDeviceGetMemoryInfo

    def lost(handle):
        if handle == 0:
            raise RuntimeError("GPU is lost")
        return found(handle)

    nvml.nvmlDeviceGetMemoryInfo = lost
    with pytest.warns(UserWarning, match="GPU 0 is not watched, because NVML cannot read it: GPU is lost"):
        devices = system_devices(nvml=nvml)
    assert [device.uuid for device in devices] == ["GPU-0001"]


def test_amd_devices_are_read_from_sysfs_and_nothing_is_written(tmp_path):
    from hyperion.hardware.telemetry import amd_reader

    root = amd_node(tmp_path)
    before = {file: (file.read_text(), file.stat().st_mtime_ns) for file in root.rglob("*") if file.is_file()}
    devices = system_devices(root, NoNvml())
    assert [(d.kind, d.name, d.pci_address) for d in devices] == [
        ("rocm", "AMD INSTINCT MI250X", "0000:11:00.0"),
        ("rocm", "AMD INSTINCT MI250X", "0000:21:00.0"),
    ]
    first, second = (monitor_reader(d, root, reader=amd_reader(d, root))() for d in devices)
    assert (first.utilization_percent, first.memory_bytes) == (88.0, 12 << 30)
    one, two = first.telemetry, second.telemetry
    assert (one.power_w, one.temperature_c, one.clock_mhz, one.power_scope) == (430.0, 61.0, 1700.0, "module")
    assert two.power_w is None and "second die" in two.unreadable["power_w"]  # the module's power is counted once
    (root / "sys/bus/pci/devices/0000:11:00.0/gpu_busy_percent").unlink()
    reading = monitor_reader(devices[0], root, reader=fixed)()
    assert reading.utilization_percent is None
    reason = "the driver does not report it for this GPU: no number in gpu_busy_percent"
    assert reading.unreadable == {"utilization_percent": reason}
    after = {file: (file.read_text(), file.stat().st_mtime_ns) for file in root.rglob("*") if file.is_file()}
    assert all(before[file] == state for file, state in after.items())


def test_a_machine_without_a_gpu_watches_its_cpu(tmp_path):
    (device,) = system_devices(tmp_path, NoNvml())
    assert device.kind == "cpu" and device.memory_bytes > 0
    read = monitor_reader(device)
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    reading = read()
    assert 10 < reading.utilization_percent <= 100 and 0 < reading.memory_bytes < device.memory_bytes * 2


def test_the_memory_in_use_on_a_cpu_is_what_is_not_available(tmp_path, monkeypatch):
    monkeypatch.setattr(monitoring.psutil, "virtual_memory", lambda: SimpleNamespace(total=64, available=16))
    (device,) = system_devices(tmp_path, NoNvml())
    assert monitor_reader(device)().memory_bytes == 48.0


def series(*powers: float | None, counter: bool = False, load: tuple[float | None, float | None] = (None, None), **changes):
    telemetry = [
        replace(fixed(), power_w=power, energy_j=1000.0 + 700 * n if counter else None, **changes)
        for n, power in enumerate(powers)
    ]
    return [Reading(10.0 + 2 * n, one, *load) for n, one in enumerate(telemetry)]


def test_the_energy_is_that_of_the_counter_or_the_integral_of_the_power():
    assert energy_of(series(100.0, 200.0, 100.0)) == pytest.approx(2 * 150 + 2 * 150)
    assert energy_of(series(100.0, None, 100.0)) == pytest.approx(4 * 100)
    assert energy_of(series(100.0, 200.0, 100.0, counter=True)) == 1400.0
    assert energy_of(series(None, None)) is None and energy_of(series(100.0)) is None


def test_a_counter_that_a_reading_lacks_gives_no_energy_of_the_whole_time():
    first, *others = series(100.0, 200.0, 100.0, counter=True)
    without = replace(first, telemetry=replace(first.telemetry, energy_j=None))
    # The counter of the last two readings grows by 700 J, but they are only half of the time.
    assert energy_of([without, *others]) == pytest.approx(2 * 150 + 2 * 150)


def test_the_mean_power_is_that_of_all_devices_between_two_times():
    # Readings at 10, 12, 14, 16 and 18 seconds.
    idle_then_busy = series(100.0, 100.0, 500.0, 500.0, 100.0)
    assert mean_power([idle_then_busy], 13.5, 16.5) == 500.0
    assert mean_power([idle_then_busy, series(*[50.0] * 5)], 13.5, 16.5) == 550.0
    assert mean_power([idle_then_busy, series(*[None] * 5)], 10, 12) == 100.0
    assert mean_power([series(*[1.0] * 5, counter=True)], 10, 18) == 350.0  # the counter adds 700 J in 2 s
    idle = series(*[75.0] * 5)
    assert mean_power([idle, idle_then_busy, idle], 13.5, 16.5, devices=1) == 500.0
    assert mean_power([idle, idle_then_busy, idle], 13.5, 16.5, devices=2) == 575.0
    assert mean_power([idle_then_busy], 14.5, 16.5) is None and mean_power([series(None, None)], 0, 99) is None


def test_the_summary_has_means_maxima_reasons_and_the_error_of_the_rate():
    (device,) = system_devices(nvml=NoNvml())
    readings = series(100.0, 300.0, load=(50.0, 3 << 30))
    hot = replace(readings[1].telemetry, throttle="hw_thermal+sw_power_cap", temperature_c=80.0)
    readings[1] = Reading(12.0, hot, 50.0, 5 << 30)
    summary = summarize(device, readings, interval_s=1.6)
    assert (summary.utilization_percent, summary.memory_gib, summary.temperature_c) == (50.0, 5.0, 80.0)
    assert (summary.power_w, summary.energy_j, summary.throttle) == (200.0, 400.0, "hw_thermal+sw_power_cap")
    assert summary.rate_error == pytest.approx(0.25)
    lines = summary_lines([summary], 0.004, tokens=800)
    assert f"energy per token: 0.5 J, of 0: {device.name}" in lines
    assert energy_line("training bf16", 4.0) == "training bf16: 4 J per token, at the mean power of the experiment"
    reason = "no energy per token: no device has two readings of its power in this time"
    assert energy_line("short bf16", None) == f"short bf16: {reason}"
    assert "throttled: hw_thermal" in lines[0] and "+25.0%" in lines[0] and "0.40% of one core" in lines[-1]


def test_without_power_there_is_no_energy_per_token_and_the_reason_is_shown():
    (device,) = system_devices(nvml=NoNvml())
    summary = summarize(device, series(None, None, unreadable={"power_w": "no right"}), 2.0)
    lines = summary_lines([summary], 0.0, tokens=5)
    assert "  power_w: no right" in lines and "no energy per token: no device reports its power" in lines
    empty = summarize(device, [], 1.0)
    assert empty.samples == 0 and empty.rate_error is None and "nothing can be read" in summary_lines([empty], 0.0)[0]
    for few in ([], series(100.0)):
        lines = summary_lines([summarize(device, few, 1.0)], 0.0, tokens=5)
        assert "no energy per token: no device has two readings of its power" in lines


def test_the_last_reading_counts_by_its_time_and_not_for_the_rate():
    (device,) = system_devices(nvml=NoNvml())
    times_s, powers, loads = (0.0, 10.0, 20.0, 20.5), (100.0, 100.0, 100.0, 500.0), (90.0, 10.0, 30.0, 100.0)
    readings = [
        Reading(time_s, replace(fixed(), power_w=power), load) for time_s, power, load in zip(times_s, powers, loads, strict=True)
    ]
    readings[-1] = replace(readings[-1], scheduled=False)
    summary = summarize(device, readings, 10.0)
    assert (summary.samples, summary.rate_error) == (4, 0.0)
    assert summary.power_w == pytest.approx((20 * 100 + 0.5 * 300) / 20.5)
    assert summary.utilization_percent == pytest.approx((10 * 10 + 10 * 30 + 0.5 * 100) / 20.5)
    assert summarize(device, readings[:1], 10.0).utilization_percent == 90.0


def test_only_the_energy_of_the_counted_devices_is_that_of_the_tokens():
    devices = system_devices(nvml=FakeNvml())
    summaries = [summarize(device, series(*[power] * 3), 2.0) for device, power in zip(devices, (100.0, 40.0), strict=True)]
    lines = {counted: summary_lines(summaries, 0.0, 100, counted)[-2] for counted in (None, (0,), (1,), ())}
    assert lines == {
        None: "energy per token: 5.6 J, of 0: NVIDIA H200, 1: NVIDIA H200",
        (0,): "energy per token: 4 J, of 0: NVIDIA H200",
        (1,): "energy per token: 1.6 J, of 1: NVIDIA H200",
        (): "no energy per token: the command can use no GPU",
    }


@pytest.mark.parametrize(
    ("memory_gib", "growth"),
    [
        ([n / 1000 for n in range(3000)], pytest.approx(1.5, rel=0.01)),
        ([n // 100 / 10 + (n % 2) / 50 for n in range(3000)], pytest.approx(1.5, rel=0.1)),
        ([min(n, 900) / 1000 + (n % 7) / 100 for n in range(3000)], pytest.approx(0, abs=0.02)),
        ([1.0] * 2000 + [3.0] * 1000, 0.0),
        ([3.0 - n / 1000 for n in range(3000)], 0.0),
        ([n / 1000 for n in range(29)], None),
    ],
    ids=["a leak", "a leak in steps, with noise", "level, with noise", "one step", "falling", "too short"],
)
def test_memory_that_grows_until_the_end_is_told_from_a_step(memory_gib, growth):
    assert growth_at_the_end(memory_gib) == growth


@pytest.mark.parametrize(("reading_s", "interval_s"), [(0.0, 0.1), (0.06, 0.1), (0.13, 0.2)])
def test_neither_slow_readings_nor_late_wake_ups_lower_the_rate(reading_s, interval_s):
    due_s, times_s = 50.0, []
    for n in range(100):
        times_s.append(due_s + 0.01 * (n % 3))  # the thread wakes up late
        due_s = next_due(due_s, times_s[-1] + reading_s, 0.1)
    assert rate_error(times_s, interval_s) == pytest.approx(0, abs=0.05)


def test_the_energy_until_the_end_is_counted_if_it_lies_between_two_readings():
    """A device takes 100 W, the interval is longer than the command, and the command takes 29 s by the clock of the readings."""
    (device,) = system_devices(nvml=NoNvml())
    clock_s, started = [1000.0], threading.Event()

    def read() -> Reading:
        reading = Reading(clock_s[0], replace(fixed(), power_w=100.0), None, clock_s[0])
        started.set()
        return reading

    with (monitor := Monitor([device], 3600.0, [read])):
        assert started.wait(60)
        clock_s[0] += 29.0
    (summary,) = monitor.summaries()
    assert (summary.energy_j, summary.power_w, summary.samples, summary.rate_error) == (2900.0, 100.0, 2, None)
    assert summary.memory_gib == 1029.0 / 2**30 and [one.scheduled for one in monitor.readings[0]] == [True, False]


def test_the_monitor_reads_at_its_rate_until_the_end():
    (device,) = system_devices(nvml=NoNvml())
    enough = threading.Event()

    def read() -> Reading:
        if len(monitor.readings[0]) == 4:
            enough.set()
        return Reading(time.monotonic(), fixed())

    with (monitor := Monitor([device], 0.01, [read])):
        assert enough.wait(60)
    assert monitor.summaries()[0].samples >= 6 and 0 <= monitor.overhead < 1


def test_the_errors_of_one_reader_end_neither_the_other_readings_nor_the_command(monkeypatch):
    devices = system_devices(nvml=FakeNvml())
    count = iter(range(10**9))

    def lost() -> Reading:
        if next(count) > 0:
            raise RuntimeError("GPU is lost")
        return Reading(time.monotonic(), fixed())

    readers = {0: lost, 1: lambda: Reading(time.monotonic(), fixed())}
    monkeypatch.setattr("hyperion.commands.monitor.system_devices", lambda: devices)
    monkeypatch.setattr("hyperion.hardware.monitoring.monitor_reader", lambda device: readers[device.index])
    arguments = ["monitor", "--interval", "0.01s", "--", sys.executable, "-S", "-c", "raise SystemExit(7)"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 7, done.output
    assert re.search(r"^  warning: failed readings: [1-9]\d* \(RuntimeError: GPU is lost\)$", done.output, re.MULTILINE)
    samples = [int(number) for number in re.findall(r"\((\d+) readings", done.output)]
    assert samples[0] == 1 and samples[1] >= 2


def test_a_command_that_is_shorter_than_the_interval_has_an_energy(monkeypatch):
    devices = system_devices(nvml=FakeNvml())
    monkeypatch.setattr("hyperion.commands.monitor.system_devices", lambda: devices)
    monkeypatch.setattr("hyperion.hardware.monitoring.monitor_reader", lambda device: lambda: Reading(time.monotonic(), fixed()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    done = CliRunner().invoke(app, ["monitor", "--interval", "10m", "--tokens", "5", "--", sys.executable, "-S", "-c", ""])
    assert re.search(r"^energy per token: \S+ J, of 1: NVIDIA H200$", done.output, re.MULTILINE), done.output
    assert done.output.count("(2 readings)") == 2


def test_csv_and_plot_hold_every_reading():
    (device,) = system_devices(nvml=NoNvml())
    rows = csv_rows([device], [series(100.0, None, 300.0, load=(None, 1 << 30))])
    assert [row["time_s"] for row in rows] == [0.0, 2.0, 4.0]
    table = list(csv.DictReader(csv_text(rows).splitlines()))
    assert tuple(table[0]) == COLUMNS and [row["power_w"] for row in table] == ["100.0", "", "300.0"]
    assert {row["memory_gib"] for row in table} == {"1.0"} and {row["throttle"] for row in table} == {"none"}
    assert plot_png(rows)[:4] == b"\x89PNG" and len(plot_png(rows)) > 5000


@pytest.mark.process
def test_the_exit_code_of_the_command_and_a_signal_pass_through():
    assert run_watched([sys.executable, "-S", "-c", "raise SystemExit(7)"]) == 7
    assert run_watched([sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 9)"]) == 128 + 9
    with pytest.raises(HyperionError, match="cannot be started"):
        run_watched(["/nonexistent/program"])


@pytest.mark.process
def test_a_user_watches_a_program_and_gets_its_output_csv_and_plot(tmp_path, capfd):
    code = "import time; print('from the program', flush=True); time.sleep(0.7); raise SystemExit(3)"
    options = ["--interval", "0.1s", "--csv", str(tmp_path / "m.csv"), "--plot", str(tmp_path / "m.png"), "--tokens", "100"]
    done = CliRunner().invoke(app, ["monitor", *options, "--", sys.executable, "-S", "-c", code])
    assert done.exit_code == 3 and "of one core" in done.output, done.output
    assert capfd.readouterr().out == "from the program\n"
    table = list(csv.DictReader((tmp_path / "m.csv").read_text().splitlines()))
    assert len(table) >= 3 and all(0 <= float(row["utilization_percent"]) <= 100 for row in table)
    assert (tmp_path / "m.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("arguments", [[], ["--duration", "1s", "--", "true"], ["--interval", "1ms", "--", "true"]])
def test_senseless_options_are_refused(arguments):
    done = CliRunner().invoke(app, ["monitor", *arguments])
    assert isinstance(done.exception, HyperionError) and done.exception.next_step


@pytest.mark.process
def test_sigterm_ends_the_watched_program_and_the_readings_are_shown(tmp_path):
    code = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    command = [sys.executable, "-m", "hyperion", "monitor", "--", sys.executable, "-c", code, str(tmp_path / "started")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert "of one core" in process.communicate(timeout=60)[0] and process.returncode == 128 + signal.SIGTERM


@pytest.mark.gpu
@pytest.mark.process
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_program_that_uses_the_gpus_of_this_machine_is_watched(tmp_path):
    # Products for 5 s on GPU 0, which hold more than 1 GiB.
    code = """
import time, torch
a = torch.randn(16384, 16384, device="cuda:0")
end = time.monotonic() + 5
while time.monotonic() < end:
    (a @ a).sum().item()
"""
    options = ["--interval", "0.2s", "--csv", str(tmp_path / "m.csv"), "--tokens", "1000"]
    done = CliRunner().invoke(app, ["monitor", *options, "--", sys.executable, "-c", code])
    assert done.exit_code == 0, done.output
    table = list(csv.DictReader((tmp_path / "m.csv").read_text().splitlines()))
    assert len({row["device"] for row in table}) >= torch.cuda.device_count()
    first = [row for row in table if row["device"].startswith("0: ")]
    busy = [row for row in first if float(row["utilization_percent"]) > 50]
    assert len(busy) >= 10 and all(float(row["power_w"]) > 0 and float(row["clock_mhz"]) > 0 for row in busy)
    assert max(float(row["memory_gib"]) for row in first) > 1
    times_s = [float(row["time_s"]) for row in first]
    assert abs(rate_error(times_s[:-1], 0.2) or 0) < 0.05 and "energy per token: " in done.output
    assert float(re.search(r"the monitor used ([\d.]+)% of one core", done.output)[1]) < 10
