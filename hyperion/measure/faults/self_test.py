"""The harness tests itself: a fault is planted into a real measurement, and a check of that measurement must refuse it.

Each fault has a clean twin, the same measurement without it, which must pass: a check that refuses everything proves nothing.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hyperion.errors import HyperionError
from hyperion.hardware import Device

Believe = Callable[[str], None]


@dataclass(frozen=True)
class Fault:
    """One way for a measurement to be wrong.

    Args:
        name: what is wrong.
        check: which check of the production path catches it.
        refusal: words that this check's message has. An error without them is another one, and does not count as caught.
        plant: (device, broken, believe) -> None; does the measurement, with the fault where `broken`, raises what the check
            raises, and tells `believe` the number that a reader would have read.
    """

    name: str
    check: str
    refusal: str
    plant: Callable[[Device, bool, Believe], None]


@dataclass(frozen=True)
class FaultResult:
    """What became of a planted fault.

    Args:
        name: what was wrong.
        believed: what a reader would have read.
        check: the check that is to catch it.
        caught: whether it did.
        message: its words; of a fault that was not caught, what happened instead.
        twin_passes: whether the same measurement without the fault was let through.
        twin_message: why not, else "".
        seconds: both together.
    """

    name: str
    believed: str
    check: str
    caught: bool
    message: str
    twin_passes: bool
    twin_message: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the check tells the fault from its twin."""
        return self.caught and self.twin_passes


def run_faults(device: Device, faults: Iterable[Fault]) -> list[FaultResult]:
    """Plant each fault, and let its twin pass."""
    return [_run(device, fault) for fault in faults]


def _run(device: Device, fault: Fault) -> FaultResult:
    started = time.monotonic()
    believed, raised = _measure(device, fault, broken=True)
    caught = isinstance(raised, HyperionError) and fault.refusal in raised.what
    _, objection = _measure(device, fault, broken=False)
    return FaultResult(
        fault.name,
        believed,
        fault.check,
        caught,
        "nothing objected" if raised is None else _words(raised),
        objection is None,
        "" if objection is None else _words(objection),
        time.monotonic() - started,
    )


def _measure(device: Device, fault: Fault, *, broken: bool) -> tuple[str, Exception | None]:
    """(what would have been read, what was raised)."""
    read: list[str] = []
    try:
        fault.plant(device, broken, read.append)
    except Exception as error:  # a fault may break anything; whether the right check spoke is judged from the words
        return "; ".join(read), error
    return "; ".join(read), None


def _words(error: Exception) -> str:
    return error.what if isinstance(error, HyperionError) else f"{type(error).__name__}: {error}"
