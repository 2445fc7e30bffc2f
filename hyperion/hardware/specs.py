"""Data sheets: peaks (units x operations per clock x clock), memory and link bandwidth, with their sources.

The numbers are in specs.toml (GPUs) and cpu_specs.toml (CPUs), which are validated when they are loaded. A device has a data
sheet only if its name, architecture, compute units and memory all agree with an entry; else its peaks are None, with a reason.
"""

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hyperion.errors import HyperionError
from hyperion.hardware.device import PATHS, Device
from hyperion.hardware.schema import Cell, CpuRules, DeviceEntry, SchemaFault, SpecificationFile, build

SPECS_FILE = Path(__file__).with_name("specs.toml")
CPU_SPECS_FILE = Path(__file__).with_name("cpu_specs.toml")
Form = TypeVar("Form")
MEMORY_TOLERANCE = 0.06  # drivers and ECC reserve a few percent of the memory


class SpecificationError(HyperionError):
    """An invalid specification file."""


@dataclass(frozen=True)
class Peak:
    """One peak in TFLOPS (TOPS for int8), dense.

    Args:
        derived_tflops: units x operations x clock, at the clock of the published value (of a CPU at the nominal clock).
        limit_tflops: the same at the maximum clock.
        reason: why `limit_tflops` is None.
        note: a remark on the number.
    """

    path: str
    published_tflops: float | None = None
    derived_tflops: float | None = None
    limit_tflops: float | None = None
    formula: str | None = None
    source: str | None = None
    date: str | None = None
    reason: str | None = None
    note: str | None = None

    @property
    def nominal_tflops(self) -> float | None:
        """The estimate for predictions: the published value, else the derived one. It is not a limit."""
        return self.published_tflops if self.published_tflops is not None else self.derived_tflops

    @property
    def limit_source(self) -> str | None:
        """The source of the limit for a result row: 'fp16: 132 x 4096 ops/clock x 1980 MHz; <document>'."""
        return None if self.limit_tflops is None else f"{self.path}: {self.formula}; {self.source}"


@dataclass(frozen=True)
class Specification:
    """The data sheet of one device. Bandwidths in GB/s (1e9 bytes); link_gb_s is one direction.

    Args:
        memory_bandwidth_gb_s: the published value.
        memory_bandwidth_limit_gb_s: the larger of the published value and bus width x rate.
        memory_bandwidth_source: source of the bandwidth, or the reason why it is unknown.
        link: the links and their other ends, or the reason why `link_gb_s` is unknown.
        link_per_peer_gb_s: the share of one peer; None if one peer can use all of it.
        link_to_one_peer: `link_gb_s` is the bandwidth to one peer.
    """

    name: str
    peaks: dict[str, Peak]
    memory_bandwidth_gb_s: float | None
    memory_bandwidth_limit_gb_s: float | None
    memory_bandwidth_source: str
    link_gb_s: float | None
    link: str
    link_per_peer_gb_s: float | None = None
    link_to_one_peer: bool = False
    link_source: str = ""

    def link_limit_gb_s(self, ranks: int) -> tuple[float | None, str]:
        """Return (most GB/s that one of `ranks` devices of a host can send to the others, source), or (None, reason)."""
        if self.link_gb_s is None:
            return None, self.link
        if self.link_to_one_peer and ranks > 2:
            return None, f"pairs of devices have different numbers of links ({self.link_gb_s:g} GB/s: {self.link})"
        limit_gb_s = min(self.link_gb_s, (ranks - 1) * (self.link_per_peer_gb_s or self.link_gb_s))
        return limit_gb_s, f"{self.link}; {self.link_source}"

    def peak(self, path: str) -> Peak:
        """Return the peak of one of `device.PATHS`; if its limit is None, it has a reason.

        Raises:
            HyperionError: the path is unknown.
        """
        if path not in self.peaks:
            raise HyperionError(f"Unknown peak {path!r}.", next_step=f"Use one of {', '.join(PATHS)}.")
        return self.peaks[path]


def specification(device: Device) -> Specification | None:
    """Return the device's data sheet, or None for an unknown or altered device; `lookup` also returns the reason."""
    return lookup(device)[0]


