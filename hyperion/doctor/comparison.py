"""Does the comparison keep its word on this machine? Trials with real launches: of the same code, and of planted slowdowns."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from hyperion.chapter.chapter import run_information
from hyperion.chapter.relaunched_runs import record_launches
from hyperion.doctor import comparison_work
from hyperion.measure import relaunch
from hyperion.results import Comparison, Row, Run, compare, new_run_folder, proportion_estimate, relaunches, sensitivity
from hyperion.results.compare import SIGNIFICANCE

FUNCTIONS = ("product", "sum")
OPERATIONS = 100
# (slowdown, trials): 20 each of the same code and of 10 %, and some of 3 %, where the threshold lies.
SURE = 0.10
TRIALS = ((0.0, 20), (SURE, 20), (0.03, 4))
# That false alarms of a comparison which keeps its word are taken for a failure.
CHANCE_OF_FAILURE = 1e-4
_NOTEBOOK, _EXPERIMENT = "doctor", "comparison"


@dataclass(frozen=True)
class Trial:
    """One comparison of A with B, five launches a side.

    Args:
        slowdown: what was planted into B, 0 for the same code.
        planted: the function that it was planted into; the other one is as in A.
        compared: both functions.
        power: the comparison's own account of what it could have seen.
    """

    slowdown: float
    planted: str
    compared: tuple[Comparison, ...]
    power: str

    @property
    def caught(self) -> bool:
        """Whether the planted slowdown was confirmed."""
        return self._of(self.planted).verdict == "regression"

    @property
    def false_alarms(self) -> int:
        """Changes that were confirmed where nothing was planted."""
        return sum(c.verdict != "same" for c in self.compared if not self.slowdown or c is not self._of(self.planted))

    def _of(self, function: str) -> Comparison:
        return next(c for c in self.compared if f" {function} " in f" {c.name} ")

    def __str__(self) -> str:
        found = "; ".join(f"{f} {self._of(f).change:+.1%}, {self._of(f).verdict}" for f in FUNCTIONS)
        what = f"{self.slowdown:.0%} planted into {self.planted}" if self.slowdown else "the same code"
        return f"{what}: {found}"


def try_comparison(on_line: Callable[[str], object], trials: tuple[tuple[float, int], ...] = TRIALS) -> tuple[list[Trial], Path]:
    """Run the trials, those of each slowdown in turn with the others, and store how they came out.

    Args:
        on_line: called with an account of each trial.
        trials: (slowdown, how many of it).

    Returns:
        The trials, and the folder of the run that holds them.
    """
    folder = new_run_folder("comparison")
    run = Run.create(folder, run_information("comparison", "", 0))
    left, done = dict(trials), []
    while any(left.values()):
        for slowdown in left:
            if left[slowdown]:
                left[slowdown] -= 1
                done.append(_tried(slowdown, FUNCTIONS[left[slowdown] % 2]))
                on_line(str(done[-1]))
                # Whatever ends the call, what was tried stands.
                run.record(_NOTEBOOK, _EXPERIMENT, rows_of(done), frame_of(done), input_hash="trials")
    return done, folder


def rows_of(trials: list[Trial]) -> list[Row]:
    """The share of trials in which what was planted was confirmed, and in which something was that was not planted."""
    rows = []
    for slowdown in sorted({trial.slowdown for trial in trials}):
        of = [trial for trial in trials if trial.slowdown == slowdown]
        counts = {"false alarm": sum(trial.false_alarms > 0 for trial in of)}
        if slowdown:
            counts["caught"] = sum(trial.caught for trial in of)
        for variant, count in counts.items():
            share = proportion_estimate(count, len(of))
            rows.append(
                Row(
                    notebook=_NOTEBOOK,
                    experiment=_EXPERIMENT,
                    variant=variant,
                    params={"slowdown": slowdown},
                    metric="share",
                    value=share.value,
                    n=share.n,
                    ci_low=share.ci_low,
                    ci_high=share.ci_high,
                )
            )
    return rows


def frame_of(trials: list[Trial]) -> pd.DataFrame:
    """Every comparison of every trial, with the time of each launch: another rule can be tried on the same launches."""
    return pd.DataFrame(
        {
            "trial": number,
            "slowdown": trial.slowdown,
            "planted": trial.planted if trial.slowdown else "",
            "name": c.name,
            "a_s": c.value_a,
            "b_s": c.value_b,
            "change": c.change,
            "spread": c.spread,
            "p_value": c.p_value,
            "verdict": c.verdict,
            "power": c.power,
            "detectable": c.detectable,
            "launches_a_s": list(c.launches_a),
            "launches_b_s": list(c.launches_b),
        }
        for number, trial in enumerate(trials)
        for c in trial.compared
    )


def conclusion(trials: list[Trial]) -> list[str]:
    """How many trials were silent and how many caught what was planted, by slowdown, with the power of the last of each."""
    lines = []
    for slowdown in sorted({trial.slowdown for trial in trials}):
        of = [trial for trial in trials if trial.slowdown == slowdown]
        silent = sum(trial.false_alarms == 0 for trial in of)
        if slowdown:
            lines.append(f"{slowdown:.0%} planted: caught in {sum(t.caught for t in of)} of {len(of)}, nothing else in {silent}")
        else:
            lines.append(f"the same code: silent in {silent} of {len(of)}")
        lines.append(f"  {of[-1].power}")
    return lines


def keeps_its_word(trials: list[Trial]) -> bool:
    """Whether every planted 10 % and more was confirmed, and false alarms were no more than the rule allows itself.

    The rule confirms something that is not there in at most 5 % of comparisons. More trials with a false alarm than that
    explains, with a chance of 1 in 10,000, are a failure.
    """
    from scipy import stats

    alarms = sum(trial.false_alarms > 0 for trial in trials)
    allowed = stats.binom.isf(CHANCE_OF_FAILURE, len(trials), SIGNIFICANCE)
    return bool(alarms <= allowed) and all(trial.caught or trial.slowdown < SURE for trial in trials)


def _tried(slowdown: float, planted: str) -> Trial:
    with tempfile.TemporaryDirectory(prefix="hyperion-comparison-") as made:
        sides = Path(made) / "as-is", Path(made) / "planted"
        for side, share in zip(sides, (0.0, slowdown), strict=True):
            side.mkdir()
            operations = {name: OPERATIONS + round(OPERATIONS * share * (name == planted)) for name in FUNCTIONS}
            (side / "planted.py").write_text(f"OPERATIONS = {operations}\n")
        work = Path(comparison_work.__file__)
        launched = record_launches(relaunch(work, *sides), work, sides, Path(made))
        compared = compare(*(relaunches(str(side)) for side in launched))
    return Trial(slowdown, planted, tuple(compared), sensitivity(compared))
