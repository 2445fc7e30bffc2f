import io
import time

import pytest
from rich.console import Console

from hyperion.reproduce import display
from hyperion.reproduce.display import Display, TableLine, best_fraction, show_failure, show_table
from hyperion.reproduce.execution import NotebookFailure
from hyperion.reproduce.notebooks import read_notebook
from hyperion.results import Row
from tests.reproduce.small_book import write_notebook


def show(terminal: bool) -> str:
    text = io.StringIO()
    with Display(Console(file=text, force_terminal=terminal, width=100), {"01_x": 60.0, "02_y": 120.0}) as display:
        display.start("01_x", 5)
        assert 179 < display.left_s() <= 180
        display.cell("01_x", 3)
        display.say("BANNER [x]")
        display.finish("01_x", "01_x: done")
        assert display.left_s() == 120
        display.drop("02_y")
        assert display.left_s() == 0
    return text.getvalue()


def test_the_time_left_follows_how_long_notebooks_have_taken(monkeypatch):
    now = 0.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    quiet = Console(file=io.StringIO(), force_terminal=True)
    with Display(quiet, {"01_x": 60.0, "02_y": 120.0}) as progress:
        progress.start("01_x", 5)
        assert progress.left_s() == 180
        now = 150.0  # late, by more than the whole prior
        pace = (30 + 150) / (30 + 60)
        assert progress.left_s() == pytest.approx(120 * pace + 150 / 4)
        now = 180.0
        progress.finish("01_x", "done", whole=True)
        assert progress.left_s() == pytest.approx(120 * (30 + 180) / (30 + 60))
    with Display(quiet, {"01_x": 60.0, "02_y": 120.0}) as progress:
        progress.start("01_x", 5)
        now += 5
        progress.finish("01_x", "failed at once", whole=False)  # says nothing about the other
        assert progress.left_s() == 120


@pytest.mark.parametrize("takes_s", [55, 100, 150, 260])
def test_the_expected_total_is_at_most_two_times_too_long_or_too_short(takes_s, monkeypatch):
    """130 s are expected, and the notebook takes from half to twice as long."""
    now = 0.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    with Display(Console(file=io.StringIO(), force_terminal=True), {"01_x": 130.0}) as progress:
        progress.start("01_x", 5)
        wrong = [2.0]
        while now < takes_s:
            total = now + progress.left_s()
            wrong.append(max(total / takes_s, takes_s / total))
            now += 1.0
    assert max(wrong) <= (130 / 55 if takes_s == 55 else 2)


def test_a_log_gets_plain_lines():
    assert show(False).splitlines() == ["[1/2] 01_x: started, 5 cells, about 1.0 min", "BANNER [x]", "01_x: done"]


def test_a_log_shows_life_while_one_cell_takes_long(monkeypatch):
    monkeypatch.setattr(display, "_LOG_INTERVAL_S", 0.01)
    text = io.StringIO()
    with Display(Console(file=text, width=100), {"01_x": 60.0}) as progress:
        progress.start("01_x", 5)
        while "cell 1/5" not in text.getvalue():
            time.sleep(0.01)
    assert "left in all" in text.getvalue()


def test_a_terminal_that_cannot_draw_gets_the_lines_of_a_log(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert "[1/2] 01_x: started, 5 cells, about 1.0 min" in show(True).splitlines()


def test_a_terminal_gets_bars_with_the_time_left(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = show(True)
    assert "notebooks" in text and "left" in text and "BANNER [x]" in text


def rate(value, limit, metric="bandwidth_gb_s", **columns):
    return Row(notebook="n", experiment="e", variant="v", metric=metric, value=value, limit=limit, **columns)


def test_the_best_fraction_is_that_of_the_rate_nearest_its_limit():
    rows = [rate(50, 100), rate(90, 100, "gemm_tflops", dtype="bfloat16"), rate(80, None), rate(None, 100)]
    assert best_fraction(rows) == "90% (gemm_tflops bfloat16)"
    assert best_fraction([rate(0.99, 1, "accuracy"), rate(1.0, 1.0, "perplexity_token")]) == ""


def test_the_table_shows_notes_as_they_are_and_fits_a_log():
    text = io.StringIO()
    lines = {"01_x": TableLine("failed", 3.2, [rate(50, 100)], "KeyError: [red]"), "02_y": TableLine("unfinished", None, [])}
    show_table(Console(file=text, width=40), lines)
    assert "KeyError: [red]" in text.getvalue() and "50% (bandwidth_gb_s)" in text.getvalue()


def test_a_fault_is_told_with_cell_traceback_and_copy(tmp_path):
    notebook = read_notebook(write_notebook(tmp_path / "phase1_x", "01_x", ["1"]))
    lines = []
    show_failure(lines.append, notebook, NotebookFailure("ValueError: why", 4, "\n".join(map(str, range(100)))), tmp_path)
    assert lines[0] == "FAILED phase1_x/01_x.ipynb, cell In [4]: ValueError: why"
    assert "    99" in lines and "    1" not in lines
    assert lines[-1].endswith("notebooks/01_x.ipynb")


def test_an_error_in_its_own_words_keeps_its_lines(tmp_path):
    notebook = read_notebook(write_notebook(tmp_path / "phase1_x", "01_x", ["1"]))
    lines = []
    show_failure(lines.append, notebook, NotebookFailure("DataError: why\n  where: a.bin\n  next:  copy it", 3), tmp_path)
    assert lines[:3] == ["FAILED phase1_x/01_x.ipynb, cell In [3]: DataError: why", "      where: a.bin", "      next:  copy it"]
