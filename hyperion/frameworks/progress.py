"""Progress of runs: the estimated time left, and the event log events.jsonl in the folder of the result files."""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from hyperion.errors import HyperionError
from hyperion.forms import FieldError, read_form
from hyperion.frameworks.plan import Plan
from hyperion.frameworks.result import Count, Framework, Text
from hyperion.untrusted import parse_json, printable, read_bounded

EVENTS = "events.jsonl"
EVENT_INTERVAL_S = 5.0
_NEXT_STEP = "correct or delete this line, or move the file away"


class EventError(HyperionError):
    """Raised if a line of an event log does not follow the form."""


@dataclass(frozen=True)
class Event:
    """A line of the event log, as a JSON object without the fields that have their default values.

    Args:
        time: time in UTC, such as 2026-01-31T12:00:00+00:00.
        event: what happened to the combination.
        file: name of its result file.
        platform, framework, model: the combination.
        step, steps: number of finished steps and number of all steps, for the event "progress".
        loss: loss of rank 0 in this step, if rank 0 knows it. A loss that is not finite is a string, because JSON has no such
            number.
        reason: why the combination failed or is unavailable.
    """

    time: Text
    event: Literal["started", "progress", "trained", "failed", "unavailable", "finished before"]
    file: Text
    platform: Literal["amd", "nvd", "cpu"]
    framework: Framework
    model: Text
    step: Count | None = None
    steps: Count | None = None
    loss: float | Literal["nan", "inf", "-inf"] | None = None
    reason: str = ""

    def __post_init__(self):
        if datetime.fromisoformat(self.time).utcoffset() != timedelta(0):
            raise ValueError(f"time must be in UTC, not {self.time!r}")
        if (self.event == "progress") != (self.step is not None) or (self.step is None) != (self.steps is None):
            raise ValueError("step and steps belong to each progress event, and to no other event")
        if (self.event in ("failed", "unavailable")) != bool(self.reason):
            raise ValueError("reason belongs to each event failed or unavailable, and to no other event")


def append_event(folder: Path, plan: Plan, event: str, reason: str = "", **values: Any) -> None:
    """Append an event of a plan to the event log of a folder, which is created if it does not exist.

    If this fails, for example because the disk is full, print a warning: the training and its result matter more than the log.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    names = (plan.file_name, plan.platform, plan.framework, plan.model)
    document = asdict(Event(now, event, *names, **values, reason=printable(reason)))  # type: ignore[arg-type]
    line = json.dumps({name: value for name, value in document.items() if value not in (None, "")}) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A single write of the whole line, so that a runner that is killed leaves complete lines.
        with open(folder / EVENTS, "ab", buffering=0) as file:
            file.write(line.encode())
    except OSError as error:
        print(f"WARNING: the event {event!r} is not in {folder / EVENTS}: {error.strerror}", file=sys.stderr)


def read_events(path: Path) -> list[Event]:
    """Return the events of an event log.

    Raises:
        EventError: a line does not follow the form. The message names the line and the field.
    """
    events = []
    for number, line in enumerate(read_bounded(path, EventError, _NEXT_STEP).splitlines(), 1):
        where = f"{path}: line {number}"
        try:
            events.append(read_form(Event, parse_json(line, EventError, _NEXT_STEP, where), "event"))
        except FieldError as error:
            raise EventError(error.what, where=where, next_step=_NEXT_STEP) from error
    return events


@dataclass(frozen=True)
class Progress:
    """Progress of a run: finished steps, all steps, loss of rank 0, and estimated seconds left. None means unknown."""

    step: int
    steps: int
    loss: float | None
    left_s: float | None


class StepReporter:
    """Passes the progress of a run to a function, and writes a progress event at most every 5 s.

    Args:
        plan: the plan of the run.
        folder: folder of the event log.
        on_progress: function that gets the plan and its progress.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        on_progress: Callable[[Plan, Progress], object],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._plan, self._folder, self._on_progress, self._clock = plan, folder, on_progress, clock
        self._first: tuple[int, float] | None = None
        self._event_s = -math.inf

    def __call__(self, step: int, loss: float | None) -> None:
        """Report that the steps 1 to `step` are finished."""
        now_s, steps = self._clock(), self._plan.work["steps"]
        # The estimate starts at the first report, because the time before it is mostly start-up time.
        first_step, first_s = self._first = self._first or (step, now_s)
        left_s = (steps - step) * (now_s - first_s) / (step - first_step) if step > first_step else None
        self._on_progress(self._plan, Progress(step, steps, loss, left_s))
        if now_s - self._event_s >= EVENT_INTERVAL_S:
            self._event_s = now_s
            stated = loss if loss is None or math.isfinite(loss) else str(loss)
            append_event(self._folder, self._plan, "progress", step=step, steps=steps, loss=stated)
