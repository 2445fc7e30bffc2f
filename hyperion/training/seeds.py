"""Every random number generator of the process: seeded together, saved together, restored together."""

import os
import random

import numpy as np
import torch

from hyperion.errors import require_number, require_seed

_NUMPY_WORDS = 624  # of the Mersenne twister


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python's, numpy's and torch's generators (those of every GPU too).

    Args:
        seed: 0 to 2^32 - 1.
        deterministic: also make torch refuse operations whose result depends on scheduling. On a CPU with a fixed
            number of threads the loss sequence repeats bit for bit without it; on a GPU only with it, at some cost in
            speed.

    Raises:
        HyperionError: the seed is out of range.
    """
    seed = require_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Seed everything from the run's seed, the step it stands at and the rank: no two ranks draw the same numbers, and
    none draws those of an earlier start again.

    Raises:
        HyperionError: one of the three is negative or no whole number.
    """
    for name, value in (("seed", seed), ("step", step), ("rank", rank)):
        require_number(name, value, "seed_rank", whole=True, at_least=0)
    seed_everything(int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0]))


def rng_state() -> dict:
    """The state of all generators, as tensors and JSON values."""
    python, (_, numpy_keys, numpy_position, has_gauss, cached_gauss) = random.getstate(), np.random.get_state()
    return {
        "python": [python[0], list(python[1]), python[2]],
        "numpy": [torch.from_numpy(numpy_keys.astype(np.int64)), int(numpy_position), int(has_gauss), float(cached_gauss)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def require_rng_state(state: dict) -> None:
    """Give generators of their own the stored states, so that `set_rng_state` cannot fail on a file.

    Raises:
        Exception: whatever a generator raises; the state is none that rng_state returned.
    """
    version, internal, gauss = state["python"]
    random.Random().setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached_gauss = state["numpy"]
    if not 0 <= position <= _NUMPY_WORDS:  # NumPy would read behind its words
        raise ValueError(f"position {position} of NumPy's generator")
    np.random.RandomState().set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached_gauss))
    torch.Generator().set_state(state["torch"])
    for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.Generator(f"cuda:{index}").set_state(device_state)


def set_rng_state(state: dict) -> None:
    """Restore what rng_state returned; GPUs that this process lacks or has more of keep their own state."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached_gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached_gauss))
    torch.set_rng_state(state["torch"])
    for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state, index)
