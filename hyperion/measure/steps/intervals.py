"""Whose is each moment of a stretch of time: interval arithmetic on traces, in whole nanoseconds, so that nothing is lost."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

NOBODY = "unexplained"


@dataclass(frozen=True)
class Event:
    """Something that went on from start to end.

    Args:
        name: of the kernel, operator or region.
        start_ns, end_ns: on one clock for all events; an event that ends where it starts takes no time.
        stream: the queue or thread it ran on.
        kind: what it counts as.
    """

    name: str
    start_ns: int
    end_ns: int
    stream: int | str
    kind: str


def partition(events: Iterable[Event], start_ns: int, end_ns: int, order: Sequence[str]) -> dict[str, int]:
    """Nanoseconds of each kind within a window. Each moment belongs to one kind: of those going on, the first in `order`.

    Moments at which nothing goes on are `unexplained`. The values are at least 0 and add up to the window exactly, however
    many events overlap.

    Args:
        order: all kinds there are; a kind that is listed before another hides it.

    Raises:
        ValueError: an event of a kind that `order` lacks, or one that ends before it starts.
    """
    changes: dict[int, Counter] = {start_ns: Counter(), end_ns: Counter()}
    for event in events:
        if event.kind not in order or event.end_ns < event.start_ns:
            raise ValueError(f"{event} is of no kind in {tuple(order)}, or ends before it starts")
        first, last = max(event.start_ns, start_ns), min(event.end_ns, end_ns)
        if first < last:
            changes.setdefault(first, Counter())[event.kind] += 1
            changes.setdefault(last, Counter())[event.kind] -= 1
    parts = dict.fromkeys((*order, NOBODY), 0)
    going_on: Counter = Counter()
    for moment, following in pairwise(sorted(changes)):
        going_on.update(changes[moment])
        parts[next((kind for kind in order if going_on[kind] > 0), NOBODY)] += following - moment
    return parts


def innermost(events: Iterable[Event]) -> list[Event]:
    """The events of each stream cut into pieces, each moment given to the event that began last.

    What is left of an operator is its own time, without that of the operators it calls.
    """
    pieces: list[Event] = []
    streams: dict[int | str, list[Event]] = {}
    for event in events:
        streams.setdefault(event.stream, []).append(event)
    for nested in streams.values():
        pieces += _cut(sorted(nested, key=lambda event: (event.start_ns, -event.end_ns)))
    return pieces


def _cut(events: list[Event]) -> list[Event]:
    pieces: list[Event] = []
    open_events: list[Event] = []
    covered = events[0].start_ns

    def give_to_last(until: int) -> None:
        nonlocal covered
        if covered < until:
            pieces.append(replace(open_events[-1], start_ns=covered, end_ns=until))
            covered = until

    def close_all_before(moment: float) -> None:
        while open_events and open_events[-1].end_ns <= moment:
            give_to_last(open_events[-1].end_ns)
            open_events.pop()

    for event in events:
        close_all_before(event.start_ns)
        if open_events:
            give_to_last(event.start_ns)
        covered = max(covered, event.start_ns)
        open_events.append(event)
    close_all_before(float("inf"))
    return pieces
