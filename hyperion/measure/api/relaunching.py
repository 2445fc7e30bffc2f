"""Compare two versions of code in several fresh processes per version. All processes exist at the same time.

A process is called a launch, and the two versions are called side A and side B.

If launches ran one after the other, their medians would differ by a few percent, because the load of a shared machine changes.
Therefore all launches start first and then wait. The measurement consists of rounds. In each round, the parent process lets every
launch take samples for a short time (a turn), in random order. So all launches run under the same conditions. Their times still
differ a little, because processes differ in memory addresses, in hash seeds, and in choices made at start-up.

A round takes a fraction of a second, and the speed of the machine changes between rounds. This change is common to all launches
of a round, so each time is divided by it (`normalise_rounds`). The time of a launch is the median over its turns.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hyperion.errors import HyperionError
from hyperion.hardware import Telemetry
from hyperion.hardware.telemetry import median_of
from hyperion.measure.api.answers import TimeAnswer
from hyperion.measure.api.arguments import device_of
from hyperion.measure.clock.clocks import calls_that_fill
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, Timing
from hyperion.processes.child_process import child_environment
from hyperion.processes.request_worker import RequestWorker

if TYPE_CHECKING:
    import pandas as pd

SIDES = ("A", "B")
LAUNCHES, SECONDS = 5, 0.6
# Seconds per sample, and seconds of sampling per turn (a slice). With shorter slices, rounds are shorter, and the speed of the
# machine changes less within a round. But each turn starts with one dropped sample, so a slice must be much longer than a sample.
_SAMPLE_S, _SLICE_S = 5e-4, 5e-3
_TURN_OVERHEAD_S = 2e-3  # time in each turn to send the request, wake up the launch, and read the telemetry
_TIMEOUT_S = 600.0  # timeout of the import, of the preparation, and of each turn
_WORKER = ("-P", "-m", "hyperion.measure.api.relaunch_worker")

LaunchId = tuple[str, int]  # side ("A" or "B") and number of the launch


@dataclass(frozen=True)
class TurnPlan:
    """The schedule of the turns. In a turn, one launch (a process) takes samples of its functions.

    Args:
        rounds: number of rounds. Each launch has one turn per round.
        slice_s: seconds of sampling per function in a turn.
        calls: a dict that maps the name of a function to its number of calls per sample. All launches use the same numbers.
        expected_s: approximate total duration of all turns in seconds.
    """

    rounds: int
    slice_s: float
    calls: dict[str, int]
    expected_s: float


@dataclass(frozen=True)
class Launched:
    """The result of one launch, which is a process that times one version of the code.

    Args:
        side: the measured version of the code, "A" or "B".
        number: number of the launch, counted from 1.
        answers: a dict that maps the name of a function to its time. The time has one sample per round: the median of the samples
            that this launch took in the round.
        samples: all samples of all turns. The columns are variant, round, index, calls and time_s (seconds per call).
        files: a dict that maps the path of each module file that the launch imported from the folder of its version to the
            sha256 of the file. The paths are relative to this folder.
    """

    side: str
    number: int
    answers: dict[str, TimeAnswer]
    samples: "pd.DataFrame" = field(repr=False)
    files: dict[str, str] = field(repr=False)

    @property
    def source(self) -> str:
        """Digest of `files`, or "" if the launch imported no file from the folder of its version."""
        return hashlib.sha256(repr(sorted(self.files.items())).encode()).hexdigest()[:16] if self.files else ""


@dataclass(frozen=True)
class Relaunched:
    """The results of all launches, and the schedule of the turns. The results of version A come first."""

    launches: tuple[Launched, ...]
    plan: TurnPlan

    def of(self, side: str) -> list[Launched]:
        """Return the results of all launches (processes) of one version, "A" or "B"."""
        return [launched for launched in self.launches if launched.side == side]


def relaunch(
    work: Path | str,
    folder_a: Path | str,
    folder_b: Path | str,
    *,
    launches: int = LAUNCHES,
    seconds: float = SECONDS,
    report: Callable[[int, int, str], object] = lambda done, total, note: None,
) -> Relaunched:
    """Time the functions of a file with two versions of the code that they import.

    Each version (side A and side B) is measured in several fresh processes, which are called launches. All launches exist at the
    same time, so a GPU needs enough memory for all of them.

    Args:
        work: path of a Python file with a function `work()` that returns a dict of the functions to time by name. The functions
            take no arguments. The file can import installed packages and modules of the measured version, but no modules from
            the folder that contains the file.
        folder_a, folder_b: folders of the two versions, for example two checkouts. In a launch, the folder of its version comes
            first on the import path. Pass the same folder twice to measure the noise.
        launches: number of launches of each version.
        seconds: total seconds of sampling per function and launch. Slow functions take longer, because there are at least 30
            rounds, each with at least one sample.
        report: called with (done, total, activity) to show progress.

    Raises:
        HyperionError: a path does not exist; the file has no function `work` that returns functions; the folders differ, but the
            launches of a version imported nothing from its folder; or a file changed between the launches of a version.
        JobError: a launch raised an exception, died or timed out. The message contains the side ("A" or "B"), the number of the
            launch and the traceback.
    """
    work = _file(Path(work))
    folders = {side: _folder(Path(folder)) for side, folder in zip(SIDES, (folder_a, folder_b), strict=True)}
    with contextlib.ExitStack() as stack:
        team = _Team(work, folders, stack)
        team.start(1)
        for number in range(1, launches + 1):
            report(number - 1, launches, "launching")
            # The next pair imports its modules while this pair prepares.
            if number < launches:
                team.start(number + 1)
            team.prepare(number)
            if number == 1:
                _require_use(work, folders, team.files)
        report(launches, launches, "launched")
        plan = plan_turns(team.call_s, len(team.partners), seconds)
        turns = _take_turns(team, plan, report)
    return Relaunched(tuple(_all_launched(team, plan, turns)), plan)


def plan_turns(call_s: dict[str, float], launches: int, seconds: float) -> TurnPlan:
    """Plan the number of rounds and the length of the turns.

    There are at least 30 rounds. More than 30 rounds are planned only if each slice, the sampling time of a function in a turn,
    is long enough for two calls of the slowest function.

    Args:
        call_s: a dict that maps the name of a function to the seconds of one call.
        launches: total number of launches of both versions.
    """
    rounds = max(MINIMUM_SAMPLES, int(seconds / max(_SLICE_S, 2 * max(call_s.values()))))
    slice_s, calls = seconds / rounds, {name: calls_that_fill(_SAMPLE_S, one) for name, one in call_s.items()}
    # A turn starts with one dropped sample, and its last sample ends after the slice.
    turn_s = sum(max(slice_s, calls[name] * one) + 1.5 * calls[name] * one + _TURN_OVERHEAD_S for name, one in call_s.items())
    return TurnPlan(rounds, slice_s, calls, rounds * launches * turn_s)


def normalise_rounds(times: np.ndarray) -> np.ndarray:
    """Remove the changes in speed that are common to all launches of a round. The median speed of the rounds is kept.

    Each time is first divided by the median time of its launch. The factor of a round is the median of these ratios over all
    launches. The median of the times themselves would be a bad factor: it would lie between the slowest launch of the faster
    version and the fastest launch of the slower version, and would follow the noise of these two launches. This would shrink the
    difference between the versions. For example, with a scatter of 2 % per turn, a difference of 3 % would shrink by a third of a
    percent.

    Args:
        times: seconds, shape (launches, rounds).

    Returns:
        Seconds of the same shape.

    Source of the method (median polish): Tukey, Exploratory Data Analysis, 1977, chapter 11.
    """
    rounds = np.median(times / np.median(times, axis=1, keepdims=True), axis=0)
    return times / rounds * np.median(rounds)


class _Team:
    """The running launches of both versions. A launch is a process that times one version of the code.

    Attributes:
        partners: a dict that maps (side, number of the launch) to the connection with its process.
        prepared: a dict that maps (side, number of the launch) to the launch's answer to the request `prepare`.
    """

    def __init__(self, work: Path, folders: dict[str, Path], stack: contextlib.ExitStack):
        self.work, self.folders, self.stack = work, folders, stack
        self.partners: dict[LaunchId, RequestWorker] = {}
        self.prepared: dict[LaunchId, dict] = {}

    def start(self, number: int) -> None:
        """Start one launch of each version. The new launches import their modules while earlier launches prepare."""
        for side in self._pair(number):
            name = f"launch {number} of {side} ({self.folders[side].name})"
            partner = RequestWorker(name, _WORKER, environment_of(self.folders[side]))
            self.partners[side, number] = self.stack.enter_context(partner)
            partner.send("ready")

    def prepare(self, number: int) -> None:
        """Make one launch of each version load its functions and warm them up."""
        for side in SIDES:
            self.partners[side, number].receive(_TIMEOUT_S)
        for side in self._pair(number):
            paths = {"work": str(self.work), "folder": str(self.folders[side])}
            self.prepared[side, number] = self.partners[side, number].call("prepare", _TIMEOUT_S, **paths)
            self.require_same_files(side, number)

    def require_same_files(self, side: str, number: int) -> None:
        """Raise an error if a file changed between the launches of a side, because these launches would time different code."""
        first = self.prepared[side, 1]["files"]
        for file, digest in self.prepared[side, number]["files"].items():
            if first.get(file, digest) != digest:
                raise HyperionError(
                    f"this file was changed before launch {number} of {side} imported it",
                    where=self.folders[side] / file,
                    next_step="repeat the measurement, and do not edit the folders until all launches have started",
                )

    @staticmethod
    def _pair(number: int) -> tuple[str, ...]:
        """Return "A" and "B" in the order in which their launches start. The order alternates, in case it affects the times."""
        return SIDES if number % 2 else SIDES[::-1]

    @property
    def files(self) -> dict[str, dict[str, str]]:
        """A dict that maps a side ("A" or "B") to the attribute `files` of the first launch of this side."""
        return {side: self.prepared[side, 1]["files"] for side in SIDES}

    @property
    def call_s(self) -> dict[str, float]:
        """A dict that maps the name of a function to its seconds per call in the fastest launch.

        The fastest launch is used, because other processes may have slowed down the others.

        Raises:
            HyperionError: not all launches have the same functions.
        """
        times = [answer["functions"] for answer in self.prepared.values()]
        for who, functions_here in zip(self.prepared, times, strict=True):
            if functions_here.keys() != times[0].keys():
                raise HyperionError(
                    f"work() returned different functions: {', '.join(functions_here)} in launch {who[1]} of side {who[0]}, "
                    f"and {', '.join(times[0])} in another launch",
                    where=self.work,
                    next_step="let work() return functions with the same names in all launches",
                )
        return {name: min(one[name]["call_s"] for one in times) for name in times[0]}


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment variables of a launch. They put `folder` first on the import path."""
    inherited = child_environment()
    return inherited | {"PYTHONPATH": f"{folder}{os.pathsep}{inherited['PYTHONPATH']}"}


