import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.hardware.cpu import CacheLevel, OtherLoad, _cache_size, data_caches, read_cpu, usable_cpus, waiting_threads


def machine(
    root: Path, cpuinfo: str, siblings: dict[int, str], caches: dict[int, tuple[str, str]], files: dict[str, str]
) -> Path:
    """A tree of /proc and /sys: per CPU its SMT siblings and its level-3 cache (size, shared by)."""
    content = {"proc/cpuinfo": cpuinfo, **files}
    for cpu, text in siblings.items():
        content[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = text
    for cpu, (size, shared) in caches.items():
        folder = f"sys/devices/system/cpu/cpu{cpu}/cache"
        for index, (level, kind, bytes_, by) in enumerate(
            [("1", "Instruction", "64K", str(cpu)), ("2", "Unified", "1024K", str(cpu)), ("3", "Unified", size, shared)]
        ):
            for name, text in (("level", level), ("type", kind), ("size", bytes_), ("shared_cpu_list", by)):
                content[f"{folder}/index{index}/{name}"] = text
    for name, text in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


EPYC = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC 9374F 32-Core Processor
cpu MHz\t\t: 4100.123
flags\t\t: fpu avx avx2 fma avx512f avx512_bf16 avx512_vnni
bogomips\t: 7699.99

processor\t: 1
vendor_id\t: SomethingElse"""
SMT = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
ONE_L3 = dict.fromkeys(SMT, ("32768K", "0-3"))


def test_a_server_is_read(tmp_path):
    files = {
        "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "4300000",
        "sys/devices/system/cpu/cpu0/cpufreq/base_frequency": "3850000",
    }
    cpu = read_cpu(machine(tmp_path, EPYC, SMT, ONE_L3, files), usable={0, 1, 2, 3})
    assert (cpu.name, cpu.vendor, cpu.family) == ("AMD EPYC 9374F 32-Core Processor", "AuthenticAMD", 25)
    assert (cpu.cores, cpu.threads) == (2, 4)
    assert cpu.last_level_cache_bytes == 32 * 2**20
    assert (cpu.nominal_clock_mhz, cpu.max_clock_mhz) == (3850.0, 4300.0)
    assert cpu.flags == ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni")


def test_only_usable_cores_and_their_caches_count(tmp_path):
    caches = {0: ("32768K", "0,2"), 2: ("32768K", "0,2"), 1: ("16384K", "1,3"), 3: ("16384K", "1,3")}
    root = machine(tmp_path, EPYC, SMT, caches, {})
    assert read_cpu(root, usable={0, 2}).cores == 1
    assert read_cpu(root, usable={0, 2}).last_level_cache_bytes == 32 * 2**20
    assert read_cpu(root, usable={0, 1}).last_level_cache_bytes == 48 * 2**20


def test_data_caches_are_told_by_level_without_those_of_instructions(tmp_path):
    caches = {0: ("32768K", "0,2"), 2: ("32768K", "0,2"), 1: ("16384K", "1,3"), 3: ("16384K", "1,3")}
    levels = data_caches(machine(tmp_path, EPYC, SMT, caches, {}), usable={0, 1})
    assert levels == (CacheLevel(2, (2**20, 2**20)), CacheLevel(3, (32 * 2**20, 16 * 2**20)))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 4),
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 2),  # one and a half CPUs: the limit must not lie too low
        ({"sys/fs/cgroup/cpu.max": "20000 100000"}, 1),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_a_cgroup_quota_caps_the_cores(tmp_path, files, cores):
    no_smt = {cpu: str(cpu) for cpu in range(4)}
    assert read_cpu(machine(tmp_path, EPYC, no_smt, ONE_L3, files), usable={0, 1, 2, 3}).cores == cores


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_memory_limit_of_the_cgroup_is_the_memory(tmp_path, name):
    root = machine(tmp_path, EPYC, SMT, ONE_L3, {f"sys/fs/cgroup/{name}": str(2**30)})
    assert read_cpu(root, usable={0}).memory_bytes == 2**30


@pytest.mark.parametrize(("name", "text"), [("memory.max", "max"), ("memory/memory.limit_in_bytes", "9223372036854771712")])
def test_without_a_memory_limit_the_memory_is_that_of_the_machine(tmp_path, name, text):
    root = machine(tmp_path, EPYC, SMT, ONE_L3, {f"sys/fs/cgroup/{name}": text})
    assert read_cpu(root, usable={0}).memory_bytes == psutil.virtual_memory().total


def test_the_nominal_clock_comes_from_the_name_or_the_time_stamp_counter(tmp_path):
    assert read_cpu(machine(tmp_path / "tsc", EPYC, SMT, ONE_L3, {}), usable={0}).nominal_clock_mhz == 3849.995
    named = EPYC.replace("32-Core Processor", "@ 2.10GHz")
    assert read_cpu(machine(tmp_path / "name", named, SMT, ONE_L3, {}), usable={0}).nominal_clock_mhz == 2100.0


def test_an_empty_system_gives_nulls_and_no_zeros(tmp_path):
    cpu = read_cpu(tmp_path, usable={0, 1})
    assert cpu.cores == 2 and cpu.name
    nulls = (cpu.family, cpu.last_level_cache_bytes, cpu.nominal_clock_mhz, cpu.max_clock_mhz)
    assert nulls == (None, None, None, None)
    assert data_caches(tmp_path, usable={0, 1}) == ()


@given(st.integers(1, 4096), st.sampled_from([("", 1), ("K", 2**10), ("M", 2**20), ("G", 2**30)]))
def test_cache_sizes_are_binary(number, unit):
    assert _cache_size(f"{number}{unit[0]}") == number * unit[1]


@given(st.text(alphabet="0123456789KMGTkm .-", max_size=6))
def test_any_cache_text_is_a_positive_size_or_none(text):
    size = _cache_size(text)
    assert size is None or size >= 0


STAT = """cpu  9 9 9 9 9 9 9 9 9 9
cpu0 {0} 0 0 500 7 0 0 {1} 0 0
cpu1 100 0 0 500 7 0 0 0 0 0
cpu2 {2} 0 0 500 7 0 0 0 0 0
intr 1
"""


def write_counts(root, own, *counts):
    """Write the counters of three CPUs and of this process, in ticks. The name of the process has spaces and brackets."""
    (root / "proc/self/task/1").mkdir(parents=True, exist_ok=True)
    (root / "proc/stat").write_text(STAT.format(*counts))
    (root / "proc/self/stat").write_text(f"1 (a) b) R 0 0 0 0 0 0 0 0 0 0 {own} 0 0 0 20 0")
    (root / "proc/self/task/1/children").write_text("")


def test_the_load_of_others_is_what_this_process_and_its_children_did_not_use(tmp_path, monkeypatch):
    second = os.sysconf("SC_CLK_TCK")
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    write_counts(tmp_path, 50, 0, 0, 0)
    load = OtherLoad(tmp_path, usable={0, 1})
    now[0] += 0.1
    assert load.shares() is None  # too short for counters of 10 ms
    now[0] += 1.9
    # In 2 s on two CPUs: 3 s busy, 0.5 s stolen by the host, 2.5 s of it ours. CPU 2 is not ours to use.
    write_counts(tmp_path, 50 + 3 * second // 2, 3 * second, second // 2, 9 * second)
    (tmp_path / "proc/7/task/7").mkdir(parents=True)
    (tmp_path / "proc/7/stat").write_text(f"7 (child) R 0 0 0 0 0 0 0 0 0 0 {second // 2} {second // 2} 0 0 20 0")
    (tmp_path / "proc/self/task/1/children").write_text("7 8")  # 8 has ended
    seen = load.shares()
    assert seen is not None and (seen.others, seen.stolen) == (pytest.approx(0.5 / 4), pytest.approx(0.5 / 4))
    assert seen.total == pytest.approx(1.0 / 4)
    write_counts(tmp_path, 40, 3 * second, 0, 0)  # a child ended without being waited for: its time is lost
    assert load.shares() is None
    (tmp_path / "proc/stat").write_text("")
    assert load.shares() is None


def test_the_load_is_unknown_within_a_quota_or_without_a_list_of_children(tmp_path, monkeypatch):
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    write_counts(tmp_path, 50, 0, 0, 0)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    for quota, known in (("max 100000", True), ("200000 100000", True), ("150000 100000", False)):
        (tmp_path / "sys/fs/cgroup/cpu.max").write_text(quota)
        load = OtherLoad(tmp_path, usable={0, 1})
        now[0] += 1
        assert (load.shares() is not None) == known
    (tmp_path / "sys/fs/cgroup/cpu.max").unlink()
    (tmp_path / "proc/self/task/1/children").unlink()
    load = OtherLoad(tmp_path, usable={0, 1})
    now[0] += 1
    assert load.shares() is None


@pytest.mark.process
@pytest.mark.skipif(OtherLoad()._read()[1] is None, reason="this system does not state the load")
def test_a_process_beside_this_one_is_seen_and_this_one_is_not():
    """The threshold is a quarter of one busy process. A loaded machine makes the share larger, but not that of own work."""
    load, ends = OtherLoad(), time.monotonic() + 1.0
    before = time.process_time()
    while time.monotonic() < ends:
        pass
    own, busy = time.process_time() - before, sum(load._read()[1]) - sum(load._start[1])
    assert load.shares().total <= (busy - own) / len(usable_cpus()) + 0.1
    cores = len(usable_cpus())
    busy = "import time; end = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    # The process that starts it ends, so that it is no child of this process.
    start = f"subprocess.Popen([sys.executable, '-c', {busy!r}], stdout=subprocess.DEVNULL)"
    starter = [sys.executable, "-c", f"import subprocess, sys; print({start}.pid)"]
    pid = int(subprocess.run(starter, stdout=subprocess.PIPE, text=True, check=True).stdout)
    try:
        load = OtherLoad()
        time.sleep(1.0)
        assert load.shares().total > 0.5 / (2 * cores)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_threads_that_wait_for_a_cpu_are_counted_without_the_one_that_counts(tmp_path):
    assert waiting_threads(tmp_path, samples=2, pause_s=0.0) == 0.0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("cpu  1 2 3\nctxt 9\nprocs_running 7\nprocs_blocked 0\n")
    assert waiting_threads(tmp_path, samples=3, pause_s=0.0) == 6.0
