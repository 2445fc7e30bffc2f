"""Checks of this machine and of this installation.

Each result says what the check observed. If something is wrong, it also says how to fix it.

All names are imported at their first use. A worker process that runs a check then imports no measurements and no pandas, which
would take two seconds of processor time.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyperion.doctor.checks import CheckResult
    from hyperion.doctor.components import check_components
    from hyperion.doctor.floors import (
        FloorReport,
        FloorResult,
        check_floors,
        floor_frame,
        floor_table,
        floors_of,
        floors_of_run,
        judge,
    )

__all__ = [
    "CheckResult",
    "FloorReport",
    "FloorResult",
    "check_components",
    "check_floors",
    "floor_frame",
    "floor_table",
    "floors_of",
    "floors_of_run",
    "judge",
]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hyperion.doctor import checks, components, floors

    return next(getattr(module, name) for module in (checks, components, floors) if hasattr(module, name))
