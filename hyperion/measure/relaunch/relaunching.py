"""Two versions of a reader's code, relaunched: many launches of each side, all alive at once, that take turns.

Launches one after the other see different minutes of a machine, and on a shared one their medians scatter by some percent
with what else runs on it. Here every launch waits, and the parent walks them in random order, round after round, for a short
slice each. All have then lived through the same minutes, while what differs from launch to launch (addresses, hash seeds,
choices made at the start) is still in their scatter.

A round lasts a fraction of a second, and a machine's speed changes from one to the next. That change is common to all launches
of the round, of either side: each turn is divided by it (`levelled`), and a launch's time is the median of its turns then.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from hyperion.errors import HyperionError
from hyperion.hardware import Telemetry
from hyperion.hardware.telemetry import median_of
from hyperion.measure.api.answers import TimeAnswer
from hyperion.measure.api.functions import device_of
from hyperion.measure.clock.repeated import calls_that_fill
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, Timing
from hyperion.processes.child_process import child_environment
from hyperion.processes.request_worker import RequestWorker

SIDES = ("A", "B")
LAUNCHES, SECONDS = 5, 0.6
# The shorter the slices, the more rounds, and the less the machine changes within one. A turn costs a sample that is not
# counted, besides: so short is a sample then, and so long the slice at least.
_SAMPLE_S, _SLICE_S = 5e-4, 5e-3
_ASKING_S = 2e-3  # what a turn costs around it: the question, waking up, a look at the clocks
_TIMEOUT_S = 600.0  # for importing, for getting ready, and for a turn
_WORKER = ("-P", "-m", "hyperion.measure.relaunch.relaunch_worker")

Report = Callable[[int, int, str], object]
Who = tuple[str, int]  # side and number of a launch


@dataclass(frozen=True)
class Plan:
    """How the launches take turns.

    Args:
        rounds: turns of each launch.
        slice_s: seconds for which a function is sampled in a turn.
        calls: in a row for one sample, by function; the same in all launches.
        expected_s: about how long all turns take.
    """

    rounds: int
    slice_s: float
    calls: dict[str, int]
    expected_s: float


@dataclass(frozen=True)
class Launched:
    """One launch of one side.

    Args:
        side: "A" or "B".
        number: from 1.
        answers: the time of each function; a sample is the median of a turn, so that their number is that of the rounds.
        samples: every sample of every turn: columns variant, round, index, calls and time_s (seconds of a call).
        files: sha256 of the files of modules imported from the side's folder, by their path below it.
    """

    side: str
    number: int
    answers: dict[str, TimeAnswer]
    samples: pd.DataFrame = field(repr=False)
    files: dict[str, str] = field(repr=False)

    @property
    def source(self) -> str:
        """Digest of what was imported from the side's folder, "" of nothing."""
        return hashlib.sha256(repr(sorted(self.files.items())).encode()).hexdigest()[:16] if self.files else ""


@dataclass(frozen=True)
class Relaunched:
    """All launches, those of A first, and how they took turns."""

    launches: tuple[Launched, ...]
    plan: Plan

    def of(self, side: str) -> list[Launched]:
        """The launches of one side."""
        return [launched for launched in self.launches if launched.side == side]


def relaunch(
    work: Path | str,
    folder_a: Path | str,
    folder_b: Path | str,
    *,
    launches: int = LAUNCHES,
    seconds: float = SECONDS,
    report: Report = lambda done, total, note: None,
) -> Relaunched:
    """Time the functions of a file in several launches of two versions of the code that they import.

    The functions must be there in every launch at once: on a GPU, memory for all of them.

    Args:
        work: a Python file with a function `work()` that returns what is to be timed: functions without arguments, by name.
            It imports from a side's folder and what is installed, not from its own folder.
        folder_a, folder_b: what each side's launches find first on their import path: two checkouts, or one folder twice,
            which shows the noise.
        launches: of each side.
        seconds: for which each function is sampled in each launch, in all; slow functions take longer, for 30 rounds.
        report: called with (done, total, what now) as the work goes on.

    Raises:
        HyperionError: a path is missing, the file holds no such functions, a side used nothing of its folder although the
            folders differ, or a file of a side changed between its launches.
        JobError: a launch raised, died or stood still; the message names its side and number, with its traceback.
    """
    work = _file(Path(work))
    folders = {side: _folder(Path(folder)) for side, folder in zip(SIDES, (folder_a, folder_b), strict=True)}
    with contextlib.ExitStack() as stack:
        team = _Team(work, folders, stack)
        team.start(1)
        for number in range(1, launches + 1):
            report(number - 1, launches, "launching")
            if number < launches:
                team.start(number + 1)
            team.prepare(number)
            if number == 1:
                _require_use(work, folders, team.files)
        report(launches, launches, "launched")
        plan = plan_turns(team.call_s, len(team.partners), seconds)
        turns = _take_turns(team, plan, report)
    return Relaunched(tuple(_all_launched(team, plan, turns)), plan)


