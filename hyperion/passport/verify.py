"""The format of a passport, and the verification of passports.

A passport is one JSON file with the fingerprint, the measured ceilings and the floors of a machine:

    {"schema": 1, "hyperion": "0.1.0", "created": "2026-11-21", "device": …, "devices": 4,
     "fingerprint": {…}, "ceilings": [{row}, …], "floors": {"unknown": "", "verdicts": […]},
     "hashes": {"fingerprint": …, "ceilings": …, "floors": …, "whole": …}}

`ceilings` contains result rows with all their columns. The hashes show which part of the file was changed after it was written.
They do not prove who wrote the file or that its values were measured, because anyone who changes a value can also recompute the
hashes. Therefore `verify_passport` also checks the values against the data sheets, their intervals, their checks and the floors.
"""

import hashlib
import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hyperion.chapter.rows import bandwidth_limit, gemm_limit
from hyperion.doctor import judge
from hyperion.errors import HyperionError
from hyperion.forms import read_form
from hyperion.hardware import Device, Floor, detect, facts_of, floors_for, lookup
from hyperion.hardware.floors import METRICS
from hyperion.measure import FORMATS
from hyperion.measure.clock.timing import MINIMUM_SAMPLES
from hyperion.measure.traffic.bandwidth import OPERATIONS, REDUCTIONS
from hyperion.results import Row, RowError
from hyperion.results.rows import COLUMNS, NEW_COLUMNS
from hyperion.untrusted import read_json

SCHEMA = 1
SECTIONS = ("fingerprint", "ceilings", "floors")
_METRICS = ("gemm_tflops", "bandwidth_gb_s", "busbw_gb_s", "launch_time_s", "energy_j_per_tflop", "energy_j_per_gb")
# The params that a row may have, with their types.
_PARAMS = dict.fromkeys(("m", "n", "k", "elements", "bytes", "ranks", "calls", "floor"), int)
_PARAMS |= dict.fromkeys(("cache", "backend", "power_scope"), str) | {"pinned": bool, "counter_difference": float}
_LARGEST_BYTES = 16 * 2**20  # maximum size of a passport file; thousands of values take about one MiB
_ROUNDING = 1 + 1e-9
_REMEDY = "do not use this passport; measure the machine again: hyperion passport"
# Matches file paths. The lookbehind excludes paths in web addresses.
_PATH = re.compile(r"(?<![\w.:/~-])(/(home|root|Users|tmp|mnt|scratch|lustre|gpfs|work|var|opt|data|nfs|usr)/|~/|[A-Z]:\\)")


class PassportError(HyperionError):
    """Raised if a passport breaks a rule. The message names the field and the rule."""

    exit_code = 1


@dataclass(frozen=True)
class FloorVerdict:
    """The result of comparing the machine with one floor.

    The fields up to `ranks` are those of `hyperion.hardware.Floor`. The other fields are the outcome, the measured value and a
    note; see `hyperion.doctor.FloorResult`.
    """

    quantity: str
    dtype: str
    size: int
    value: float
    unit: str
    conditions: str
    source: str
    date: str
    ranks: int | None
    outcome: str
    measured: float | None
    note: str


@dataclass(frozen=True)
class FloorSection:
    """The results for all floors. If no floor is known for the device, `verdicts` is empty and `unknown` contains the reason."""

    unknown: str
    verdicts: tuple[FloorVerdict, ...]


@dataclass(frozen=True)
class _SourceState:
    hash: str
    commit: str | None
    modified: bool | None


@dataclass(frozen=True)
class _Passport:
    """The top-level fields of the JSON file. The entries of `fingerprint` and `ceilings` are verified separately."""

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
    """Verify a passport file, and return the number of its values.

    The verification fails if:

    - a field is unknown, missing or of another type;
    - a hash does not match the content;
    - a string contains a local path;
    - the unit of a row is not that of its metric;
    - a value is outside its interval or beyond the limit of the data sheet;
    - a value has fewer than 30 samples;
    - a check failed;
    - a verdict on a floor does not follow from the rows.

    The docstring of this module explains what the hashes cannot prove.

    Raises:
        PassportError: the verification failed. The message names the field and the reason.
    """
    content = _read(path)
    try:
        return _verify(content)
    except PassportError as error:
        raise PassportError(error.what, where=path, next_step=error.next_step) from None
    except HyperionError as error:
        raise PassportError(error.what.replace("passport.", ""), where=path, next_step=_REMEDY) from error


