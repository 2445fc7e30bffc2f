"""Test `compare` on this machine with real launches: it must detect planted slowdowns and raise few false alarms."""

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
# (slowdown, trials): 20 of the same code, 20 with a slowdown of 10 %, and a few with 3 %, the threshold of `compare`.
SURE = 0.10
TRIALS = ((0.0, 20), (SURE, 20), (0.03, 4))
# Probability that a correct comparison fails this test because of its false alarms.
CHANCE_OF_FAILURE = 1e-4
_NOTEBOOK, _EXPERIMENT = "doctor", "comparison"


@dataclass(frozen=True)
class Trial:
    """One comparison of A with B, five launches per side.

    Args:
        slowdown: slowdown planted into B, 0 for the same code.
        planted: the function that is slower in B; the other function is the same in A and B.
        compared: comparisons of both functions.
        power: the sentence of `sensitivity` on the changes that this comparison could detect.
    """

    slowdown: float
    planted: str
    compared: tuple[Comparison, ...]
    power: str

    @property
    def caught(self) -> bool:
        """True if the planted slowdown was confirmed."""
        return self._of(self.planted).verdict == "regression"

    @property
    def false_alarms(self) -> int:
        """Number of confirmed changes of functions that are the same in A and B."""
        return sum(c.verdict != "same" for c in self.compared if not self.slowdown or c is not self._of(self.planted))

    def _of(self, function: str) -> Comparison:
        return next(c for c in self.compared if f" {function} " in f" {c.name} ")

    def __str__(self) -> str:
        changes = "; ".join(f"{f} {self._of(f).change:+.1%}, {self._of(f).verdict}" for f in FUNCTIONS)
        what = f"{self.slowdown:.0%} planted into {self.planted}" if self.slowdown else "the same code"
        return f"{what}: {changes}"


def try_comparison(on_line: Callable[[str], object], trials: tuple[tuple[float, int], ...] = TRIALS) -> tuple[list[Trial], Path]:
    """Run the trials, alternating between the slowdowns, and store their outcomes.

    Args:
        on_line: called with one line per trial.
        trials: pairs of a slowdown and its number of trials.

    Returns:
        The trials, and the folder of the run in which they are stored.
    """
    folder = new_run_folder("comparison")
    run = Run.create(folder, run_information("comparison", "", 0))
    left, done = dict(trials), []
    while any(left.values()):
        for slowdown in left:
            if left[slowdown]:
                left[slowdown] -= 1
                done.append(_run_trial(slowdown, FUNCTIONS[left[slowdown] % 2]))
                on_line(str(done[-1]))
                # After each trial, so that an interrupted call keeps the finished ones.
                run.record(_NOTEBOOK, _EXPERIMENT, rows_of(done), frame_of(done), input_hash="trials")
    return done, folder


def rows_of(trials: list[Trial]) -> list[Row]:
    """Return by slowdown the share of trials that confirmed the planted slowdown, and the share with a false alarm."""
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
    """Return all comparisons with the times of their launches, on which other rules can be tried later."""
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
    """Return lines on the trials of each slowdown: detected slowdowns, trials without false alarm, power of the last trial."""
    lines = []
    for slowdown in sorted({trial.slowdown for trial in trials}):
        of = [trial for trial in trials if trial.slowdown == slowdown]
        silent = sum(trial.false_alarms == 0 for trial in of)
        if slowdown:
            lines.append(
                f"{slowdown:.0%} planted: detected in {sum(t.caught for t in of)} of {len(of)} trials, no false alarm in {silent}"
            )
        else:
            lines.append(f"the same code: no false alarm in {silent} of {len(of)} trials")
        lines.append(f"  {of[-1].power}")
    return lines


def is_reliable(trials: list[Trial]) -> bool:
    """Return True if every planted slowdown of 10 % or more was confirmed and false alarms were no more than allowed.

    The rule of `compare` allows a false alarm in at most 5 % of comparisons. The test fails if so many trials have a false alarm
    that a rule with 5 % would show them with a probability below 1 in 10,000.
    """
    from scipy import stats

    alarms = sum(trial.false_alarms > 0 for trial in trials)
    allowed = stats.binom.isf(CHANCE_OF_FAILURE, len(trials), SIGNIFICANCE)
    return bool(alarms <= allowed) and all(trial.caught or trial.slowdown < SURE for trial in trials)


def _run_trial(slowdown: float, planted: str) -> Trial:
    with tempfile.TemporaryDirectory(prefix="hyperion-comparison-") as folder:
        sides = Path(folder) / "as-is", Path(folder) / "planted"
        for side, share in zip(sides, (0.0, slowdown), strict=True):
            side.mkdir()
            operations = {name: OPERATIONS + round(OPERATIONS * share * (name == planted)) for name in FUNCTIONS}
            (side / "planted.py").write_text(f"OPERATIONS = {operations}\n")
        work = Path(comparison_work.__file__)
        launched = record_launches(relaunch(work, *sides), work, sides, Path(folder))
        compared = compare(*(relaunches(str(side)) for side in launched))
    return Trial(slowdown, planted, tuple(compared), sensitivity(compared))
