"""Holding a passport to its rules: form, hashes, units, intervals, checks, the data sheet's limits, and floors."""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hyperion.chapter.rows import bandwidth_limit, gemm_limit
from hyperion.doctor import judge
from hyperion.errors import HyperionError
from hyperion.hardware import Device, Floor, detect, facts_of, floors_for, lookup
from hyperion.hardware.floors import METRICS
from hyperion.measure import FORMATS
from hyperion.measure.clock.timing import MINIMUM_SAMPLES
from hyperion.measure.traffic.bandwidth import OPERATIONS, REDUCTIONS
from hyperion.passport.form import SCHEMA, FloorSection, FloorVerdict, hashes_of, private_text
from hyperion.results import Row, RowError
from hyperion.results.rows import COLUMNS
from hyperion.results.typed import from_json
from hyperion.untrusted import read_json

_METRICS = ("gemm_tflops", "bandwidth_gb_s", "busbw_gb_s", "launch_time_s", "energy_j_per_tflop", "energy_j_per_gb")
# What a row's params may say, and as what.
_PARAMS = dict.fromkeys(("m", "n", "k", "elements", "bytes", "ranks", "calls", "floor"), int)
_PARAMS |= dict.fromkeys(("cache", "backend", "power_scope"), str) | {"pinned": bool, "counter_difference": float}
_LARGEST_BYTES = 16 * 2**20  # a machine with thousands of values has one MiB
_ROUNDING = 1 + 1e-9


class PassportError(HyperionError):
    """A passport that breaks a rule: which field, and which rule."""

    exit_code = 1


@dataclass(frozen=True)
class _Source:
    hash: str
    commit: str | None
    modified: bool | None


@dataclass(frozen=True)
class _Document:
    """The outer form; the parts are read one by one."""

    schema: int
    hyperion: str
    created: str
    device: str
    devices: int
    fingerprint: dict
    ceilings: list[dict]
    floors: FloorSection
    hashes: dict[str, str]


def verify_passport(path: Path) -> int:
    """Check a passport file; returns how many values it holds.

    It is refused when a field is unknown, missing or of another type, a hash is not that of its content, a text names a path,
    a unit is not its metric's, a value lies outside its own interval or beyond the data sheet's limit, fewer than 30 samples
    stand behind it, a check failed, or a verdict about a floor is not what its rows say.

    Raises:
        PassportError: names the field and the reason. What a hash cannot show: see `hyperion.passport.form`.
    """
    content = _read(path)
    try:
        return _verify(content)
    except PassportError as error:
        raise PassportError(error.what, where=path, next_step=error.next_step) from None
    except HyperionError as error:
        raise PassportError(error.what.replace("passport.", ""), where=path, next_step="measure it anew") from error


def _verify(content: dict) -> int:
    if isinstance(content, dict) and content.get("schema") != SCHEMA:
        raise _refusal("schema", f"is {content.get('schema')!r}, this version reads {SCHEMA}")
    document = from_json(_Document, content, "passport")
    _require(re.fullmatch(r"\d{4}-\d{2}-\d{2}", document.created), "created", "is no date like 2026-11-21")
    _verify_hashes(content)
    if place := private_text(content, ""):
        raise _refusal(place.lstrip("."), "names a path of somebody's machine")
    from_json(_Source, document.fingerprint.get("source"), "fingerprint.source")
    facts = facts_of(document.fingerprint)
    device = detect(facts)
    _require(device.name == document.device, "device", f"is {document.device!r}, the fingerprint says {device.name!r}")
    devices = max(1, len(facts.gpus))
    _require(devices == document.devices, "devices", f"is {document.devices}, the fingerprint has {devices}")
    rows = [_row(entry, f"ceilings[{index}]", device) for index, entry in enumerate(document.ceilings)]
    values = sum(row.value is not None for row in rows)
    _require(values, "ceilings", "holds no value")
    seen: dict[tuple, int] = {}
    for index, row in enumerate(rows):
        _require(row.key not in seen, f"ceilings[{index}]", f"says again what ceilings[{seen.get(row.key)}] says")
        seen[row.key] = index
    _verify_floors(document.floors, rows, device, devices)
    return values


def _read(path: Path) -> dict:
    try:
        return read_json(path, PassportError, "measure it anew: hyperion passport writes one", _LARGEST_BYTES)
    except OSError as error:
        raise PassportError(f"cannot be read: {error.strerror}", where=path, next_step="name a passport file") from error


def _verify_hashes(content: dict) -> None:
    found, stated = hashes_of(content), content["hashes"]
    _require(stated.keys() == found.keys(), "hashes", f"must be those of {', '.join(found)}")
    for name, digest in found.items():
        what = "something outside of the sections" if name == "whole" else "this section"
        _require(stated[name] == digest, f"hashes.{name}", f"is not that of the content: {what} was changed after it was written")


