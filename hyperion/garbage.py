"""Settings of Python's garbage collector for processes that import torch.

torch, transformers and pandas create half a million objects that live until the process ends. With Python's defaults, the garbage
collector searches them again and again.
"""

import contextlib
import gc
from collections.abc import Iterator

_NEW_OBJECTS = 10_000


@contextlib.contextmanager
def imports_only() -> Iterator[None]:
    """Context manager that pauses the garbage collector. Its block should only import modules.

    Without the pause, the collector takes up to a third of the processor time of the import.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_rarely() -> None:
    """Start a collection after 10,000 new objects instead of 700, in a process of this library.

    With the default, a training on a CPU spends a seventh of its processor time on collections. Reference counts free tensors
    without them, and experiments collect explicitly where a cycle may hold a model.
    """
    gc.set_threshold(_NEW_OBJECTS)
