"""Floors: the smallest values that a healthy device must reach.

Most floors come from vendors' acceptance tests. For quantities without such a floor, we choose a share of the value in the data
sheet as the bound, and label it "sanity bound, ours". The numbers are in floors.toml, which is validated when it is loaded. Each
vendor's floor cites its source. If the source has a misprint, the field `conditions` explains how we read it.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hyperion.hardware.device import DTYPES, Device, gemm_path
from hyperion.hardware.specs import Count, Quantity, Source, Specification, Text, load_file, load_specifications, lookup, require

FLOORS_FILE = Path(__file__).with_name("floors.toml")
STREAMS = ("copy", "scale", "add", "triad", "dot")
# The metric of result rows for each quantity, and the unit of each metric.
METRICS = dict.fromkeys(STREAMS, "bandwidth_gb_s") | {"gemm": "gemm_tflops", "all_reduce": "busbw_gb_s"}
_UNITS = {"bandwidth_gb_s": "GB/s", "gemm_tflops": "TFLOPS", "busbw_gb_s": "GB/s"}
OURS = "sanity bound, ours"


@dataclass(frozen=True)
class FloorEntry:
    """A floor (smallest value of a healthy device) that a vendor publishes, as a [[floor]] table of floors.toml.

    The header of the file explains the fields.
    """

    devices: Annotated[list[Text], Field(min_length=1)]
    arch: Text
    quantity: Text
    dtype: Text
    size: Count
    value: Quantity
    unit: Text
    conditions: Text
    source: Text
    ranks: Count | None = None

    def __post_init__(self):
        _check_quantity(self.quantity, self.dtype)
        unit = _UNITS[METRICS[self.quantity]]
        require(self.unit == unit, f"{self.quantity} is measured in {unit}, not in {self.unit}")
        collective = self.quantity == "all_reduce"
        require((self.ranks is not None) == collective, "ranks is needed for all_reduce and not allowed otherwise")


@dataclass(frozen=True)
class SanityEntry:
    """A floor (smallest value of a healthy device) that we chose, as a [[sanity]] table of floors.toml.

    The floor is a share of a value in the data sheet.
    """

    quantity: Text
    dtype: Text
    size: Count
    share: Annotated[float, Field(gt=0, lt=1)]
    of: Literal["memory bandwidth", "peak", "link"]
    conditions: Text

    def __post_init__(self):
        _check_quantity(self.quantity, self.dtype)


@dataclass(frozen=True)
class FloorFile:
    """The content of floors.toml."""

    sources: dict[str, Source]
    floor: list[FloorEntry]
    sanity: list[SanityEntry]

    def __post_init__(self):
        known = {entry.name: entry for entry in load_specifications().device}
        seen = set()
        for entry in self.floor:
            require(entry.source in self.sources, f"{entry.quantity}: unknown source {entry.source}")
            for name in entry.devices:
                require(name in known, f"{entry.quantity}: {name!r} is not in specs.toml")
                require(known[name].arch == entry.arch, f"{name}: architecture {known[name].arch}, not {entry.arch}")
                key = (name, entry.quantity, entry.dtype, entry.size, entry.ranks)
                require(key not in seen, f"{name}: two floors for {entry.quantity}")
                seen.add(key)


@dataclass(frozen=True)
class Floor:
    """One floor of one device: the smallest value that a healthy device must reach.

    Args:
        quantity, dtype, size: the operation to measure, its number format and its size. The header of floors.toml explains the
            values.
        value, unit: the smallest value that a healthy device must reach.
        conditions: the conditions under which the source measures the value.
        source: the vendor's document, or "sanity bound, ours: <share> of <data sheet value>".
        date: date of the document, or "" for our own bound.
        ranks: number of ranks of an all-reduce; None for other quantities.
    """

    quantity: str
    dtype: str
    size: int
    value: float
    unit: str
    conditions: str
    source: str
    date: str = ""
    ranks: int | None = None

    @property
    def metric(self) -> str:
        """The metric of the result rows that are compared with this floor."""
        return METRICS[self.quantity]

    @property
    def ours(self) -> bool:
        """True if we chose the floor ourselves, False if a vendor publishes it."""
        return self.source.startswith(OURS)


def floors_for(device: Device, devices: int = 1) -> tuple[list[Floor], str]:
    """Return the floors of a device, or the reason why no floor is known.

    Args:
        device: the device.
        devices: number of devices of this kind in the host. With one device there is no floor for an all-reduce.

    Returns:
        (floors in the order of floors.toml, ''), or ([], reason why no floor is known).
    """
    if device.kind == "cpu":
        return (
            [],
            f"no floor is known for {device.name}: CPU vendors publish neither floors nor the memory bandwidth of a machine",
        )
    sheet, reason = lookup(device)
    if sheet is None:
        return [], f"no floor is known for {device.name}: {reason}"
    file = load_floors()
    floors = [_published(entry, file) for entry in file.floor if sheet.name in entry.devices]
    # A vendor's floor replaces our own bound for the same quantity, in any format and size. For GEMMs the format must be equal.
    covered = {floor.quantity if floor.quantity != "gemm" else (floor.quantity, floor.dtype) for floor in floors}
    for entry in file.sanity:
        name = entry.quantity if entry.quantity != "gemm" else (entry.quantity, entry.dtype)
        bound = None if name in covered else _sanity(entry, device, sheet, devices)
        floors += [bound] if bound else []
    return floors, ""


@functools.cache
def load_floors(path: Path = FLOORS_FILE) -> FloorFile:
    """Read and validate the file.

    Raises:
        SpecificationError: the file is invalid. The message names the file, the entry and the field.
    """
    return load_file(path, FloorFile)


def _published(entry: FloorEntry, file: FloorFile) -> Floor:
    source = file.sources[entry.source]
    return Floor(
        entry.quantity, entry.dtype, entry.size, entry.value, entry.unit, entry.conditions, source.cited, source.date, entry.ranks
    )


def _sanity(entry: SanityEntry, device: Device, sheet: Specification, devices: int) -> Floor | None:
    """Return the floor that a [[sanity]] table defines for this device.

    Return None if the data sheet lacks the value from which the floor is computed.
    """
    ranks = None
    if entry.of == "memory bandwidth":
        whole = sheet.memory_bandwidth_gb_s
    elif entry.of == "peak":
        whole = sheet.peak(gemm_path(entry.dtype, device)).published_tflops
    else:
        ranks = devices
        whole = sheet.link_limit_gb_s(devices)[0] if devices > 1 else None
    if whole is None:
        return None
    unit = _UNITS[METRICS[entry.quantity]]
    source = f"{OURS}: {entry.share:g} x {entry.of} of the data sheet, {whole:g} {unit}"
    return Floor(entry.quantity, entry.dtype, entry.size, entry.share * whole, unit, entry.conditions, source, ranks=ranks)


def _check_quantity(quantity: str, dtype: str) -> None:
    require(quantity in METRICS, f"quantity must be one of {', '.join(METRICS)}")
    require(dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, not {dtype}")
