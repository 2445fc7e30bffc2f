"""Data sheets: peak rates, memory bandwidth and link bandwidth of devices, with their sources.

A peak rate is units x operations per clock x clock. The numbers are in specs.toml (GPUs) and cpu_specs.toml (CPUs), which are
validated when they are loaded. A GPU has a data sheet only if its name, architecture, compute units and memory all match an
entry. Otherwise its peaks are None, with a reason.
"""

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, StringConstraints

from hyperion.errors import HyperionError
from hyperion.forms import FieldError, read_form
from hyperion.hardware.device import PATHS, Device
from hyperion.units import GIB

SPECS_FILE = Path(__file__).with_name("specs.toml")
CPU_SPECS_FILE = Path(__file__).with_name("cpu_specs.toml")
AGREEMENT = 0.01  # if the published and the derived value differ by more than this share, the entry needs a note
MEMORY_TOLERANCE = 0.06  # drivers and ECC reserve a few percent of the memory
Form = TypeVar("Form")
# Types of fields in the specification files.
Count = Annotated[int, Field(gt=0)]
Quantity = Annotated[float, Field(gt=0)]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class SpecificationError(HyperionError):
    """Raised if a specification file is invalid."""


@dataclass(frozen=True)
class Peak:
    """One peak rate in TFLOPS (TOPS for int8), without sparsity.

    Args:
        path: name of the peak, one of `device.PATHS`.
        published_tflops: the value that the vendor publishes.
        derived_tflops: units x operations per clock x clock. For a GPU, the clock is the one to which the published value refers.
            For a CPU, it is the nominal clock.
        limit_tflops: units x operations per clock x maximum clock.
        formula: the factors of `limit_tflops` as text.
        source, date: the vendor's document and its date.
        reason: why `limit_tflops` is None.
        note: a remark about the numbers.
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
        """The rate for predictions: the published value, or else the derived value. It is not a limit."""
        return self.published_tflops if self.published_tflops is not None else self.derived_tflops

    @property
    def limit_source(self) -> str | None:
        """The source of the limit for a result row: 'fp16: 132 x 4096 ops/clock x 1980 MHz; <document>'."""
        return None if self.limit_tflops is None else f"{self.path}: {self.formula}; {self.source}"


@dataclass(frozen=True)
class Specification:
    """The data sheet of one device. Bandwidths are in GB/s (1e9 bytes per second).

    Args:
        name: name of the device.
        peaks: a dict that maps a name in `device.PATHS` to the peak rate.
        memory_bandwidth_gb_s: the published bandwidth of the memory.
        memory_bandwidth_limit_gb_s: the larger of the published bandwidth and bus width x rate.
        memory_bandwidth_source: source of the bandwidth, or the reason why it is unknown.
        link_gb_s: bandwidth of the links to other devices in one direction.
        link: the links and the devices that they connect to, or the reason why `link_gb_s` is unknown.
        link_per_peer_gb_s: the part of `link_gb_s` that one peer can use. None if one peer can use all of it.
        link_to_one_peer: if True, `link_gb_s` is the bandwidth to a single peer.
        link_source: the vendor's document.
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
        """Return the bandwidth in GB/s with which one device can send data to the other `ranks` - 1 devices of a host.

        Returns:
            (bandwidth, source), or (None, reason why the bandwidth is unknown).
        """
        if self.link_gb_s is None:
            return None, self.link
        if self.link_to_one_peer and ranks > 2:
            return None, f"pairs of devices have different numbers of links ({self.link_gb_s:g} GB/s: {self.link})"
        limit_gb_s = min(self.link_gb_s, (ranks - 1) * (self.link_per_peer_gb_s or self.link_gb_s))
        return limit_gb_s, f"{self.link}; {self.link_source}"

    def peak(self, path: str) -> Peak:
        """Return one peak. If its limit is None, its `reason` says why.

        Args:
            path: one of `device.PATHS`.

        Raises:
            HyperionError: `path` is unknown.
        """
        if path not in self.peaks:
            raise HyperionError(f"Unknown peak {path!r}.", next_step=f"Use one of {', '.join(PATHS)}.")
        return self.peaks[path]


@dataclass(frozen=True)
class Source:
    """A vendor's document. Its date is YYYY, YYYY-MM or YYYY-MM-DD."""

    publisher: Literal["AMD", "NVIDIA", "Intel"]
    title: Text
    url: Annotated[str, Field(pattern="^https://")]
    date: Annotated[str, Field(pattern=r"^20\d\d(-[01]\d(-[0-3]\d)?)?$")]

    @property
    def cited(self) -> str:
        """The document as a citation."""
        return f"{self.publisher}, {self.title} ({self.date}), {self.url}"


