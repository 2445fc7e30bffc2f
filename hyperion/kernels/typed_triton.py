"""Declare the types of Triton's decorators, for a type checker that cannot import Triton.

Without these types, a type checker sees a kernel as the undecorated function, and rejects `kernel[grid](…)`.
"""

from collections.abc import Callable
from typing import Any

import triton  # pyright: ignore[reportMissingImports] - only PyTorch's GPU builds contain it

jit: Callable[[Callable[..., Any]], Any] = triton.jit
autotune: Callable[..., Callable[[Any], Any]] = triton.autotune
