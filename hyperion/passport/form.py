"""A passport: one JSON file that says what a machine is, what it reached, and which floors it met.

    {"schema": 1, "hyperion": "0.1.0", "created": "2026-11-21", "device": …, "devices": 4,
     "fingerprint": {…}, "ceilings": [{row}, …], "floors": {"unknown": "", "verdicts": […]},
     "hashes": {"fingerprint": …, "ceilings": …, "floors": …, "whole": …}}

`ceilings` are result rows with all their columns. The hashes show that a part was changed after it was written, and which;
they do not show who wrote it, nor that it was measured: whoever changes a value can compute them anew. What a passport
claims is therefore also held against the data sheets, its own intervals, checks and floors.
"""

import hashlib
import json
import re
from dataclasses import dataclass

from hyperion.results import Row
from hyperion.results.rows import COLUMNS

SCHEMA = 1
SECTIONS = ("fingerprint", "ceilings", "floors")
# A path of somebody's machine; the paths within addresses on the web follow a letter.
_PATH = re.compile(r"(?<![\w.:/~-])(/(home|root|Users|tmp|mnt|scratch|lustre|gpfs|work|var|opt|data|nfs|usr)/|~/|[A-Z]:\\)")


@dataclass(frozen=True)
class FloorVerdict:
    """What was found about one floor; the fields are those of `hyperion.hardware.Floor`, and the outcome."""

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
    """All verdicts, or in `unknown` why no floor is known for the device."""

    unknown: str
    verdicts: tuple[FloorVerdict, ...]


def row_to_json(row: Row) -> dict:
    """A row with its unit, in the order of rows.csv."""
    return {column: getattr(row, column) for column in COLUMNS}


def hashes_of(content: dict) -> dict[str, str]:
    """sha256 of each section, and of everything but the hashes."""
    whole = {name: value for name, value in content.items() if name != "hashes"}
    return {name: _hash(content[name]) for name in SECTIONS} | {"whole": _hash(whole)}


def private_text(value, place: str) -> str:
    """The place of a text that names a path of somebody's machine, or "" ."""
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
