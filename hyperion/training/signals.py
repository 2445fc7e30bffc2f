"""SIGTERM as a flag: the batch system asks, the loop saves at the next safe point and leaves with a code of its own."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from hyperion.errors import HyperionError

EXIT_CODE = 75  # EX_TEMPFAIL of <sysexits.h>: "try again later"; a batch system requeues on it


class Interrupted(HyperionError):
    """Training stopped because it was asked to; called again, it goes on from its checkpoint."""

    exit_code = EXIT_CODE


class StopFlag:
    """Context manager: within it SIGTERM sets `requested` instead of ending the process; afterwards the old handler is
    back.

    Python lets only the main thread handle signals: elsewhere the flag is never set, and SIGTERM does what it did
    before.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "StopFlag":
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._previous = signal.signal(signal.SIGTERM, self._set)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, self._previous)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def watch(self, batches: Iterable, must_stop: Callable[[], bool] | None = None) -> Iterator:
        """The same batches, ended by Interrupted as soon as a stop is requested: for phases that may be abandoned.

        Args:
            must_stop: asked before each batch instead of `requested`, where ranks have to agree on the batch.
        """
        for batch in batches:
            if self.requested if must_stop is None else must_stop():
                raise Interrupted("SIGTERM came during the evaluation", where="training", next_step="start again to go on")
            yield batch
