"""Facts about the CPU from the operating system: usable cores, caches, instruction sets and clocks.

Most functions read files in /proc and /sys. The argument `root` is the folder that contains /proc and /sys, so that tests can use
copies of the files of another machine.
"""

import contextlib
import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path

# Instruction sets that determine peaks and native data types; other CPU flags are not recorded.
RELEVANT_FLAGS = (
    "avx",
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
    "amx_fp16",
    "asimd",
    "sve",
    "sve2",
    "bf16",
    "i8mm",
    "hypervisor",
)


@dataclass(frozen=True)
class CpuFacts:
    """The part of the CPU that this process may use. Clocks are in MHz and sizes in bytes. Unknown values are None.

    Args:
        name, vendor, family, model: fields of /proc/cpuinfo.
        machine: architecture, such as "x86_64".
        cores: number of physical cores in the affinity mask, limited by the CPU quota of the cgroup. In a virtual machine, these
            are the cores that the hypervisor reports.
        threads: number of logical CPUs in the affinity mask, limited by the same quota.
        memory_bytes: physical memory, or the memory limit of the cgroup if it is smaller.
        last_level_cache_bytes: sum of all last-level caches of the usable CPUs.
        flags: the flags in `RELEVANT_FLAGS` that the CPU has.
        nominal_clock_mhz: base clock.
        max_clock_mhz: maximum clock that cpufreq reports.
    """

    name: str
    vendor: str
    family: int | None
    model: int | None
    machine: str
    cores: int
    threads: int
    memory_bytes: int
    last_level_cache_bytes: int | None
    flags: tuple[str, ...]
    nominal_clock_mhz: float | None
    max_clock_mhz: float | None


@dataclass(frozen=True)
class CacheLevel:
    """One level of data caches.

    Args:
        level: 1, 2 or 3.
        sizes_bytes: size of each cache of this level. There may be one cache per core, per core complex or per socket.
    """

    level: int
    sizes_bytes: tuple[int, ...]


def data_caches(root: Path = Path("/"), usable: set[int] | None = None) -> tuple[CacheLevel, ...]:
    """Return the data caches of the usable CPUs, with level 1 first. Return an empty tuple if they are unknown.

    Args:
        root: folder that contains /sys.
        usable: numbers of the usable CPUs; default: the affinity mask of this process.
    """
    sizes: dict[int, dict[str, int]] = {}
    for cpu in usable_cpus() if usable is None else usable:
        for index in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            level, size = _integer(system_text(index / "level")), _cache_size(system_text(index / "size"))
            if level and size and system_text(index / "type") != "Instruction":
                # A cache appears in the folder of every CPU that shares it. The list of these CPUs identifies the cache, so that
                # it is counted once.
                sizes.setdefault(level, {})[system_text(index / "shared_cpu_list") or str(cpu)] = size
    return tuple(CacheLevel(level, tuple(sizes[level].values())) for level in sorted(sizes))