def plan_turns(call_s: dict[str, float], launches: int, seconds: float) -> Plan:
    """Slices as short as sampling allows: as long as two calls of the slowest function, unless that leaves fewer than 30.

    Args:
        call_s: seconds of a call, by function.
        launches: of both sides together.
    """
    rounds = max(MINIMUM_SAMPLES, int(seconds / max(_SLICE_S, 2 * max(call_s.values()))))
    slice_s, calls = seconds / rounds, {name: calls_that_fill(_SAMPLE_S, one) for name, one in call_s.items()}
    # A turn begins with a sample that is not counted, and its last one ends after the slice does.
    turn_s = sum(max(slice_s, calls[name] * one) + 1.5 * calls[name] * one + _ASKING_S for name, one in call_s.items())
    return Plan(rounds, slice_s, calls, rounds * launches * turn_s)


def levelled(times: np.ndarray) -> np.ndarray:
    """Times without what all launches of a round share: each over its round's factor, times the median of these.

    The factor is the median over the launches of both sides, each beside its own usual time. Of the times themselves the
    median would lie between the slowest of one side and the quickest of the other and follow their noise, which draws the
    sides towards each other: of 3 % a third of a percent was lost where turns scatter by 2 %.

    Args:
        times: seconds, shape (launches, rounds).

    Source: Tukey, Exploratory Data Analysis, 1977, chapter 11, for polishing by medians.
    """
    rounds = np.median(times / np.median(times, axis=1, keepdims=True), axis=0)
    return times / rounds * np.median(rounds)


class _Team:
    """The launches of both sides, by (side, number), and what they told when they were ready."""

    def __init__(self, work: Path, folders: dict[str, Path], stack: contextlib.ExitStack):
        self.work, self.folders, self.stack = work, folders, stack
        self.partners: dict[Who, RequestWorker] = {}
        self.told: dict[Who, dict] = {}

    def start(self, number: int) -> None:
        """Start one launch of each side; they import while the others get ready."""
        for side in self._pair(number):
            name = f"launch {number} of {side} ({self.folders[side].name})"
            partner = RequestWorker(name, _WORKER, environment_of(self.folders[side]))
            self.partners[side, number] = self.stack.enter_context(partner)
            partner.send("ready")

    def prepare(self, number: int) -> None:
        """Have one launch of each side load the work and warm it up, once they have imported."""
        for side in SIDES:
            self.partners[side, number].receive(_TIMEOUT_S)
        for side in self._pair(number):
            paths = {"work": str(self.work), "folder": str(self.folders[side])}
            self.told[side, number] = self.partners[side, number].call("prepare", _TIMEOUT_S, **paths)
            self.require_same_files(side, number)

    def require_same_files(self, side: str, number: int) -> None:
        """A file that was edited while launches started would make two versions of one side."""
        first = self.told[side, 1]["files"]
        for file, digest in self.told[side, number]["files"].items():
            if first.get(file, digest) != digest:
                raise HyperionError(
                    f"a file changed before launch {number} of {side} imported it",
                    where=self.folders[side] / file,
                    next_step="leave both folders as they are until all are launched, and run again",
                )

    @staticmethod
    def _pair(number: int) -> tuple[str, ...]:
        """The two sides; each is the first in every other pair, should that make a difference."""
        return SIDES if number % 2 else SIDES[::-1]

    @property
    def files(self) -> dict[str, dict[str, str]]:
        """What the first launch of each side imported from its folder."""
        return {side: self.told[side, 1]["files"] for side in SIDES}

    @property
    def call_s(self) -> dict[str, float]:
        """Seconds of a call of each function, in the launch that was quickest: others may have been disturbed.

        Raises:
            HyperionError: not all launches have the same functions.
        """
        times = [told["functions"] for told in self.told.values()]
        for who, functions_here in zip(self.told, times, strict=True):
            if functions_here.keys() != times[0].keys():
                raise HyperionError(
                    f"launch {who[1]} of {who[0]} times {', '.join(functions_here)}, another one {', '.join(times[0])}",
                    where=self.work,
                    next_step="return the same names on both sides",
                )
        return {name: min(one[name]["call_s"] for one in times) for name in times[0]}