@dataclass(frozen=True)
class PeakEntry:
    """One peak of one device, or the reason why the device has no such peak. The header of specs.toml explains the fields."""

    ops: Count | None = None
    limit_ops: Count | None = None
    clock_mhz: Quantity | None = None
    published: Quantity | None = None
    source: Text | None = None
    note: Text | None = None
    reason: Text | None = None

    def __post_init__(self):
        if self.ops is None:
            others = (self.limit_ops, self.clock_mhz, self.published, self.source, self.note)
            require(self.reason, "a peak without ops needs a reason")
            require(all(value is None for value in others), "a peak with a reason must have no other field")
            return
        require(not self.reason, "a peak with ops may have a note, but not a reason")
        require(self.note or (self.clock_mhz and self.published), "without clock_mhz or published a note must say why")
        require(self.limit_ops is None or self.limit_ops >= self.ops, "limit_ops must not be below ops")


@dataclass(frozen=True)
class MemoryEntry:
    """Device memory: published bandwidth, bus width in bits, and rate per pin in Gbit/s."""

    bandwidth_gb_s: Quantity
    bus_bits: Count
    rate_gbps: Quantity
    source: Text | None = None
    note: Text | None = None

    def __post_init__(self):
        agrees = abs(self.derived_gb_s / self.bandwidth_gb_s - 1) <= AGREEMENT
        derived = f"bus x rate gives {self.derived_gb_s:.0f} GB/s, not {self.bandwidth_gb_s:g}"
        require(agrees or self.note, f"{derived}; correct it or add a note that says why")

    @property
    def derived_gb_s(self) -> float:
        """Bandwidth from bus width and rate, in GB/s."""
        # Gbit/s per pin x number of pins, divided by 8 bits per byte.
        return self.bus_bits * self.rate_gbps / 8


@dataclass(frozen=True)
class LinkEntry:
    """GPU-to-GPU bandwidth of all links in one direction, or the reason why it is unknown.

    Args:
        gb_s: bandwidth in GB/s.
        to: the links and the devices that they connect to.
        reason: why the bandwidth is unknown.
        per_peer_gb_s: the part of the bandwidth that a single peer can use. None if one peer can use all of it, as with a switch.
        one_peer: if True, `gb_s` is the bandwidth to a single peer, and other peers may have another number of links.
    """

    gb_s: Quantity | None = None
    to: Text | None = None
    reason: Text | None = None
    per_peer_gb_s: Quantity | None = None
    one_peer: bool = False

    def __post_init__(self):
        known = self.gb_s is not None and self.to is not None and self.reason is None
        unknown = self.gb_s is None and self.to is None and self.reason is not None
        require(known or unknown, "a link needs gb_s and to, or a reason")
        whole = self.gb_s or 0.0
        shared = self.per_peer_gb_s is None or known and not self.one_peer and self.per_peer_gb_s <= whole
        require(shared and (known or not self.one_peer), "per_peer_gb_s must be a part of gb_s, and is not allowed with one_peer")


@dataclass(frozen=True)
class DeviceEntry:
    """One device as PyTorch enumerates it.

    Args:
        matches: the names that PyTorch gives the device.
        enumerated_units: the numbers of units that PyTorch may report, if these numbers differ from compute_units.
    """

    name: Text
    kind: Literal["cuda", "rocm"]
    arch: Annotated[str, Field(pattern=r"^(sm_\d+|gfx[0-9a-f]{3,5})$")]
    matches: Annotated[list[Text], Field(min_length=1)]
    compute_units: Count
    memory_gib: Quantity
    last_level_cache_mib: Quantity
    source: Text
    memory: MemoryEntry
    link: LinkEntry
    paths: dict[str, PeakEntry]
    enumerated_units: Annotated[list[Count], Field(min_length=1)] | None = None
    max_clock_mhz: Quantity | None = None
    max_clock_reason: Text | None = None

    def __post_init__(self):
        require(set(self.paths) == set(PATHS), f"paths must be exactly {', '.join(PATHS)}")
        one_clock = (self.max_clock_mhz is None) != (self.max_clock_reason is None)
        require(one_clock, "exactly one of max_clock_mhz and max_clock_reason is needed")
        for path, entry in self.paths.items():
            if entry.clock_mhz and self.max_clock_mhz:
                require(entry.clock_mhz <= self.max_clock_mhz, f"{path}: clock_mhz is above the device's max_clock_mhz")
            derived = tera(self.compute_units, entry.ops or 0, entry.clock_mhz)
            if derived and entry.published:
                agrees = abs(derived / entry.published - 1) <= AGREEMENT
                require(agrees, f"{path}: units x ops x clock gives {derived:.1f}, not {entry.published:g}")