def hashes_of(content: dict) -> dict[str, str]:
    """Return a dict that maps the name of a section to its sha256. The entry "whole" covers everything except the hashes."""
    whole = {name: value for name, value in content.items() if name != "hashes"}
    return {name: _hash(content[name]) for name in SECTIONS} | {"whole": _hash(whole)}


def private_text(value: object, place: str) -> str:
    """Return the name of the first field that contains a local path, or "" if there is none."""
    if isinstance(value, str):
        return place if _PATH.search(value) else ""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        inner = f"{place}.{key}" if isinstance(key, str) else f"{place}[{key}]"
        if found := (isinstance(key, str) and private_text(key, inner)) or private_text(item, inner):
            return found
    return ""


def _verify(content: dict) -> int:
    if isinstance(content, dict) and content.get("schema") != SCHEMA:
        raise _refusal("schema", f"is {content.get('schema')!r}, but this version of Hyperion reads schema {SCHEMA}")
    document = read_form(_Passport, content, "passport")
    _require(re.fullmatch(r"\d{4}-\d{2}-\d{2}", document.created), "created", "is not a date like 2026-11-21")
    _verify_hashes(content)
    # A passport is meant to be published, so it must not reveal paths or user names.
    if place := private_text(content, ""):
        raise _refusal(place.lstrip("."), "contains a path of a machine")
    read_form(_SourceState, document.fingerprint.get("source"), "fingerprint.source")
    # Detect the device again from the stored facts, with the same code as on a real machine.
    facts = facts_of(document.fingerprint)
    device = detect(facts)
    _require(device.name == document.device, "device", f"is {document.device!r}, but the fingerprint says {device.name!r}")
    devices = max(1, len(facts.gpus))
    _require(devices == document.devices, "devices", f"is {document.devices}, but the fingerprint has {devices}")
    rows = [_row(entry, f"ceilings[{index}]", device) for index, entry in enumerate(document.ceilings)]
    values = sum(row.value is not None for row in rows)
    _require(values, "ceilings", "contains no value")
    seen: dict[tuple, int] = {}
    for index, row in enumerate(rows):
        _require(row.key not in seen, f"ceilings[{index}]", f"repeats ceilings[{seen.get(row.key)}]")
        seen[row.key] = index
    _verify_floors(document.floors, rows, device, devices)
    return values


def _read(path: Path) -> dict:
    try:
        return read_json(path, PassportError, _REMEDY, _LARGEST_BYTES)
    except OSError as error:
        raise PassportError(
            f"cannot be read: {error.strerror}", where=path, next_step="pass the path of a passport file"
        ) from error


def _verify_hashes(content: dict) -> None:
    computed, stated = hashes_of(content), content["hashes"]
    _require(stated.keys() == computed.keys(), "hashes", f"must contain exactly the fields {', '.join(computed)}")
    for name, digest in computed.items():
        what = "a field outside the sections" if name == "whole" else "this section"
        _require(
            stated[name] == digest,
            f"hashes.{name}",
            f"does not match the content: {what} was changed after the passport was written",
        )


def _row(entry: dict, place: str, device: Device) -> Row:
    """Check an entry of `ceilings`, and return it as a row.

    The fields, the unit and the interval must be valid, and the limit must agree with the data sheet in this version.
    """
    unknown = sorted(entry.keys() - set(COLUMNS))
    _require(not unknown, f"{place}.{unknown[0] if unknown else ''}", "is an unknown field")
    missing = sorted(set(COLUMNS[:-NEW_COLUMNS]) - entry.keys())
    _require(not missing, f"{place}.{missing[0] if missing else ''}", "is missing")
    row = read_form(Row, {name: value for name, value in entry.items() if name != "unit"}, place)
    _require(row.metric in _METRICS, f"{place}.metric", f"is {row.metric!r}, but must be one of {', '.join(_METRICS)}")
    _require(entry["unit"] == row.unit, f"{place}.unit", f"is {entry['unit']!r}, but the unit of {row.metric} is {row.unit!r}")
    _verify_params(row, f"{place}.params")
    try:
        row.validate()
    except RowError as error:
        raise _refusal(place, error.what) from error
    if row.value is None:
        return row
    _require(row.value > 0, f"{place}.value", f"is {row.value:g}, but must be positive")
    if row.definition.needs_interval:
        _require((row.n or 0) >= MINIMUM_SAMPLES, f"{place}.n", f"is {row.n}, but at least {MINIMUM_SAMPLES} samples are needed")
    known = _known_limit(row, place, device)
    if known is not None:
        bound = known * _ROUNDING
        stated = row.limit is not None and row.limit <= bound
        _require(stated, f"{place}.limit", f"is {row.limit}, but the data sheet has {known:.6g}")
        _require(
            row.value <= bound,
            f"{place}.value",
            f"is {row.value:.6g} {row.unit}, but the limit from the data sheet is {known:.6g}",
        )
    return row


