"""Engines: frameworks that train the same model on the same tokens, observed in the same way and judged for equal work.

`Work` defines the work, an adapter trains it with one framework, `Observer` records what the run really did, and `unequal` names
every difference from the reference run. This module imports no framework.
"""

from hyperion.engines.judge import Difference, unequal
from hyperion.engines.record import Record
from hyperion.engines.stacks import STACKS, Stack, stack_named
from hyperion.engines.work import Work

__all__ = ["STACKS", "Difference", "Record", "Stack", "Work", "stack_named", "unequal"]
