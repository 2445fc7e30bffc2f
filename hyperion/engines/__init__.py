"""Engines: frameworks that train the same model on the same tokens, observed in the same way and judged for equal work.

`Work` defines the training work, an adapter performs it with one framework, `Observer` records what the run did, and `unequal`
lists every difference from the reference run. Importing this module imports no framework. torch is imported at the first access
to a name.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyperion.engines.judge import Difference, other_settings, unequal
    from hyperion.engines.record import Record
    from hyperion.engines.stacks import STACKS, Stack, stack_named
    from hyperion.engines.work import Work

__all__ = ["STACKS", "Difference", "Record", "Stack", "Work", "other_settings", "stack_named", "unequal"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hyperion.engines import judge, record, stacks, work

    return next(getattr(module, name) for module in (record, stacks, work, judge) if hasattr(module, name))
