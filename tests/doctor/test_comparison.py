"""The account of the comparison's trials: what counts as silent, as caught and as a false alarm; and what the trials time."""

import sys

import pytest
import torch

from hyperion.doctor.comparison import FUNCTIONS, Trial, conclusion, frame_of, is_reliable, rows_of
from hyperion.doctor.comparison_work import work
from hyperion.results import Comparison


def trial(slowdown: float, **verdicts: str) -> Trial:
    """One whose slowdown was planted into the sum."""
    compared = tuple(
        Comparison(
            f'comparison_work {name} {{"cache": "hot"}}',
            "call_time_s",
            1.0,
            1.1,
            -0.09,
            0.01,
            0.001,
            verdicts.get(name, "same"),
            0.4,
            0.05,
            launches_a=(1.0, 1.01),
            launches_b=(1.1, 1.11),
        )
        for name in FUNCTIONS
    )
    return Trial(slowdown, "sum", compared, "power: some")


SILENT, FALSE_ALARM = trial(0.0), trial(0.0, product="improvement")
CAUGHT, MISSED, BOTH = trial(0.1, sum="regression"), trial(0.1), trial(0.1, sum="regression", product="regression")


@pytest.mark.parametrize(
    ("trials", "kept"),
    [
        ([SILENT, CAUGHT, trial(0.03)], True),
        ([SILENT, MISSED], False),
        # Of 44 trials a rule with 5 % has more than 9 false alarms with a chance of less than 1e-4.
        ([FALSE_ALARM] * 9 + [SILENT] * 15 + [CAUGHT] * 20, True),
        ([FALSE_ALARM] * 10 + [SILENT] * 14 + [CAUGHT] * 20, False),
        ([SILENT] * 34 + [BOTH] * 10, False),
    ],
)
def test_the_word_is_kept_when_every_ten_percent_is_caught_and_false_alarms_are_as_rare_as_stated(trials, kept):
    assert is_reliable(trials) is kept


def test_rows_and_words_count_what_was_caught_and_what_was_not_there():
    trials = [SILENT, FALSE_ALARM, CAUGHT, MISSED, BOTH]
    rows = {(row.variant, row.params["slowdown"]): (row.value, row.n) for row in rows_of(trials)}
    assert rows == {("false alarm", 0.0): (0.5, 2), ("false alarm", 0.1): (1 / 3, 3), ("caught", 0.1): (2 / 3, 3)}
    for row in rows_of(trials):
        row.validate()
    said = "\n".join(conclusion(trials))
    assert "the same code: no false alarm in 1 of 2 trials" in said
    assert "10% planted: detected in 2 of 3 trials, no false alarm in 2" in said
    assert len(frame_of(trials)) == 2 * len(trials)
    assert frame_of(trials)["launches_a_s"].tolist() == [[1.0, 1.01]] * 2 * len(trials)


def test_what_the_trials_time_does_as_many_operations_as_the_side_says(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text('OPERATIONS = {"product": 2, "sum": 3}')
    monkeypatch.syspath_prepend(str(tmp_path))
    threads, called = torch.get_num_threads(), []
    try:
        functions = work()
    finally:
        torch.set_num_threads(threads)
        sys.modules.pop("planted")
    for name in ("mm", "sum"):
        monkeypatch.setattr(torch, name, lambda *_, of=name, **__: called.append(of))
    for name in FUNCTIONS:
        functions[name]()
    assert called == ["mm"] * 2 + ["sum"] * 3
