"""What two ranks do in the test of `measure.time`, `measure.compare` and `measure.explain` under torchrun."""

import time

import torch
import torch.distributed as dist

from hyperion import measure
from hyperion.errors import HyperionError
from hyperion.measure.api import functions
from hyperion.processes import world
from tests.measure.explain_ranks import explain_ddp

# On a busy machine, a collective whose rank waits for a core takes half a second, and 3 samples need 8 calls and the checks.
OPTIONS = {"device": "cpu", "cold": False, "minimum_samples": 5, "time_limit_s": 5.0}


def everything() -> dict:
    """Functions with collectives in them, whose ranks are of different speed; and what one rank alone does wrong."""
    torch.set_num_threads(1)
    rank = world().rank
    return {
        "collective": collective(rank),
        "compared": [t.samples_s.tolist() for t in compared(rank).timings],
        "without communication": measure.time(lambda: time.sleep(5e-3 * rank), **OPTIONS).timing.samples_s.tolist(),
        "alone": alone(rank),
        "refused": refused(rank),
        "too slow": too_slow(rank),
        "explained": explain_ddp(),
        "missing": missing(rank),
    }


def collective(rank: int) -> dict:
    calls = []

    def reduce() -> torch.Tensor:
        calls.append(None)
        time.sleep(2e-3 * rank)
        total = torch.ones(8)
        dist.all_reduce(total)
        return total

    answer = measure.time(reduce, **OPTIONS)
    return {"samples": answer.timing.samples_s.tolist(), "calls": len(calls)}


def compared(rank: int):
    def reduce() -> None:
        time.sleep(1e-3 * (1 + rank))
        dist.all_reduce(torch.ones(8))

    return measure.compare(reduce, lambda: dist.all_reduce(torch.ones(8)), labels=("A", "B"), **OPTIONS)


def alone(rank: int) -> float | None:
    return measure.time(lambda: torch.ones(8), alone=True, **OPTIONS).estimate.value if rank == 0 else None


def refused(rank: int) -> str:
    made = torch.ones(8)
    return _error(lambda: measure.time((lambda: made) if rank == 1 else (lambda: made * 2), **OPTIONS))


def too_slow(rank: int) -> str:
    return _error(lambda: measure.time(lambda: time.sleep(0.3 * rank), **{**OPTIONS, "time_limit_s": 0.5}))


def missing(rank: int) -> str:
    functions._RENDEZVOUS_S = 1.0
    return _error(lambda: measure.time(lambda: None, **OPTIONS)) if rank == 0 else ""


def _error(work) -> str:
    try:
        work()
    except HyperionError as error:
        return str(error)
    return ""
