"""Schema of specs.toml and cpu_specs.toml, checked on load: every cell is complete or has a reason why it is empty."""

import dataclasses
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

from hyperion.hardware.device import PATHS

AGREEMENT = 0.01  # largest relative difference of published and derived value without a note


Form = TypeVar("Form")


class SchemaFault(ValueError):
    """An error in a table: what is wrong, and at which place in the file."""

    def __init__(self, what: str, place: str):
        super().__init__(what)
        self.what, self.place = what, place


@dataclass(frozen=True)
class Source:
    """A vendor's document. date: YYYY, YYYY-MM or YYYY-MM-DD."""

    publisher: str
    title: str
    url: str
    date: str

    def __post_init__(self):
        _require(self.publisher in ("AMD", "NVIDIA", "Intel"), "publisher must be the vendor: AMD, NVIDIA or Intel")
        _require(self.url.startswith("https://"), "url must start with https://")
        _require(re.fullmatch(r"20\d\d(-[01]\d(-[0-3]\d)?)?", self.date), "date must be YYYY, YYYY-MM or YYYY-MM-DD")

    @property
    def cited(self) -> str:
        """The document as a citation."""
        return f"{self.publisher}, {self.title} ({self.date}), {self.url}"


@dataclass(frozen=True)
class Cell:
    """One peak of one device. The header of specs.toml explains the fields."""

    ops: int | None = None
    limit_ops: int | None = None
    clock_mhz: float | None = None
    published: float | None = None
    source: str | None = None
    note: str | None = None
    reason: str | None = None

    def __post_init__(self):
        if self.ops is None:
            others = (self.limit_ops, self.clock_mhz, self.published, self.source, self.note)
            _require(self.reason, "a cell without ops needs a reason")
            _require(all(value is None for value in others), "a cell with a reason must have no other field")
            return
        _require(not self.reason, "a cell with ops may have a note, not a reason")
        _require(self.note or (self.clock_mhz and self.published), "without clock_mhz or published a note must say why")
        _require(self.limit_ops is None or self.limit_ops >= self.ops, "limit_ops must not be below ops")


@dataclass(frozen=True)
class Memory:
    """Device memory: published bandwidth, bus width, and rate per pin in Gbit/s."""

    bandwidth_gb_s: float
    bus_bits: int
    rate_gbps: float
    source: str | None = None
    note: str | None = None

    def __post_init__(self):
        agrees = abs(self.derived_gb_s / self.bandwidth_gb_s - 1) <= AGREEMENT
        derived = f"bus x rate gives {self.derived_gb_s:.0f} GB/s, not {self.bandwidth_gb_s:g}"
        _require(agrees or self.note, f"{derived}; correct it or add a note that says why")

    @property
    def derived_gb_s(self) -> float:
        """Bandwidth from bus width and rate, in GB/s."""
        return self.bus_bits * self.rate_gbps / 8


@dataclass(frozen=True)
class Link:
    """GPU-to-GPU bandwidth of all links in one direction, or the reason why it is unknown.

    Args:
        gb_s: bandwidth in GB/s.
        to: the links and their other ends.
        reason: why the bandwidth is unknown.
        per_peer_gb_s: the share of a single peer; None if one peer can use all of it (a switch).
        one_peer: `gb_s` is the bandwidth to one peer; other peers have other links.
    """

    gb_s: float | None = None
    to: str | None = None
    reason: str | None = None
    per_peer_gb_s: float | None = None
    one_peer: bool = False

    def __post_init__(self):
        known = self.gb_s is not None and self.to is not None and self.reason is None
        unknown = self.gb_s is None and self.to is None and self.reason is not None
        _require(known or unknown, "a link needs gb_s and to, or a reason")
        whole = self.gb_s or 0.0
        shared = self.per_peer_gb_s is None or known and not self.one_peer and self.per_peer_gb_s <= whole
        _require(
            shared and (known or not self.one_peer), "per_peer_gb_s must be a part of gb_s, and is not allowed with one_peer"
        )


@dataclass(frozen=True)
class DeviceEntry:
    """One device as PyTorch enumerates it.

    Args:
        enumerated_units: the numbers of units that PyTorch may report, if they differ from compute_units.
    """

    name: str
    kind: str
    arch: str
    matches: list[str]
    compute_units: int
    memory_gib: float
    last_level_cache_mib: float
    source: str
    memory: Memory
    link: Link
    paths: dict[str, Cell]
    enumerated_units: list[int] | None = None
    max_clock_mhz: float | None = None
    max_clock_reason: str | None = None

    def __post_init__(self):
        _require(self.kind in ("cuda", "rocm"), "kind must be cuda or rocm")
        counts = self.enumerated_units
        _require(counts is None or (counts and min(counts) > 0), "enumerated_units must be positive numbers, or be left out")
        _require(re.fullmatch(r"sm_\d+|gfx[0-9a-f]{3,5}", self.arch), "arch must look like sm_90 or gfx90a")
        _require(self.matches, "matches must list the names that PyTorch gives the device")
        _require(set(self.paths) == set(PATHS), f"paths must be exactly {', '.join(PATHS)}")
        one_clock = (self.max_clock_mhz is None) != (self.max_clock_reason is None)
        _require(one_clock, "exactly one of max_clock_mhz and max_clock_reason is needed")
        for path, cell in self.paths.items():
            self._check_value(path, cell)

    def _check_value(self, path: str, cell: Cell) -> None:
        if cell.clock_mhz and self.max_clock_mhz:
            _require(cell.clock_mhz <= self.max_clock_mhz, f"{path}: clock_mhz is above the device's max_clock_mhz")
        if cell.ops and cell.clock_mhz and cell.published:
            derived = self.compute_units * cell.ops * cell.clock_mhz / 1e6
            agrees = abs(derived / cell.published - 1) <= AGREEMENT
            _require(agrees, f"{path}: units x ops x clock gives {derived:.1f}, not {cell.published:g}")


