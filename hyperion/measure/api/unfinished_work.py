"""Detect work that is still running after a timed function returned, on other threads or on other GPU streams.

The measured time of such a function does not include all of its work.
"""

import concurrent.futures.thread
import contextlib
import linecache
import platform
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import torch

from hyperion.hardware import Device
from hyperion.measure.clock.timing import HarnessError

# Time in seconds that a thread needs to become idle after its work, and that a device needs to complete its last event.
_THREAD_SETTLES_S, _STREAM_SETTLES_S = 2e-3, 2e-4


class WorkLeft:
    """Detects work that is still running after a function returned, on other threads or on other GPU streams.

    Only threads that became busy after the construction of this object count. A thread is busy while it executes or sleeps. A
    thread of a `ThreadPoolExecutor` is also busy while work is waiting in the queue of its pool. A thread is idle while it waits
    in Python's queues, locks, selectors or pools, or while it is blocked in a system call and uses no CPU time. Native threads
    that Python does not know are not detected.
    """

    def __init__(self, device: Device):
        self.device = device
        self._own = threading.get_ident()
        self._before = set(self._busy())

    def after_a_call(self) -> str:
        """Return a description of the work that is still running after a call, or "" if there is none."""
        if left := self._on_other_streams():
            return left
        time.sleep(_THREAD_SETTLES_S / 8)  # a worker thread that just received work needs some time to start
        deadline = time.monotonic() + _THREAD_SETTLES_S
        while busy := self._new():
            if time.monotonic() > deadline:
                threads = {thread.ident: thread for thread in threading.enumerate()}
                works = _working([(ident, getattr(threads.get(ident), "native_id", None)) for ident in busy])
                if works is None:
                    return ""
                return f"thread {getattr(threads.get(works), 'name', works)!r} is still working after the call returned"
            time.sleep(_THREAD_SETTLES_S / 8)
        return ""

    def after_a_while(self) -> str:
        """Wait until threads that have finished their work are idle, and then return the same description as `after_a_call`."""
        time.sleep(10 * _THREAD_SETTLES_S)
        return self.after_a_call()

    def _new(self) -> list[int]:
        return [ident for ident in self._busy() if ident not in self._before]

    def _busy(self) -> Iterator[int]:
        queued = _queued()
        for ident, frame in sys._current_frames().items():
            if ident != self._own and (ident in queued or not _waits(frame)):
                yield ident

    def _on_other_streams(self) -> str:
        if self.device.kind == "cpu":
            return ""
        with torch.cuda.device(self.device.torch_device):
            # Wait for the current stream first. If the device then still needs time, other streams are working.
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
            started = time.perf_counter()
            torch.cuda.synchronize()
            waited_s = time.perf_counter() - started
        if waited_s <= _STREAM_SETTLES_S:
            return ""
        return f"the device works {waited_s * 1e3:.3g} ms longer on streams other than the current stream"


def _queued() -> set[int | None]:
    """Return the idents of all threads of each `ThreadPoolExecutor` that has work waiting in its queue.

    On a busy machine, the thread that will take the work may need many milliseconds to start. Until then, it appears to be idle.
    """
    queues = getattr(concurrent.futures.thread, "_threads_queues", {})
    return {thread.ident for thread in threading.enumerate() if thread in queues and queues[thread].qsize()}


def _working(threads: list[tuple[int, int | None]]) -> int | None:
    """Return the ident of the first busy thread, or None if no thread is busy.

    A thread is busy if at least one condition holds:

    - It is running, or it uses CPU time during this check.
    - It sleeps.
    - Work is waiting in the queue of its pool.
    - The system does not report its state.

    Threads are given as (Python's ident, native ID).
    """
    queued = _queued()
    before = [_look(native) for _, native in threads]
    time.sleep(_THREAD_SETTLES_S / 2)
    for (ident, native), old in zip(threads, before, strict=True):
        new = _look(native)
        if old is None or ident in queued:
            return ident
        if new is None:
            continue  # the thread ended
        # "R" is the state of a thread that runs or could run.
        if "R" in (old[0], new[0]) or old[1] != new[1] or _sleeps(ident, native):
            return ident
    return None


def _look(native: int | None) -> tuple[str, int] | None:
    """Return (state, CPU time) of a thread; None if the system does not report it."""
    task = Path(f"/proc/self/task/{native}")
    try:
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        with contextlib.suppress(OSError, IndexError, ValueError):
            return fields[0], int((task / "schedstat").read_text().split()[0])  # ns; `stat` has 10 ms ticks
        # utime and stime in ticks.
        return fields[0], int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return None


# Numbers of the system calls nanosleep and clock_nanosleep.
_SLEEPS = {"x86_64": ("35", "230"), "aarch64": ("101", "115")}


def _sleeps(ident: int, native: int | None) -> bool:
    """Return True if a thread that uses no CPU time sleeps. Sleeping counts as work, but waiting for other threads does not."""
    with contextlib.suppress(OSError, LookupError):
        return Path(f"/proc/self/task/{native}/syscall").read_text().split()[0] in _SLEEPS[platform.machine()]
    frame = sys._current_frames().get(ident)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno) if frame else ""
    return "sleep" in line or any(mark in line for mark in _RUNS_WORK)


# Files of the standard library in which threads wait, and source lines in them that run user code.
_WAITERS = tuple(
    f"/{name}"
    for name in (
        "threading.py",
        "queue.py",
        "selectors.py",
        "socketserver.py",
        "subprocess.py",
        "concurrent/futures/thread.py",
        "concurrent/futures/process.py",
        "concurrent/futures/_base.py",
        "multiprocessing/connection.py",
        "multiprocessing/queues.py",
        "multiprocessing/pool.py",
        "asyncio/base_events.py",
    )
)
_RUNS_WORK = ("self._target(", "self.fn(", "fn(*", "func(*", "self.task", "work_item.run(")


def _waits(frame: types.FrameType) -> bool:
    if not frame.f_code.co_filename.replace("\\", "/").endswith(_WAITERS) or _starts(frame):
        return False
    # A built-in function has no frame: `Thread(target=time.sleep)` appears at the line that calls it.
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return not any(mark in line for mark in _RUNS_WORK)


def require_nothing_left(left: list[str], label: str) -> None:
    """Raise an error if work was still running after each of several calls.

    One call is not enough to decide, because a thread may need some time to become idle after its work.

    Args:
        left: results of `WorkLeft.after_a_call`, one for each call.

    Raises:
        HarnessError: work was still running on another thread or stream, so the time does not include this work.
    """
    if left and all(left):
        raise HarnessError(
            f"{label}: {left[0]}",
            where="a timed function",
            next_step="wait inside the function for everything it starts: join threads, get results, synchronise streams",
        )


def _starts(frame: types.FrameType | None) -> bool:
    """Return True if a new thread has not reached its function yet. On a busy machine, this takes many milliseconds."""
    functions = set()
    while frame:
        functions.add(frame.f_code.co_name)
        frame = frame.f_back
    return "_bootstrap_inner" in functions and "run" not in functions
