"""What of a notebook's output is shown, and what ends a notebook or a call early."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from hyperion.chapter.profiles import profile_names
from hyperion.commands.console import parse_duration
from hyperion.errors import HyperionError
from hyperion.reproduce.execution import (
    Alarm,
    BudgetSpent,
    LimitExceeded,
    Limits,
    LineFilter,
    Stopped,
    format_duration,
    limits_of,
    stoppable,
)
from hyperion.reproduce.notebooks import read_book


def test_banners_warnings_and_fenced_blocks_pass_however_they_are_cut():
    fence = "=" * 50
    text = f"noise\nBANNER: one\nWARNING two\nUNEXPECTED: three\n{fence}\n  DATA  four\n{fence}\nnoise\nunfinished BANNER"
    for size in (1, 7, len(text)):
        lines = []
        stream = LineFilter(lines.append, set())
        for start in range(0, len(text), size):
            stream.write(text[start : start + size])
        assert lines == ["BANNER: one", "WARNING two", "UNEXPECTED: three", fence, "  DATA  four", fence]


def test_a_data_source_is_announced_once_a_call():
    fence, lines, announced = "=" * 50, [], set()
    for source in ("four", "four", "five"):
        for stream in (LineFilter(lines.append, announced), LineFilter(lines.append, announced)):
            stream.write(f"{fence}\n  DATA  {source}\n{fence}\n{fence}\n  DATA  other\n{fence}\nBANNER: always\n")
    four, other, five = ([fence, f"  DATA  {name}", fence] for name in ("four", "other", "five"))
    always = ["BANNER: always"]
    assert lines == [*four, *other, *always, *always * 3, *five, *always, *always]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("6m", 360), ("1h30m", 5400), ("1.5h", 5400), (" 2M ", 120), ("1m5s", 65)]
)
def test_durations(text, seconds):
    assert parse_duration(text, "TIME_BUDGET") == seconds


@pytest.mark.parametrize("text", ["", "0", "6x", "-5", "m", "1m2h", "nan"])
def test_what_is_no_duration_is_an_error(text):
    with pytest.raises(HyperionError, match="not a duration") as caught:
        parse_duration(text, "CELL_TIMEOUT")
    assert caught.value.where == "CELL_TIMEOUT" and "CELL_TIMEOUT=6m" in caught.value.next_step


def test_format_duration():
    assert [format_duration(s) for s in (3, 90, 7200)] == ["3 s", "1.5 min", "2.0 h"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_stops_and_the_next_does_not_disturb(number, code):
    before = signal.getsignal(number)
    with stoppable():
        with pytest.raises(Stopped) as caught:
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
    assert caught.value.exit_code == code
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("profile", profile_names())
def test_every_profile_has_limits_far_above_what_its_slowest_chapter_is_expected_to_take(profile):
    limits = limits_of(profile, None, None, None)
    slowest = max(notebook.budget_s(profile) for notebook in read_book(Path(__file__).resolve().parents[2]))
    assert limits.cell_s >= 2 * slowest and limits.notebook_s >= 4 * slowest and limits.deadline is None


def test_limits_that_are_asked_for_replace_the_profiles():
    assert limits_of("smoke", 60.0, 90.0, 5.0) == Limits(60.0, 90.0, 5.0)
    assert limits_of("smoke", 7200.0, None, None) == Limits(7200.0, 7200.0)  # a longer cell in a notebook long enough for it


def wait_under(limits: Limits, cells: int, cell_s: float) -> int:
    """Run cells that take so long, one after the other, in an event loop; return how many finished."""
    finished = 0
    with asyncio.Runner() as runner:
        alarm = Alarm(limits, runner.get_loop())

        async def cell(number: int) -> None:
            nonlocal finished
            alarm.set(number)
            await asyncio.sleep(cell_s)
            alarm.cancel()
            finished += 1

        for number in range(1, cells + 1):
            runner.run(cell(number))
        runner.run(asyncio.sleep(2 * limits.cell_s))  # what was cancelled does not go off
    return finished


@pytest.mark.parametrize(
    ("limits", "end", "words"),
    [
        (Limits(0.2, 9.0), LimitExceeded, r"^cell \[1\] exceeded its limit of 0 s\n.*set CELL_TIMEOUT"),
        (Limits(9.0, 0.2), LimitExceeded, r"^the notebook, in cell \[1\], exceeded .*\n.*set NOTEBOOK_TIMEOUT"),
        (Limits(9.0, 9.0, 0.0), BudgetSpent, "^$"),
    ],
)
def test_the_first_of_three_ends_is_raised_in_the_middle_of_a_cell(limits, end, words):
    started = time.monotonic()
    with pytest.raises(end, match=words):
        wait_under(limits, 1, 60.0)
    assert time.monotonic() - started < 30


@pytest.mark.slow
def test_cells_within_their_limits_are_left_alone():
    try:
        finished = wait_under(Limits(0.5, 60.0, time.monotonic() + 60), cells=3, cell_s=0.01)
    except (LimitExceeded, BudgetSpent) as end:  # a KeyboardInterrupt would end pytest itself
        pytest.fail(f"a cell within its limits was ended: {end!r}")
    assert finished == 3
