"""All random number generators of the process: seed, save and restore them together."""

import os
import random
from typing import Any, cast

import numpy as np
import torch

from hyperion.errors import require_number, require_seed

_NUMPY_WORDS = 624  # of the Mersenne twister


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed the generators of Python, NumPy and torch (including those of all GPUs).

    Args:
        seed: 0 to 2^32 - 1.
        deterministic: also make torch refuse nondeterministic operations. On a CPU with a fixed number of threads losses
            repeat bit for bit without it; on a GPU only with it, at some cost in speed.

    Raises:
        HyperionError: the seed is out of range.
    """
    seed = require_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads this at its first call
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Seed everything from the run's seed, the current step and the rank.

    So ranks have different random numbers, and a resumed run does not repeat those of an earlier start.

    Raises:
        HyperionError: an argument is negative or not a whole number.
    """
    for name, value in (("seed", seed), ("step", step), ("rank", rank)):
        require_number(name, value, "seed_rank", whole=True, at_least=0)
    seed_everything(int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0]))


def rng_state() -> dict[str, Any]:
    """Return the state of all generators, as tensors and JSON values."""
    python = random.getstate()
    _, numpy_keys, numpy_position, has_gauss, cached_gauss = cast(tuple, np.random.get_state())
    return {
        "python": [python[0], list(python[1]), python[2]],
        "numpy": [torch.from_numpy(numpy_keys.astype(np.int64)), int(numpy_position), int(has_gauss), float(cached_gauss)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def require_rng_state(state: dict[str, Any]) -> None:
    """Check a state from a file by setting it in new generators, so that `set_rng_state` cannot fail later.

    Raises:
        Exception: whatever a generator raises if the state is malformed.
    """
    version, internal, gauss = state["python"]
    random.Random().setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached_gauss = state["numpy"]
    if not 0 <= position <= _NUMPY_WORDS:  # NumPy would read out of bounds
        raise ValueError(f"the position of NumPy's generator is {position}")
    np.random.RandomState().set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached_gauss))
    torch.Generator().set_state(state["torch"])
    for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.Generator(f"cuda:{index}").set_state(device_state)


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the result of rng_state; GPUs without a stored state are unchanged, and states without a GPU are ignored."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached_gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached_gauss))
    torch.set_rng_state(state["torch"])
    for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state, index)
