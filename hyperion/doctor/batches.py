"""Find the largest batch that fits into memory by running steps with several batch sizes."""

import contextlib
import resource
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

from hyperion.errors import HyperionError
from hyperion.hardware.cpu import memory_limit_bytes
from hyperion.measure.memory_use.allocation import release_memory
from hyperion.terminal import say
from hyperion.units import GIB, MIB

_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")  # in errors of CUDA, HIP and the CPU allocator

LARGEST_TRIED = 2**16
_LEAST_FREE = 256 * MIB  # with less free memory on the host, nothing is tried
_LEFT_FREE = 2 * GIB


def largest_fitting(
    step: Callable[[int], object], at_most: int = LARGEST_TRIED, on_line: Callable[[str], object] = say
) -> tuple[int, list[int]]:
    """Return the largest batch size with which a step fits into memory, and the batch sizes that were tried.

    The batch size is doubled until a step fails, and then found by bisection. For a result n, this takes about 2 log2(n) steps.
    The result is 0 if a batch of 1 does not fit. On a CPU, each step runs in `within_free_memory`.

    Args:
        step: function that takes a batch size and runs one step with it.
        at_most: largest batch size to try.
        on_line: called with a line of text before each step.

    Raises:
        HyperionError: too little memory of the host is free to try a batch.
        Exception: a step failed, but not because memory ran out.
    """
    tried: list[int] = []

    def fits(batch: int) -> bool:
        on_line(f"trying a batch of {batch}")
        tried.append(batch)
        return _fits(step, batch)

    low, high = 0, 1
    while high <= at_most and fits(high):
        low, high = high, 2 * high
    high = min(high, at_most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, tried


@contextlib.contextmanager
def within_free_memory() -> Iterator[None]:
    """Context manager in which an allocation on the host fails if it needs more than `usable_bytes` of the free memory.

    Without it, Linux grants more memory than the machine has, and kills a process when the memory is written. If PyTorch finds
    a GPU, nothing is limited, because GPU drivers reserve addresses for much more memory than they use. Inside another such
    context, the lower limit applies.

    Raises:
        HyperionError: too little memory is free.
    """
    if torch.cuda.is_available():
        yield
        return
    release_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    memory = psutil.Process().memory_info()
    free = min(psutil.virtual_memory().available, (memory_limit_bytes() or 2**62) - memory.rss)
    limit = memory.data + usable_bytes(free)
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def usable_bytes(free: int) -> int:
    """Return how many bytes of the free memory of the host may be used. The rest is left, because other processes may grow.

    At least 20 % of the free memory and at least 2 GiB are left. If less than 4 GiB are free, half is left.

    Args:
        free: bytes of the host's memory that are free.

    Raises:
        HyperionError: less than 256 MiB are free.
    """
    if free < _LEAST_FREE:
        raise HyperionError(
            f"{max(0, free) / MIB:.0f} MiB of memory are free, and to try a batch needs at least {_LEAST_FREE // MIB} MiB",
            where="memory of the host",
            next_step="end other processes, or raise the memory limit of the container or of the job, and try again",
        )
    return free - max(free // 5, min(_LEFT_FREE, free // 2))


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error says that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


def _fits(step: Callable[[int], object], batch: int) -> bool:
    try:
        with within_free_memory():
            step(batch)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        # The traceback of a failed step keeps its tensors alive until here, so the memory can only be freed now.
        release_memory()


def load_step(file: Path) -> Callable[[int], object]:
    """Run a Python file and return its function `step`.

    As with `python FILE`, the file can import the modules in its folder while it runs, and its command line has no arguments.

    Raises:
        HyperionError: the file does not exist or has no function `step`.
    """
    if not file.is_file():
        raise HyperionError("there is no such file", where=file, next_step="name a Python file with a function step(batch)")
    arguments, folder = sys.argv, str(file.resolve().parent)
    sys.argv = [str(file)]
    sys.path.insert(0, folder)
    try:
        step = runpy.run_path(str(file)).get("step")
    finally:
        sys.argv = arguments
        sys.path.remove(folder)  # and not the entries that the file itself added for its later imports
    if not callable(step):
        raise HyperionError("this file has no function step(batch)", where=file, next_step="define step(batch: int) in it")
    return step