def _row(entry: dict, place: str, device: Device) -> Row:
    """A row that keeps its metric's rules, its own interval, and the limit that this version knows for the device."""
    unknown = sorted(entry.keys() - set(COLUMNS))
    _require(not unknown, f"{place}.{unknown[0] if unknown else ''}", "is an unknown field")
    missing = sorted(set(COLUMNS) - entry.keys())
    _require(not missing, f"{place}.{missing[0] if missing else ''}", "is missing")
    row = from_json(Row, {name: value for name, value in entry.items() if name != "unit"}, place)
    _require(row.metric in _METRICS, f"{place}.metric", f"is {row.metric!r}, a passport has {', '.join(_METRICS)}")
    _require(entry["unit"] == row.unit, f"{place}.unit", f"is {entry['unit']!r}, {row.metric} is in {row.unit!r}")
    _verify_params(row, f"{place}.params")
    try:
        row.validate()
    except RowError as error:
        raise _refusal(place, error.what) from error
    if row.value is None:
        return row
    _require(row.value > 0, f"{place}.value", f"is {row.value:g}")
    if row.definition.needs_interval:
        _require((row.n or 0) >= MINIMUM_SAMPLES, f"{place}.n", f"is {row.n}, at least {MINIMUM_SAMPLES} samples are due")
    known = _known_limit(row, place, device)
    if known is not None:
        bound = known * _ROUNDING
        stated = row.limit is not None and row.limit <= bound
        _require(stated, f"{place}.limit", f"is {row.limit}, the data sheet has {known:.6g}")
        _require(row.value <= bound, f"{place}.value", f"is {row.value:.6g} {row.unit}, beyond the data sheet's {known:.6g}")
    return row


def _verify_params(row: Row, place: str) -> None:
    for name, value in row.params.items():
        _require(name in _PARAMS, f"{place}.{name}", "is an unknown field")
        checked: Any = from_json(_PARAMS[name], value, f"{place}.{name}")
        _require(_PARAMS[name] is not int or checked >= 0, f"{place}.{name}", f"is {value}")


def _known_limit(row: Row, place: str, device: Device) -> float | None:
    """The limit that this version derives for a row from the data sheet, None where it knows none."""
    if row.metric == "gemm_tflops":
        _require(row.dtype in FORMATS, f"{place}.dtype", f"is {row.dtype!r}, no format of ours")
        return gemm_limit(device, row.dtype)[0]
    if row.metric == "busbw_gb_s":
        sheet, ranks = lookup(device)[0], from_json(int, row.params.get("ranks"), f"{place}.params.ranks")
        _require(ranks >= 2, f"{place}.params.ranks", f"is {ranks}, a collective takes at least two")
        link = sheet.link_limit_gb_s(ranks)[0] if sheet else None
        # A switch that adds sends each byte once instead of almost twice; whether it did is not in the fingerprint.
        return None if link is None else link * max(1.0, 2 * (ranks - 1) / ranks)
    operation = (OPERATIONS | REDUCTIONS).get(row.variant)
    if row.metric != "bandwidth_gb_s" or operation is None:
        return None
    elements = from_json(int, row.params.get("elements"), f"{place}.params.elements")
    _require(row.dtype in FORMATS, f"{place}.dtype", f"is {row.dtype!r}, no format of ours")
    return bandwidth_limit(device, operation.arrays * elements * FORMATS[row.dtype].bytes)[0]


def _verify_floors(section: FloorSection, rows: list[Row], device: Device, devices: int) -> None:
    """Verdicts are what the rows say, and floors under a vendor's name are the vendor's."""
    due, unknown = floors_for(device, devices)
    _require(bool(section.unknown) != bool(section.verdicts), "floors", "has verdicts, or says why none is known; not both")
    _require(not section.verdicts or not unknown, "floors.verdicts", f"cannot be: {unknown}")
    published = {(floor.source, floor.quantity, floor.dtype, floor.size, floor.ranks): floor.value for floor in due}
    for index, verdict in enumerate(section.verdicts):
        place = f"floors.verdicts[{index}]"
        floor = _floor(verdict)
        key = (floor.source, floor.quantity, floor.dtype, floor.size, floor.ranks)
        value = published.get(key, floor.value)
        _require(floor.value == value, f"{place}.value", f"is {floor.value:g}, its source says {value:g}")
        [found] = judge([floor], rows)
        _require(found.outcome == verdict.outcome, f"{place}.outcome", f"is {verdict.outcome!r}, the rows say {found.outcome!r}")
        measured = None if found.row is None else found.row.value
        _require(measured == verdict.measured, f"{place}.measured", f"is {verdict.measured}, the rows say {measured}")


def _floor(verdict: FloorVerdict) -> Floor:
    floor = Floor(**{field.name: getattr(verdict, field.name) for field in fields(Floor)})
    if floor.quantity not in METRICS:
        raise _refusal("floors.verdicts", f"has {floor.quantity!r}, a floor is about {', '.join(METRICS)}")
    return floor


def _require(holds, field: str, reason: str) -> None:
    if not holds:
        raise _refusal(field, reason)


def _refusal(field: str, reason: str) -> PassportError:
    return PassportError(f"{field}: {reason}", next_step="measure it anew: hyperion passport")
