"""The form of a passport: one JSON file with the fingerprint, the measured ceilings and the floors of a machine.

    {"schema": 1, "hyperion": "0.1.0", "created": "2026-11-21", "device": …, "devices": 4,
     "fingerprint": {…}, "ceilings": [{row}, …], "floors": {"unknown": "", "verdicts": […]},
     "hashes": {"fingerprint": …, "ceilings": …, "floors": …, "whole": …}}

`ceilings` are result rows with all their columns. The hashes show which part was changed after it was written. They do not
show who wrote it or that it was measured, because anyone who changes a value can recompute them. Therefore `verify_passport`
also compares the values with the data sheets, their intervals, their checks and the floors.
"""

import hashlib
import json
import re
from dataclasses import dataclass

from hyperion.results import Row
from hyperion.results.rows import COLUMNS

SCHEMA = 1
SECTIONS = ("fingerprint", "ceilings", "floors")
# Paths of a machine. The lookbehind excludes paths in web addresses.
_PATH = re.compile(r"(?<![\w.:/~-])(/(home|root|Users|tmp|mnt|scratch|lustre|gpfs|work|var|opt|data|nfs|usr)/|~/|[A-Z]:\\)")


@dataclass(frozen=True)
class FloorVerdict:
    """The outcome of one floor: the fields of `hyperion.hardware.Floor`, outcome, measured value and note."""

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
    """The verdicts on all floors, or in `unknown` the reason why no floor is known for the device."""

    unknown: str
    verdicts: tuple[FloorVerdict, ...]


def row_to_json(row: Row) -> dict:
    """Return a row as JSON, with its unit, in the column order of rows.csv."""
    return {column: getattr(row, column) for column in COLUMNS}


def hashes_of(content: dict) -> dict[str, str]:
    """Return the sha256 of each section, and of everything but the hashes under "whole"."""
    whole = {name: value for name, value in content.items() if name != "hashes"}
    return {name: _hash(content[name]) for name in SECTIONS} | {"whole": _hash(whole)}


def private_text(value, place: str) -> str:
    """Return the place of the first text that contains a path of a machine, or ""."""
    if isinstance(value, str):
        return place if _PATH.search(value) else ""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        inner = f"{place}.{key}" if isinstance(key, str) else f"{place}[{key}]"
        if found := (isinstance(key, str) and private_text(key, inner)) or private_text(item, inner):
            return found
    return ""


def _hash(value) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
