"""What the ranks do in test_mpi_collectives.py: the experiment with one fault on the last rank."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hyperion.chapter import Context, Result
from hyperion.experiments.interconnect import mpi_collectives
from hyperion.processes import world


def measure_with_fault(context: Context, report, fault: str, folder: str) -> Result:
    """Run the experiment with a fault. Each rank leaves its process ID in the folder."""
    here = world()
    Path(folder, f"pid-{here.rank}").write_text(str(os.getpid()))
    name, before, after = FAULTS[fault]
    sound = next(one for one in mpi_collectives.MPI_COLLECTIVES if one.name == name)
    # No other collective is measured, since ranks of MPI that wait keep a core busy, which is slow beside other tests.
    mpi_collectives.MPI_COLLECTIVES[:] = [replace(sound, call=_faulty(sound.call, before, after))]
    return mpi_collectives.measure_on_rank(context, report, mpi_collectives.HOST, False, {})


def _faulty(sound: Callable, before: Callable, after: Callable) -> Callable:
    def call(output, given):
        last = world().rank == world().size - 1
        if last:
            before()
        sound(output, given)
        if last:
            after(output)

    return call


def _nothing(*_: object) -> None:
    pass


def _add_one(output) -> None:
    output[3] += 1


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise ValueError("on purpose")


# By name: (collective, what the last rank does before the call, what it does to the output after it).
FAULTS = {
    "wrong value": ("all_reduce", _nothing, _add_one),
    "killed": ("reduce", _die, _nothing),
    "raises": ("broadcast", _raise, _nothing),
    "hangs": ("gather", lambda: time.sleep(600), _nothing),
    "nothing received": ("scatter", _nothing, lambda output: output.fill_(-1)),
}