def usable_cpus() -> set[int]:
    """Return the numbers of the logical CPUs that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


@dataclass(frozen=True)
class HostLoad:
    """Shares of the usable CPUs that were not available to this process, as means over a period (0 to 1).

    Args:
        others: share that other processes used.
        stolen: share that the hypervisor gave to other virtual machines.
    """

    others: float
    stolen: float

    @property
    def total(self) -> float:
        """Sum of both shares, at most 1."""
        return min(self.others + self.stolen, 1.0)


class OtherLoad:
    """Measures the shares of the usable CPUs that other processes and other virtual machines on the same host use.

    The CPU time of this process and of its descendants is excluded. In a container with a CPU quota, the share cannot be
    measured, because the quota does not say which CPUs the container uses.

    Args:
        root: folder that contains /proc.
        usable: numbers of the usable CPUs; default: the affinity mask of this process.
    """

    def __init__(self, root: Path = Path("/"), usable: set[int] | None = None):
        self._root, self._usable = root, usable_cpus() if usable is None else usable
        self._start = self._read()

    def shares(self) -> HostLoad | None:
        """Return the mean shares since this object was created, or None if they are unknown.

        They are unknown if the system does not report the times of the CPUs, if less than 0.2 s have passed (the system
        counts in steps of 10 ms), or if a child process has ended and the system no longer reports its CPU time.
        """
        now, times, own_s = self._read()
        before, times_before, own_before_s = self._start
        if times is None or times_before is None or own_s is None or own_before_s is None:
            return None
        if now - before < 0.2 or own_s < own_before_s:
            return None
        busy_s, stolen_s = times[0] - times_before[0], times[1] - times_before[1]
        others_s, whole_s = busy_s - (own_s - own_before_s), (now - before) * len(self._usable)
        return HostLoad(min(max(others_s / whole_s, 0.0), 1.0), min(max(stolen_s / whole_s, 0.0), 1.0))

    def _read(self) -> tuple[float, tuple[float, float] | None, float | None]:
        """Return (current time, busy and stolen seconds of the usable CPUs, CPU seconds of this process and its descendants).

        Unknown values are None.
        """
        quota = _cgroup_quota(self._root)
        if quota is not None and quota < len(self._usable):
            return time.monotonic(), None, None
        return time.monotonic(), _busy_and_stolen_s(self._root, self._usable), _own_s(self._root)


def waiting_threads(root: Path = Path("/"), samples: int = 10, pause_s: float = 0.05) -> float:
    """Return the mean number of other threads on this machine that run or wait for a CPU.

    The mean is taken over several samples. The load average is not used, because it still includes work that ended a minute ago.
    Return 0 if the system does not report the number.

    Args:
        root: folder that contains /proc.
        samples: number of samples.
        pause_s: seconds before each sample.
    """
    counts = []
    for _ in range(samples):
        time.sleep(pause_s)
        found = re.search(r"^procs_running (\d+)$", system_text(root / "proc/stat") or "", re.MULTILINE)
        if found is None:
            return 0.0
        counts.append(max(int(found[1]) - 1, 0))  # minus 1, because this thread runs while it reads the file
    return sum(counts) / samples


def _busy_and_stolen_s(root: Path, usable: set[int]) -> tuple[float, float] | None:
    """Return the seconds in which the usable CPUs ran any process, and those that the hypervisor took. None without a report."""
    busy, stolen = 0, 0
    for line in (system_text(root / "proc/stat") or "").splitlines():
        name, *counts = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in usable:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, counts[:8])
            busy += user + nice + system + irq + softirq
            stolen += steal
    second = os.sysconf("SC_CLK_TCK")
    return (busy / second, stolen / second) if busy else None


def _own_s(root: Path) -> float | None:
    """Return the CPU seconds of this process and of its descendants, including those that have ended.

    Return None if the kernel does not list the children of a process.
    """
    ticks, waiting = 0, [root / "proc/self"]
    if next((root / "proc/self").glob("task/*/children"), None) is None:
        return None
    while waiting:
        process = waiting.pop()
        stat = system_text(process / "stat")
        if stat is None:  # the process has ended
            continue
        # utime, stime, cutime and cstime are fields 14 to 17. The second field, the name, can contain spaces.
        ticks += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
        with contextlib.suppress(OSError):  # a process that ends while its folder is listed
            for children in process.glob("task/*/children"):
                waiting += [root / "proc" / number for number in (system_text(children) or "").split()]
    return ticks / os.sysconf("SC_CLK_TCK")


def read_cpu(root: Path = Path("/"), usable: set[int] | None = None) -> CpuFacts:
    """Return the facts about the CPU of this machine.

    Args:
        root: folder that contains /proc and /sys.
        usable: numbers of the usable CPUs; default: the affinity mask of this process.
    """
    import psutil

    if usable is None:
        usable = usable_cpus()
    info = _cpuinfo(root)
    flags = set((info.get("flags") or info.get("Features") or "").split())
    name = info.get("model name") or platform.processor() or platform.machine() or "unknown CPU"
    threads = _within_quota(len(usable), _cgroup_quota(root))
    return CpuFacts(
        name=" ".join(name.split()),
        vendor=info.get("vendor_id", ""),
        family=_integer(info.get("cpu family")),
        model=_integer(info.get("model")),
        machine=platform.machine(),
        cores=_within_quota(_physical_cores(root, usable), _cgroup_quota(root)),
        threads=threads,
        memory_bytes=min(filter(None, (psutil.virtual_memory().total, memory_limit_bytes(root)))),
        last_level_cache_bytes=_last_level_cache(root, usable),
        flags=tuple(flag for flag in RELEVANT_FLAGS if flag in flags),
        nominal_clock_mhz=_nominal_clock(root, info),
        max_clock_mhz=_khz(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"),
    )


def system_text(path: Path) -> str | None:
    """Return the text of a file without leading and trailing white space, or None if the file cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # for example, amdgpu returns EINVAL for a sensor that a die does not have
        return None


