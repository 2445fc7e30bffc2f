"""The form of specs.toml and cpu_specs.toml, checked on load: every cell is complete or says why it is empty."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hyperion.hardware.precision import PATHS

AGREEMENT = 0.01  # published and derived value of a cell agree within this, or a note says why not
Positive = Annotated[float, Field(gt=0)]
PositiveInt = Annotated[int, Field(gt=0, strict=True)]
Text = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(_Strict):
    """A vendor's document. date: YYYY, YYYY-MM or YYYY-MM-DD."""

    publisher: Literal["AMD", "NVIDIA", "Intel"]
    title: Text
    url: Annotated[str, Field(pattern=r"^https://")]
    date: Annotated[str, Field(pattern=r"^20\d\d(-[01]\d(-[0-3]\d)?)?$")]

    @property
    def cited(self) -> str:
        return f"{self.publisher}, {self.title} ({self.date}), {self.url}"


class Cell(_Strict):
    """One peak of one device; the header of specs.toml explains the fields."""

    ops: PositiveInt | None = None
    limit_ops: PositiveInt | None = None
    clock_mhz: Positive | None = None
    published: Positive | None = None
    source: str | None = None
    note: Text | None = None
    reason: Text | None = None

    @model_validator(mode="after")
    def _complete(self):
        if self.ops is None:
            if not self.reason:
                raise ValueError("a cell without ops needs a reason")
            if self.model_dump(exclude_none=True).keys() != {"reason"}:
                raise ValueError("a cell with a reason and no ops takes no other field")
            return self
        if self.reason:
            raise ValueError("a cell with ops takes a note, not a reason")
        if (self.clock_mhz is None or self.published is None) and not self.note:
            raise ValueError("a cell without clock_mhz or published needs a note that says why")
        if self.limit_ops is not None and self.limit_ops < self.ops:
            raise ValueError("limit_ops must not be below ops")
        return self


class Memory(_Strict):
    """Device memory: published bandwidth beside bus width and rate per pin."""

    bandwidth_gb_s: Positive
    bus_bits: PositiveInt
    rate_gbps: Positive
    source: str | None = None
    note: Text | None = None

    @property
    def derived_gb_s(self) -> float:
        return self.bus_bits * self.rate_gbps / 8

    @model_validator(mode="after")
    def _agrees(self):
        if abs(self.derived_gb_s / self.bandwidth_gb_s - 1) > AGREEMENT and not self.note:
            derived = f"bus x rate gives {self.derived_gb_s:.0f} GB/s"
            raise ValueError(f"{derived}, not {self.bandwidth_gb_s:g}; correct it or add a note that says why")
        return self


class Link(_Strict):
    """GPU-to-GPU bandwidth in one direction and to whom, or the reason it is unknown."""

    gb_s: Positive | None = None
    to: Text | None = None
    reason: Text | None = None

    @model_validator(mode="after")
    def _complete(self):
        if (self.gb_s is None) == (self.reason is None) or (self.gb_s is None) != (self.to is None):
            raise ValueError("a link has gb_s and to, or a reason")
        return self


class DeviceEntry(_Strict):
    """One device as PyTorch enumerates it. enumerated_units: what PyTorch may count when it is not compute_units."""

    name: Text
    kind: Literal["cuda", "rocm"]
    arch: Annotated[str, Field(pattern=r"^(sm_\d+|gfx[0-9a-f]{3,5})$")]
    matches: Annotated[list[Text], Field(min_length=1)]
    compute_units: PositiveInt
    enumerated_units: list[PositiveInt] | None = None
    memory_gib: Positive
    max_clock_mhz: Positive | None = None
    max_clock_reason: Text | None = None
    last_level_cache_mib: Positive
    source: str
    memory: Memory
    link: Link
    paths: dict[Literal[PATHS], Cell]

    @model_validator(mode="after")
    def _complete(self):
        missing = set(PATHS) - set(self.paths)
        if missing:
            raise ValueError(f"paths missing: {', '.join(sorted(missing))}")
        if (self.max_clock_mhz is None) == (self.max_clock_reason is None):
            raise ValueError("exactly one of max_clock_mhz and max_clock_reason is needed")
        for path, cell in self.paths.items():
            if cell.clock_mhz and self.max_clock_mhz and cell.clock_mhz > self.max_clock_mhz:
                raise ValueError(f"{path}: clock_mhz is above the device's max_clock_mhz")
            if cell.clock_mhz and cell.published:
                derived = self.compute_units * cell.ops * cell.clock_mhz / 1e6
                if abs(derived / cell.published - 1) > AGREEMENT:
                    raise ValueError(f"{path}: units x ops x clock gives {derived:.1f}, not {cell.published:g}")
        return self


class SpecificationFile(_Strict):
    """specs.toml."""

    sources: dict[str, Source]
    device: Annotated[list[DeviceEntry], Field(min_length=1)]

    @model_validator(mode="after")
    def _sources_exist(self):
        for entry in self.device:
            used = [entry.source, entry.memory.source, *(cell.source for cell in entry.paths.values())]
            unknown = {name for name in used if name is not None} - self.sources.keys()
            if unknown:
                raise ValueError(f"{entry.name}: unknown source {', '.join(sorted(unknown))}")
        names = [entry.name for entry in self.device]
        if len(set(names)) != len(names):
            raise ValueError("two devices have the same name")
        return self


class CpuRule(_Strict):
    """Operations per cycle of a core that has all these flags, for a vendor's family or for any CPU."""

    flags: Annotated[list[Text], Field(min_length=1)]
    vendor: str | None = None
    family: int | None = None
    source: str
    note: Text
    ops: dict[Literal[PATHS], PositiveInt]

    def holds(self, flags: set[str], vendor: str, family: int | None) -> bool:
        own = self.vendor is None or (self.vendor == vendor and self.family == family)
        return own and flags.issuperset(self.flags)


class CpuRules(_Strict):
    """cpu_specs.toml."""

    sources: dict[str, Source]
    rule: list[CpuRule]

    def best(self, path: str, flags: tuple[str, ...], vendor: str, family: int | None) -> CpuRule | None:
        """The rule for a path: the CPU's own family's before the general ones, then the one with most operations."""
        fitting = [rule for rule in self.rule if path in rule.ops and rule.holds(set(flags), vendor, family)]
        own = {frozenset(rule.flags) for rule in fitting if rule.vendor}
        fitting = [rule for rule in fitting if rule.vendor or frozenset(rule.flags) not in own]
        return max(fitting, key=lambda rule: rule.ops[path], default=None)