def peak(device: Device, path: str) -> Peak:
    """Return the device's peak on this path; for an unknown device, an empty one with the reason."""
    sheet, reason = lookup(device)
    return Peak(path, reason=reason) if sheet is None else sheet.peak(path)


def lookup(device: Device) -> tuple[Specification | None, str]:
    """Return (data sheet, '') for a known device, else (None, reason)."""
    if device.kind == "cpu":
        return _cpu_specification(device, load_cpu_rules()), ""
    entries = load_specifications()
    named = [entry for entry in entries.device if _same_name(device.name, entry)]
    if not named:
        return None, f"no data sheet entry for {device.name!r} ({device.arch}) in {SPECS_FILE.name}"
    differences = []
    for entry in named:
        difference = _difference(device, entry)
        if difference is None:
            return _gpu_specification(device, entry, entries), ""
        differences.append(f"{entry.name}: {difference}")
    return None, f"{device.name!r} is partitioned or another model than its data sheet's: {'; '.join(differences)}"


def data_sheet_cache_bytes(name: str, arch: str) -> int | None:
    """Return the last-level cache of the data sheet (Infinity Cache included) in bytes, or None for an unknown name."""
    for entry in load_specifications().device:
        if entry.arch == arch and any(_plain(name) == _plain(match) for match in entry.matches):
            return int(entry.last_level_cache_mib * 2**20)
    return None


@functools.cache
def load_specifications(path: Path = SPECS_FILE) -> SpecificationFile:
    """Read and validate the GPU file.

    Raises:
        SpecificationError: names file, device and field.
    """
    return load_file(path, SpecificationFile)


@functools.cache
def load_cpu_rules(path: Path = CPU_SPECS_FILE) -> CpuRules:
    """Read and validate the CPU file.

    Raises:
        SpecificationError: names file and field.
    """
    return load_file(path, CpuRules)