def _integer(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _khz(path: Path) -> float | None:
    value = _integer(system_text(path))
    return value / 1000 if value else None


def _cpuinfo(root: Path) -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo, as a dict that maps names to values."""
    block = (system_text(root / "proc/cpuinfo") or "").split("\n\n")[0]
    pairs = (line.split(":", 1) for line in block.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _nominal_clock(root: Path, info: dict[str, str]) -> float | None:
    """Return the base clock in MHz, or None if it is unknown.

    The base clock is read from cpufreq, else from the model name. If neither contains it, the frequency of the time-stamp counter
    (bogomips / 2) is returned.
    """
    base = _khz(root / "sys/devices/system/cpu/cpu0/cpufreq/base_frequency")
    if base:
        return base
    named = re.search(r"@ *([\d.]+) *GHz", info.get("model name", ""))
    if named:
        return float(named.group(1)) * 1000
    if info.get("vendor_id") in ("GenuineIntel", "AuthenticAMD") and "bogomips" in info:
        # The kernel of x86 computes bogomips as twice the frequency of the time-stamp counter.
        return float(info["bogomips"]) / 2
    return None


def _physical_cores(root: Path, usable: set[int]) -> int:
    """Return the number of distinct cores among the usable logical CPUs. SMT siblings share their arithmetic units."""
    siblings = set()
    for cpu in usable:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings.add(system_text(topology / "thread_siblings_list") or f"cpu{cpu}")
    return len(siblings)


def _cgroup_quota(root: Path) -> float | None:
    """Return the CPU quota of this cgroup (version 2 or 1) as a number of CPUs, or None if there is no quota."""
    # Version 2 has one file with "quota period" in microseconds, version 1 has one file for each.
    text = system_text(root / "sys/fs/cgroup/cpu.max")
    if text:
        quota, period = text.split()
        return None if quota == "max" else int(quota) / int(period)
    quota = system_text(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period = _integer(system_text(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us"))
    return int(quota) / period if quota and quota != "-1" and period else None


def _within_quota(count: int, quota: float | None) -> int:
    # Round up, so that a limit derived from this number is never below what the machine can do.
    return count if quota is None else max(1, min(count, -int(-quota // 1)))


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory limit of this cgroup (version 2 or 1) in bytes, or None if there is no limit.

    Args:
        root: folder that contains sys/.
    """
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # versions 2 and 1
        limit = _integer(system_text(root / "sys/fs/cgroup" / name))
        # Without a limit, version 1 states a number near 2^63.
        if limit and limit < 1 << 60:
            return limit
    return None


def _last_level_cache(root: Path, usable: set[int]) -> int | None:
    """Return the total size in bytes of all last-level caches of the usable CPUs, or None if it is unknown."""
    levels = data_caches(root, usable)
    return sum(levels[-1].sizes_bytes) if levels else None


def _cache_size(text: str | None) -> int | None:
    found = re.fullmatch(r"(\d+)([KMG]?)", text or "")
    return int(found.group(1)) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[found.group(2)] if found else None
