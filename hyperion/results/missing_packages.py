"""Find packages that were missing when rows were measured and that are installed now.

A row without a value states its reason. If a package is missing, the reason ends with "not installed; next step: install NAMES",
or with "pip install NAMES".
"""

import importlib.util
import re
from collections.abc import Iterable

from hyperion.results.rows import Row

_MISSING = re.compile(r"not installed; next step: (?:pip )?install (?P<names>.+)$")


def installed_since(rows: Iterable[Row]) -> list[str]:
    """Return the packages that rows name as missing and that can be imported now, in alphabetical order.

    The packages of a reason count only if all of them can be imported, because the row has no value without any of them.
    """
    found: set[str] = set()
    for reason in {row.value_reason for row in rows if row.value is None and row.value_reason}:
        match = _MISSING.search(reason)
        parts = [part for part in match["names"].split() if not part.startswith("-")] if match else []
        # A requirement such as triton==3.7.1 names its version, too.
        names = [re.split(r"[=<>~!\[]", part)[0] for part in parts]
        if all(name.isidentifier() and importlib.util.find_spec(name) for name in names):
            found |= set(names)
    return sorted(found)