@dataclass(frozen=True)
class SpecificationFile:
    """The content of specs.toml."""

    sources: dict[str, Source]
    device: Annotated[list[DeviceEntry], Field(min_length=1)]

    def __post_init__(self):
        require(len({entry.name for entry in self.device}) == len(self.device), "two devices have the same name")
        for entry in self.device:
            used = [entry.source, entry.memory.source, *(peak.source for peak in entry.paths.values())]
            unknown = sorted({name for name in used if name is not None} - self.sources.keys())
            require(not unknown, f"{entry.name}: unknown source {', '.join(unknown)}")


@dataclass(frozen=True)
class CpuRule:
    """Operations per cycle of one core, for CPUs that have all instruction-set flags in `flags`.

    If `vendor` and `family` are given, the rule applies only to CPUs of this vendor and family.
    """

    flags: Annotated[list[Text], Field(min_length=1)]
    source: Text
    note: Text
    ops: Annotated[dict[str, Count], Field(min_length=1)]
    vendor: Text | None = None
    family: Count | None = None

    def __post_init__(self):
        require(set(self.ops) <= set(PATHS), f"the keys of ops must be among {', '.join(PATHS)}")

    def applies(self, flags: set[str], vendor: str, family: int | None) -> bool:
        """Return True if the rule applies to a CPU with these flags, of this vendor and family."""
        own = self.vendor is None or (self.vendor == vendor and self.family == family)
        return own and flags.issuperset(self.flags)


@dataclass(frozen=True)
class CpuRules:
    """The content of cpu_specs.toml."""

    sources: dict[str, Source]
    rule: list[CpuRule]

    def __post_init__(self):
        unknown = sorted({rule.source for rule in self.rule} - self.sources.keys())
        require(not unknown, f"unknown source {', '.join(unknown)}")

    def best(self, path: str, flags: tuple[str, ...], vendor: str, family: int | None) -> CpuRule | None:
        """Return the rule that gives the peak operations per cycle of `path` on a CPU, or None if no rule applies.

        A rule applies if the CPU has all instruction-set flags that the rule names. If two rules name the same flags, a rule for
        the family of this CPU replaces the rule for all CPUs. If several rules remain, the one with the most operations per cycle
        is returned.
        """
        fitting = [rule for rule in self.rule if path in rule.ops and rule.applies(set(flags), vendor, family)]
        # A rule for one family replaces the general rule with the same flags, even if the general rule has more operations per
        # cycle than the specific one.
        own = {frozenset(rule.flags) for rule in fitting if rule.vendor}
        fitting = [rule for rule in fitting if rule.vendor or frozenset(rule.flags) not in own]
        return max(fitting, key=lambda rule: rule.ops[path], default=None)


def specification(device: Device) -> Specification | None:
    """Return the data sheet of a device, or None if no data sheet matches it. `lookup` also returns the reason."""
    return lookup(device)[0]


def peak(device: Device, path: str) -> Peak:
    """Return one peak of a device. For an unknown device, the peak has no values, and its `reason` says why."""
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
    """Return the size of the last-level cache in the data sheet in bytes, or None for an unknown name.

    An Infinity Cache counts as the last-level cache.
    """
    for entry in load_specifications().device:
        if entry.arch == arch and any(_plain(name) == _plain(match) for match in entry.matches):
            return int(entry.last_level_cache_mib * 2**20)
    return None


@functools.cache
def load_specifications(path: Path = SPECS_FILE) -> SpecificationFile:
    """Read and validate specs.toml.

    Raises:
        SpecificationError: the file is invalid. The message names the file, the device and the field.
    """
    return load_file(path, SpecificationFile)


@functools.cache
def load_cpu_rules(path: Path = CPU_SPECS_FILE) -> CpuRules:
    """Read and validate cpu_specs.toml.

    Raises:
        SpecificationError: the file is invalid. The message names the file and the field.
    """
    return load_file(path, CpuRules)


def load_file(path: Path, form: type[Form]) -> Form:
    """Read a TOML file of this package and return it as an instance of the dataclass `form`.

    Raises:
        SpecificationError: the file is invalid. The message names the file, the entry and the field.
    """
    try:
        return read_form(form, tomllib.loads(path.read_text(encoding="utf-8")), path.name)
    except tomllib.TOMLDecodeError as error:
        raise SpecificationError(
            f"{path.name} is not valid TOML: {error}", where=path.name, next_step="correct the line that this message names"
        ) from error
    except FieldError as error:
        remedy = f"correct the field; the header of {path.name} explains every field"
        raise SpecificationError(error.what, where=path.name, next_step=remedy) from error


def _plain(name: str) -> str:
    return " ".join(name.replace("/", " / ").split()).casefold()


def _same_name(name: str, entry: DeviceEntry) -> bool:
    return any(_plain(name) == _plain(match) for match in entry.matches)