def _verify_params(row: Row, place: str) -> None:
    for name, value in row.params.items():
        _require(name in _PARAMS, f"{place}.{name}", "is an unknown field")
        checked: Any = read_form(_PARAMS[name], value, f"{place}.{name}")
        _require(_PARAMS[name] is not int or checked >= 0, f"{place}.{name}", f"is {value}, but must not be negative")


def _known_limit(row: Row, place: str, device: Device) -> float | None:
    """Return the limit of a row computed from the data sheet in this version, or None if the data sheet gives no limit."""
    if row.metric == "gemm_tflops":
        _require(row.dtype in FORMATS, f"{place}.dtype", f"is {row.dtype!r}, an unknown number format")
        return gemm_limit(device, row.dtype)[0]
    if row.metric == "busbw_gb_s":
        sheet, ranks = lookup(device)[0], read_form(int, row.params.get("ranks"), f"{place}.params.ranks")
        _require(ranks >= 2, f"{place}.params.ranks", f"is {ranks}, but a collective needs at least two ranks")
        link = sheet.link_limit_gb_s(ranks)[0] if sheet else None
        # If the switch does the reduction, each byte is sent once instead of almost twice. The fingerprint does not say whether
        # it did, so the limit assumes that it did.
        return None if link is None else link * max(1.0, 2 * (ranks - 1) / ranks)
    operation = (OPERATIONS | REDUCTIONS).get(row.variant)
    if row.metric != "bandwidth_gb_s" or operation is None:
        return None
    elements = read_form(int, row.params.get("elements"), f"{place}.params.elements")
    _require(row.dtype in FORMATS, f"{place}.dtype", f"is {row.dtype!r}, an unknown number format")
    return bandwidth_limit(device, operation.arrays * elements * FORMATS[row.dtype].bytes)[0]


def _verify_floors(section: FloorSection, rows: list[Row], device: Device, devices: int) -> None:
    """Check that the results for the floors agree with the rows of the passport.

    If a floor has a source that Hyperion knows, also check that the floor has the value that this source states.
    """
    expected, unknown = floors_for(device, devices)
    _require(
        bool(section.unknown) != bool(section.verdicts), "floors", "must have either verdicts or a reason why no floor is known"
    )
    _require(not section.verdicts or not unknown, "floors.verdicts", f"must be empty: {unknown}")
    published = {(floor.source, floor.quantity, floor.dtype, floor.size, floor.ranks): floor.value for floor in expected}
    for index, verdict in enumerate(section.verdicts):
        place = f"floors.verdicts[{index}]"
        floor = _floor(verdict)
        key = (floor.source, floor.quantity, floor.dtype, floor.size, floor.ranks)
        # For a floor from an unknown source, there is no published value to compare with.
        value = published.get(key, floor.value)
        _require(floor.value == value, f"{place}.value", f"is {floor.value:g}, but its source says {value:g}")
        # The verdict is recomputed from the rows, so that it cannot be edited alone.
        [recomputed] = judge([floor], rows)
        _require(
            recomputed.outcome == verdict.outcome,
            f"{place}.outcome",
            f"is {verdict.outcome!r}, but the rows say {recomputed.outcome!r}",
        )
        measured = None if recomputed.row is None else recomputed.row.value
        _require(measured == verdict.measured, f"{place}.measured", f"is {verdict.measured}, but the rows say {measured}")


def _floor(verdict: FloorVerdict) -> Floor:
    floor = Floor(**{field.name: getattr(verdict, field.name) for field in fields(Floor)})
    if floor.quantity not in METRICS:
        raise _refusal("floors.verdicts", f"has {floor.quantity!r}, but the quantity must be one of {', '.join(METRICS)}")
    return floor


def _require(holds, field: str, reason: str) -> None:
    if not holds:
        raise _refusal(field, reason)


def _refusal(field: str, reason: str) -> PassportError:
    return PassportError(f"{field}: {reason}", next_step=_REMEDY)


def _hash(value) -> str:
    # Use a canonical form with sorted keys and no spaces, so that the layout of the file does not change the hash.
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