def load_file(path: Path, form: type[Form]) -> Form:
    """Read a TOML file of this package as the dataclass `form`.

    Raises:
        SpecificationError: names file, entry and field.
    """
    try:
        return build(form, tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise SpecificationError(
            f"{path.name} is not valid TOML: {error}", where=path.name, next_step="correct the file at that line"
        ) from error
    except SchemaFault as fault:
        raise SpecificationError(
            f"{path.name}: {fault.what}",
            where=f"{path.name}, {fault.place or 'whole file'}",
            next_step=f"correct the field; the header of {path.name} explains every field",
        ) from fault


def _plain(name: str) -> str:
    return " ".join(name.replace("/", " / ").split()).casefold()


def _same_name(name: str, entry: DeviceEntry) -> bool:
    return any(_plain(name) == _plain(match) for match in entry.matches)


def _difference(device: Device, entry: DeviceEntry) -> str | None:
    """Return how the device differs from the entry of its name, or None if it does not."""
    if device.kind != entry.kind or device.arch != entry.arch:
        return f"architecture {device.arch}, expected {entry.arch}"
    if device.compute_units not in (entry.enumerated_units or [entry.compute_units]):
        return f"{device.compute_units} compute units, expected {entry.compute_units}"
    memory_gib = device.memory_bytes / 2**30
    if abs(memory_gib / entry.memory_gib - 1) > MEMORY_TOLERANCE:
        return f"{memory_gib:.1f} GiB of memory, expected {entry.memory_gib:g}"
    return None


def _gpu_specification(device: Device, entry: DeviceEntry, entries: SpecificationFile) -> Specification:
    memory = entry.memory
    memory_source = entries.sources[memory.source or entry.source]
    return Specification(
        name=entry.name,
        peaks={path: _gpu_peak(device, entry, path, cell, entries) for path, cell in entry.paths.items()},
        memory_bandwidth_gb_s=memory.bandwidth_gb_s,
        memory_bandwidth_limit_gb_s=max(memory.bandwidth_gb_s, memory.derived_gb_s),
        memory_bandwidth_source=f"{memory.bus_bits} bits x {memory.rate_gbps:g} Gbps / 8; {memory_source.cited}",
        link_gb_s=entry.link.gb_s,
        link=entry.link.to or entry.link.reason or "",
        link_per_peer_gb_s=entry.link.per_peer_gb_s,
        link_to_one_peer=entry.link.one_peer,
        link_source=entries.sources[entry.source].cited,
    )


def _gpu_peak(device: Device, entry: DeviceEntry, path: str, cell: Cell, entries: SpecificationFile) -> Peak:
    if cell.ops is None:
        return Peak(path, reason=cell.reason)
    source = entries.sources[cell.source or entry.source]
    # The driver may allow a higher clock than the data sheet (factory overclocks), and a limit must use the true maximum.
    clock_mhz = max((clock for clock in (entry.max_clock_mhz, device.max_clock_mhz) if clock), default=None)
    ops = cell.limit_ops or cell.ops
    return Peak(
        path=path,
        published_tflops=cell.published,
        derived_tflops=tera(entry.compute_units, cell.ops, cell.clock_mhz),
        limit_tflops=tera(entry.compute_units, ops, clock_mhz),
        formula=f"{entry.compute_units} x {ops} ops/clock x {clock_mhz:g} MHz" if clock_mhz else None,
        source=source.cited,
        date=source.date,
        reason=None if clock_mhz else entry.max_clock_reason,
        note=cell.note,
    )


def _cpu_specification(device: Device, rules: CpuRules) -> Specification:
    """Return a CPU's peaks: cores x operations per cycle of its instruction set x clock. The memory bandwidth is unknown."""
    return Specification(
        name=device.name,
        peaks={path: _cpu_peak(device, rules, path) for path in PATHS},
        memory_bandwidth_gb_s=None,
        memory_bandwidth_limit_gb_s=None,
        memory_bandwidth_source="unknown: the system does not tell how many memory channels of which speed are fitted",
        link_gb_s=None,
        link="a CPU has no GPU-to-GPU link",
    )


def _cpu_peak(device: Device, rules: CpuRules, path: str) -> Peak:
    rule = rules.best(path, device.isa, device.vendor, device.family)
    if rule is None:
        native = path in ("fp32_vector", "fp64_vector", "bf16", "fp16", "int8")
        why = f"no {path} instructions known for {device.arch} with {', '.join(device.isa) or 'no listed flags'}"
        return Peak(path, reason=why if native else f"a CPU has no {path} path")
    source, ops, clock_mhz = rules.sources[rule.source], rule.ops[path], device.max_clock_mhz
    return Peak(
        path=path,
        derived_tflops=tera(device.compute_units, ops, device.nominal_clock_mhz),
        limit_tflops=tera(device.compute_units, ops, clock_mhz),
        formula=f"{device.compute_units} cores x {ops} ops/cycle x {clock_mhz:g} MHz" if clock_mhz else None,
        source=source.cited,
        date=source.date,
        reason=None if clock_mhz else "the maximum CPU clock is not readable (no cpufreq, as in most virtual machines)",
        note=rule.note,
    )


def tera(units: int | None, ops_per_clock: int, clock_mhz: float | None) -> float | None:
    """Return units x operations per clock x MHz in tera-operations per second, or None if a factor is unknown."""
    return units * ops_per_clock * clock_mhz * 1e6 / 1e12 if units and clock_mhz else None


@dataclass(frozen=True)
class Ceilings:
    """The roofline of a device: its arithmetic and memory ceilings, from a data sheet or measured.

    Args:
        tflops: arithmetic ceiling in 10¹² FLOP/s.
        bandwidth_gb_s: memory ceiling in 10⁹ bytes/s; None if unknown.
        source: source of both.

    Source: Williams, Waterman, Patterson, Roofline: an insightful visual performance model, CACM 52 (2009) 65-76.
    """

    tflops: float
    bandwidth_gb_s: float | None
    source: str

    @property
    def ridge_flop_per_byte(self) -> float | None:
        """Arithmetic intensity in FLOP per byte above which work is bound by arithmetic; None without a bandwidth."""
        return self.tflops * 1e3 / self.bandwidth_gb_s if self.bandwidth_gb_s else None

    def least_time_s(self, flops: float, traffic_bytes: float) -> float:
        """Return the larger of arithmetic time and memory time in seconds; arithmetic time alone without a bandwidth."""
        arithmetic = flops / (self.tflops * 1e12)
        traffic = traffic_bytes / (self.bandwidth_gb_s * 1e9) if self.bandwidth_gb_s else 0.0
        return max(arithmetic, traffic)