def _take_turns(team: _Team, plan: TurnPlan, report: Callable[[int, int, str], object]) -> dict[str, dict[LaunchId, list[dict]]]:
    """Run all turns, one launch at a time.

    Returns:
        For each function name, a dict that maps a launch to its list of answers, one per turn.
    """
    random, order = np.random.default_rng(0), sorted(team.partners)
    turns = {name: {who: [] for who in order} for name in plan.calls}
    for turn in range(plan.rounds):
        report(turn, plan.rounds, f"sampling for about {plan.expected_s:.0f} s")
        for name, calls in plan.calls.items():
            # The order changes in each round. With a fixed order, a launch would always run directly after the same other launch,
            # and would find the caches in the state that the other launch left.
            for place in random.permutation(len(order)):
                options = {"function": name, "calls": calls, "seconds": plan.slice_s}
                turns[name][order[place]].append(team.partners[order[place]].call("turn", _TIMEOUT_S, **options))
    report(plan.rounds, plan.rounds, "sampled")
    return turns


def _all_launched(team: _Team, plan: TurnPlan, turns: dict[str, dict[LaunchId, list[dict]]]) -> Iterator[Launched]:
    import pandas as pd  # imported here, because the processes of the launches need no tables

    device, order = device_of(None), sorted(team.partners)
    # The samples of one turn are not independent, so each turn contributes one value.
    times = {
        name: normalise_rounds(np.array([[np.median(turn["samples_s"]) for turn in of[who]] for who in order]))
        for name, of in turns.items()
    }
    for place, who in enumerate(order):
        state = median_of([Telemetry(**turn["state"]) for of in turns.values() for turn in of[who]])
        warmed = team.prepared[who]["functions"]
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
        yield Launched(*who, answers, pd.concat(frames, ignore_index=True), team.prepared[who]["files"])


def _file(work: Path) -> Path:
    if not work.is_file():
        raise HyperionError("no such file", where=work, next_step="pass a Python file with a function work()")
    return work.resolve()


def _folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise HyperionError("no such folder", where=folder, next_step="pass the folder to put first on the import path")
    if (folder / "hyperion").is_dir() and not (folder / "hyperion/measure/api/relaunch_worker.py").is_file():
        raise HyperionError(
            "the version of hyperion in this folder does not support relaunch",
            where=folder / "hyperion",
            next_step="pass a checkout of hyperion that has the function relaunch, or a folder with other code",
        )
    return folder.resolve()


def _require_use(work: Path, folders: dict[str, Path], files: dict[str, dict[str, str]]) -> None:
    """Raise an error if the launches of a side imported nothing from its folder, because they would time other code."""
    if folders["A"] == folders["B"]:
        return
    for side, folder in folders.items():
        if not files[side]:
            raise HyperionError(
                f"{work.name} imported nothing from the folder of side {side}, so it would time code from another place",
                where=folder,
                next_step="pass the folder that contains the package (such as src/ of a checkout), and import it in work()",
            )
