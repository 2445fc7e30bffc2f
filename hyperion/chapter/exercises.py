"""Exercises that mark themselves: the reader writes a check or a timer, and mutants broken on purpose try to get past it."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import pandas as pd
import torch

from hyperion.models import TransformerConfig, TransformerLM

Subject = TypeVar("Subject")


def mutation_score(check: Callable[[Subject], bool], clean: Subject, mutants: Mapping[str, Subject]) -> pd.DataFrame:
    """Let `check` judge one sound subject and several broken ones.

    Args:
        check: returns True for a subject it finds sound. An exception counts as False: it did object.
        clean: the sound subject, which must pass.
        mutants: broken subjects by what is wrong with them, each of which must be caught.

    Returns:
        One line a subject: what it is, what the check said, and whether that was right.
    """
    lines = [("sound", clean, True), *((name, mutant, False) for name, mutant in mutants.items())]
    verdicts = [(name, _verdict(check, subject), wanted) for name, subject, wanted in lines]
    return pd.DataFrame(
        [{"subject": name, "your check says sound": said, "right": said == wanted} for name, said, wanted in verdicts]
    )


def solved(score: pd.DataFrame) -> bool:
    """Whether every subject was judged rightly."""
    return bool(score["right"].all())


def judge_number(answer: float | None, expected: float, hint: str, tolerance: float = 0.01) -> str:
    """Mark a number.

    Args:
        answer: the reader's, None while there is none.
        expected: the right one.
        hint: shown when the answer is wrong.
        tolerance: relative difference that still counts as right.
    """
    if answer is None:
        return "not answered yet: set `answer` and run the cell again"
    if abs(answer - expected) <= tolerance * abs(expected):
        return "right"
    return f"{answer:g} is not it. Hint: {hint}"


class ToyDevice:
    """A device that, like a GPU, returns from a call before the work is done. Its first call is slow, like a compile.

    `launch()` queues 5 ms of work, `synchronize()` waits until the queue is empty.
    """

    work_s = 5e-3
    first_call_s = 0.2

    def __init__(self):
        self._queue: queue.Queue = queue.Queue()
        self._warm = False
        self.launches = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def launch(self) -> None:
        """Queue one unit of work and return at once."""
        self.launches += 1
        self._queue.put(self.work_s if self._warm else self.first_call_s)
        self._warm = True

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        self._queue.join()

    def _serve(self) -> None:
        while True:
            time.sleep(self._queue.get())
            self._queue.task_done()


def judge_timer(my_timer: Callable[[ToyDevice], float]) -> pd.DataFrame:
    """Judge a timer on a toy device: does it wait, does it warm up, does it repeat?

    Args:
        my_timer: takes a ToyDevice, returns the seconds that one `launch()` takes once warm.

    Returns:
        One line a fault: whether the timer is free of it, and what was seen.
    """
    device = ToyDevice()
    seconds = float(my_timer(device))
    faults = {
        "stops the clock before the work is done": (seconds >= 0.8 * device.work_s, f"{seconds * 1e3:.2f} ms"),
        "counts the first, slow call": (seconds <= 4 * device.work_s, f"{seconds * 1e3:.2f} ms"),
        "takes fewer than 10 samples": (device.launches >= 10, f"{device.launches} launches"),
    }
    return pd.DataFrame([{"fault": name, "right": bool(free), "seen": seen} for name, (free, seen) in faults.items()])


class _UnmaskedLM(torch.nn.Module):
    """A TransformerLM whose attention sees the future: each output position reads the whole sequence's mean."""

    def __init__(self, model: TransformerLM):
        super().__init__()
        self.model = model

    def forward(self, inputs_BT: torch.Tensor) -> torch.Tensor:
        logits_BTV = self.model(inputs_BT)
        return logits_BTV + logits_BTV.mean(dim=1, keepdim=True)


class _ShiftedLM(_UnmaskedLM):
    """A model fed one token too many: the logits at t were computed with token t + 1 in sight."""

    def forward(self, inputs_BT: torch.Tensor) -> torch.Tensor:
        return torch.roll(self.model(inputs_BT), shifts=-1, dims=1)


def judge_leak_check(my_check: Callable[[torch.nn.Module], bool]) -> pd.DataFrame:
    """Judge a check that says whether a language model keeps the future hidden.

    Args:
        my_check: takes a model (int64 ids [B, 16] of a vocabulary of 32 to logits [B, 16, 32]), returns True when the
            logits at t do not depend on any token after t.
    """
    torch.manual_seed(0)
    model = TransformerLM(TransformerConfig(vocab_size=32, context=16, width=32, heads=2, layers=1)).eval()
    return mutation_score(
        my_check, model, {"attention without a mask": _UnmaskedLM(model), "targets off by one": _ShiftedLM(model)}
    )


def _verdict(check: Callable[[Subject], bool], subject: Subject) -> bool:
    try:
        return bool(check(subject))
    except Exception as objection:  # the reader's own code may raise anything; that is a "no" with a reason
        print(f"your check raised {type(objection).__name__}: {objection}")
        return False