@dataclass(frozen=True)
class SpecificationFile:
    """specs.toml."""

    sources: dict[str, Source]
    device: list[DeviceEntry]

    def __post_init__(self):
        names = [entry.name for entry in self.device]
        _require(names and len(set(names)) == len(names), "there must be devices, with different names")
        for entry in self.device:
            used = [entry.source, entry.memory.source, *(cell.source for cell in entry.paths.values())]
            unknown = sorted({name for name in used if name is not None} - self.sources.keys())
            _require(not unknown, f"{entry.name}: unknown source {', '.join(unknown)}")


@dataclass(frozen=True)
class CpuRule:
    """Operations per cycle of a core with all these flags, for one CPU family of a vendor or for any CPU."""

    flags: list[str]
    source: str
    note: str
    ops: dict[str, int]
    vendor: str | None = None
    family: int | None = None

    def __post_init__(self):
        _require(self.flags and self.ops and set(self.ops) <= set(PATHS), f"the keys of ops must be among {', '.join(PATHS)}")

    def applies(self, flags: set[str], vendor: str, family: int | None) -> bool:
        """Return True if the rule applies to a CPU with these flags, of this vendor and family."""
        own = self.vendor is None or (self.vendor == vendor and self.family == family)
        return own and flags.issuperset(self.flags)


@dataclass(frozen=True)
class CpuRules:
    """cpu_specs.toml."""

    sources: dict[str, Source]
    rule: list[CpuRule]

    def __post_init__(self):
        unknown = sorted({rule.source for rule in self.rule} - self.sources.keys())
        _require(not unknown, f"unknown source {', '.join(unknown)}")

    def best(self, path: str, flags: tuple[str, ...], vendor: str, family: int | None) -> CpuRule | None:
        """Return the rule for a path: rules of the CPU's family replace general ones, more operations win."""
        fitting = [rule for rule in self.rule if path in rule.ops and rule.applies(set(flags), vendor, family)]
        own = {frozenset(rule.flags) for rule in fitting if rule.vendor}
        fitting = [rule for rule in fitting if rule.vendor or frozenset(rule.flags) not in own]
        return max(fitting, key=lambda rule: rule.ops[path], default=None)


@typing.overload
def build(form: type[Form], value: object, place: str = "") -> Form: ...
@typing.overload
def build(form: Any, value: object, place: str = "") -> Any: ...
def build(form: Any, value: Any, place: str = "") -> Any:
    """Return `value`, as `tomllib` returned it, as `form`.

    Args:
        form: a dataclass, list, dict, bool, int, float or str, or one of these | None.
        place: place of the value in the file, for the error.

    Raises:
        SchemaFault: the first error: a field that is unknown, missing or of another type, a number that is not above 0, or an
            empty text.
    """
    if isinstance(form, types.UnionType):
        return build(typing.get_args(form)[0], value, place)
    if typing.get_origin(form) is list:
        _expect(isinstance(value, list), "must be a list", place)
        return [build(typing.get_args(form)[0], item, f"{place} {_label(item, i)}") for i, item in enumerate(value)]
    if typing.get_origin(form) is dict:
        _expect(isinstance(value, dict), "must be a table", place)
        return {key: build(typing.get_args(form)[1], item, f"{place}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(form):
        return _build_table(form, value, place)
    if form is str:
        _expect(isinstance(value, str) and value.strip(), "must be a text that is not empty", place)
        return value
    if form is bool:
        _expect(isinstance(value, bool), "must be true or false", place)
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
    fits = number and (form is float or isinstance(value, int))
    _expect(fits, f"must be {form.__name__} above 0, not {value!r}", place)
    return form(value)


def _build_table(form: Any, value: Any, place: str) -> Any:
    _expect(isinstance(value, dict), "must be a table", place)
    fields = {field.name: field for field in dataclasses.fields(form)}
    hints = typing.get_type_hints(form)
    unknown = sorted(value.keys() - fields.keys())
    _expect(not unknown, f"unknown field {', '.join(unknown)}", place)
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in value]
    _expect(not missing, f"missing field {', '.join(missing)}", place)
    built = {name: build(hints[name], item, f"{place}.{name}".lstrip(".")) for name, item in value.items()}
    try:
        return form(**built)
    except SchemaFault as fault:
        raise SchemaFault(fault.what, place) from None


def _label(item: object, index: int) -> str | int:
    return item["name"] if isinstance(item, dict) and isinstance(item.get("name"), str) else index


def _expect(holds, what: str, place: str) -> None:
    if not holds:
        raise SchemaFault(what, place)


def _require(holds, what: str) -> None:
    _expect(holds, what, "")
