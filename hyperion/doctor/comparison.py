"""Test the function `hyperion.results.compare` on this machine.

The test consists of trials. A trial times two versions of a program in several new processes, which are called launches. Either
one version is slower on purpose (a planted slowdown), or both versions are the same code. `compare` must detect the slowdowns,
and must rarely report a change where there is none (a false alarm).
"""

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
# Slowdowns of at least SURE must always be confirmed. TRIALS contains pairs (slowdown, number of trials). A slowdown of 3 %
# equals the threshold of `compare`.
SURE = 0.10
TRIALS = ((0.0, 20), (SURE, 20), (0.03, 4))
# Largest accepted probability that this test fails because of false alarms although `compare` is correct.
CHANCE_OF_FAILURE = 1e-4
_NOTEBOOK, _EXPERIMENT = "doctor", "comparison"


@dataclass(frozen=True)
class Trial:
    """One comparison of version A with version B. Each version is launched five times.

    Args:
        slowdown: slowdown planted in version B, as a fraction of the time. 0 means that both versions are the same code.
        planted: name of the function that is slower in B. The other function is the same in A and B.
        compared: comparisons of both functions.
        power: sentence from `sensitivity` that says which changes this comparison could detect.
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
        """Number of functions that are the same in A and B, but for which a change was confirmed."""
        return sum(c.verdict != "same" for c in self.compared if not self.slowdown or c is not self._of(self.planted))

    def _of(self, function: str) -> Comparison:
        return next(c for c in self.compared if f" {function} " in f" {c.name} ")

    def __str__(self) -> str:
        changes = "; ".join(f"{f} {self._of(f).change:+.1%}, {self._of(f).verdict}" for f in FUNCTIONS)
        what = f"{self.slowdown:.0%} planted into {self.planted}" if self.slowdown else "the same code"
        return f"{what}: {changes}"


def try_comparison(on_line: Callable[[str], object]) -> tuple[list[Trial], Path]:
    """Run the trials in `TRIALS` and store their outcomes. Trials with different slowdowns alternate.

    Args:
        on_line: called with one line of text per trial.

    Returns:
        The trials, and the folder of the run in which they are stored.
    """
    folder = new_run_folder("comparison")
    run = Run.create(folder, run_information("comparison", "", 0))
    left, done = dict(TRIALS), []
    while any(left.values()):
        for slowdown in left:
            if left[slowdown]:
                left[slowdown] -= 1
                done.append(_run_trial(slowdown, FUNCTIONS[left[slowdown] % 2]))
                on_line(str(done[-1]))
                # Store the rows after each trial, so that an interrupted call keeps the finished trials.
                run.record(_NOTEBOOK, _EXPERIMENT, rows_of(done), frame_of(done), input_hash="trials")
    return done, folder


def rows_of(trials: list[Trial]) -> list[Row]:
    """Return two rows per slowdown.

    The values are the share of trials in which `compare` confirmed the slowdown, and the share of trials with a false alarm.
    Trials that compare equal code have no planted slowdown, so they give only the second row.
    """
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
    """Return all comparisons with the times of all launches, with which other decision rules can be tested later."""
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
    """Return two lines of text per slowdown.

    The first line contains the number of trials in which `compare` detected the slowdown, and the number of trials without a
    false alarm. The second line says which changes the last trial could detect.
    """
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
    """Return True if every planted slowdown of 10 % or more was confirmed and there were not too many false alarms.

    The rule of `compare` allows false alarms in at most 5 % of comparisons. There are too many if a rule with a rate of exactly
    5 % would give this number of false alarms or more with a probability of at most 1 in 10,000.
    """
    from scipy import stats

    alarms = sum(trial.false_alarms > 0 for trial in trials)
    # Smallest number that a rule with a rate of exactly 5 % exceeds with a probability of at most CHANCE_OF_FAILURE.
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