def environment_of(folder: Path) -> dict[str, str]:
    """A launch's environment: this one, with its side's folder first on the import path."""
    inherited = child_environment()
    return inherited | {"PYTHONPATH": f"{folder}{os.pathsep}{inherited['PYTHONPATH']}"}


def _take_turns(team: _Team, plan: Plan, report: Report) -> dict[str, dict[Who, list[dict]]]:
    """What each launch told of each turn, by function and launch. One after the other has its turn, all others wait."""
    random, order = np.random.default_rng(0), sorted(team.partners)
    told = {name: {who: [] for who in order} for name in plan.calls}
    for turn in range(plan.rounds):
        report(turn, plan.rounds, f"sampling for about {plan.expected_s:.0f} s")
        for name, calls in plan.calls.items():
            for place in random.permutation(len(order)):
                asked = {"function": name, "calls": calls, "seconds": plan.slice_s}
                told[name][order[place]].append(team.partners[order[place]].call("turn", _TIMEOUT_S, **asked))
    report(plan.rounds, plan.rounds, "sampled")
    return told


def _all_launched(team: _Team, plan: Plan, turns: dict[str, dict[Who, list[dict]]]) -> Iterator[Launched]:
    device, order = device_of(None), sorted(team.partners)
    # Samples of one turn are of one moment of the machine and far from independent: a turn counts once.
    times = {
        name: levelled(np.array([[np.median(turn["samples_s"]) for turn in of[who]] for who in order]))
        for name, of in turns.items()
    }
    for place, who in enumerate(order):
        state = median_of([Telemetry(**turn["state"]) for of in turns.values() for turn in of[who]])
        warmed = team.told[who]["functions"]
        answers = {
            name: TimeAnswer(
                name,
                Timing(
                    times[name][place],
                    tuple(warmed[name]["warmup_s"]),
                    warmed[name]["warm"],
                    cold=False,
                    stopped="time limit",
                    telemetry=state,
                ),
                device,
            )
            for name in plan.calls
        }
        frames = [
            pd.DataFrame(
                {
                    "variant": name,
                    "round": number,
                    "index": range(len(turn["samples_s"])),
                    "calls": plan.calls[name],
                    "time_s": turn["samples_s"],
                }
            )
            for name, of in turns.items()
            for number, turn in enumerate(of[who])
        ]
        yield Launched(*who, answers, pd.concat(frames, ignore_index=True), team.told[who]["files"])


def _file(work: Path) -> Path:
    if not work.is_file():
        raise HyperionError("no such file", where=work, next_step="name a Python file with a function work()")
    return work.resolve()


def _folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise HyperionError("no such folder", where=folder, next_step="name the folder that is to stand first on the import path")
    if (folder / "hyperion").is_dir() and not (folder / "hyperion/measure/relaunch/relaunch_worker.py").is_file():
        raise HyperionError(
            "launches of this side would import a hyperion that cannot be relaunched",
            where=folder / "hyperion",
            next_step="name a checkout of hyperion that has this command, or the folder of other code",
        )
    return folder.resolve()


def _require_use(work: Path, folders: dict[str, Path], files: dict[str, dict[str, str]]) -> None:
    """Two folders of which one is not used would be the same code twice, under two names."""
    if folders["A"] == folders["B"]:
        return
    for side, folder in folders.items():
        if not files[side]:
            raise HyperionError(
                f"{work.name} imported nothing from the folder of side {side}: its launches would time other code",
                where=folder,
                next_step="name the folder that holds the package itself (a checkout's src/, say), and import it in work()",
            )