def _difference(device: Device, entry: DeviceEntry) -> str | None:
    """Describe how a device differs from the data-sheet entry with its name. Return None if they agree."""
    if device.kind != entry.kind or device.arch != entry.arch:
        return f"architecture {device.arch}, expected {entry.arch}"
    if device.compute_units not in (entry.enumerated_units or [entry.compute_units]):
        return f"{device.compute_units} compute units, expected {entry.compute_units}"
    memory_gib = device.memory_bytes / GIB
    if abs(memory_gib / entry.memory_gib - 1) > MEMORY_TOLERANCE:
        return f"{memory_gib:.1f} GiB of memory, expected {entry.memory_gib:g}"
    return None


def _gpu_specification(device: Device, entry: DeviceEntry, entries: SpecificationFile) -> Specification:
    memory = entry.memory
    memory_source = entries.sources[memory.source or entry.source]
    return Specification(
        name=entry.name,
        peaks={path: _gpu_peak(device, entry, path, entries) for path in PATHS},
        memory_bandwidth_gb_s=memory.bandwidth_gb_s,
        # The two values can differ by rounding. The limit is the larger one, so that no correct measurement exceeds it.
        memory_bandwidth_limit_gb_s=max(memory.bandwidth_gb_s, memory.derived_gb_s),
        memory_bandwidth_source=f"{memory.bus_bits} bits x {memory.rate_gbps:g} Gbps / 8; {memory_source.cited}",
        link_gb_s=entry.link.gb_s,
        link=entry.link.to or entry.link.reason or "",
        link_per_peer_gb_s=entry.link.per_peer_gb_s,
        link_to_one_peer=entry.link.one_peer,
        link_source=entries.sources[entry.source].cited,
    )


def _gpu_peak(device: Device, entry: DeviceEntry, path: str, entries: SpecificationFile) -> Peak:
    stated = entry.paths[path]
    if stated.ops is None:
        return Peak(path, reason=stated.reason)
    source = entries.sources[stated.source or entry.source]
    # The driver may allow a higher clock than the data sheet, for example on overclocked cards. A limit needs the true maximum.
    clock_mhz = max((clock for clock in (entry.max_clock_mhz, device.max_clock_mhz) if clock), default=None)
    ops = stated.limit_ops or stated.ops
    return Peak(
        path=path,
        published_tflops=stated.published,
        derived_tflops=tera(entry.compute_units, stated.ops, stated.clock_mhz),
        limit_tflops=tera(entry.compute_units, ops, clock_mhz),
        formula=f"{entry.compute_units} x {ops} ops/clock x {clock_mhz:g} MHz" if clock_mhz else None,
        source=source.cited,
        date=source.date,
        reason=None if clock_mhz else entry.max_clock_reason,
        note=stated.note,
    )


def _cpu_specification(device: Device, rules: CpuRules) -> Specification:
    """Return the data sheet of a CPU. A peak is cores x operations per cycle x clock. The memory bandwidth is unknown."""
    return Specification(
        name=device.name,
        peaks={path: _cpu_peak(device, rules, path) for path in PATHS},
        memory_bandwidth_gb_s=None,
        memory_bandwidth_limit_gb_s=None,
        memory_bandwidth_source="unknown: the system does not report the number and speed of the memory channels",
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


def require(holds: object, what: str) -> None:
    """Raise a ValueError with the message `what` if `holds` is false. `read_form` adds the place of the entry to the message."""
    if not holds:
        raise ValueError(what)


def tera(units: int | None, ops_per_clock: int, clock_mhz: float | None) -> float | None:
    """Return units x operations per clock x MHz in tera-operations per second, or None if a factor is unknown."""
    return units * ops_per_clock * clock_mhz * 1e6 / 1e12 if units and clock_mhz else None


@dataclass(frozen=True)
class Ceilings:
    """The roofline of a device: its arithmetic ceiling and its memory ceiling, from a data sheet or from measurements.

    Args:
        tflops: arithmetic ceiling in 10¹² FLOP/s.
        bandwidth_gb_s: memory ceiling in 10⁹ bytes/s. None if it is unknown.
        source: source of both ceilings.

    Source: Williams, Waterman, Patterson, Roofline: an insightful visual performance model, CACM 52 (2009) 65-76.
    """

    tflops: float
    bandwidth_gb_s: float | None
    source: str

    @property
    def ridge_flop_per_byte(self) -> float | None:
        """Arithmetic intensity in FLOP per byte above which an operation is compute-bound. None if the bandwidth is unknown."""
        # 10¹² FLOP/s divided by 10⁹ bytes/s is 10³ FLOP per byte.
        return self.tflops * 1e3 / self.bandwidth_gb_s if self.bandwidth_gb_s else None
