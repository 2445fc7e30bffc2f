import io
import time

from rich.console import Console

from hyperion.reproduce import progress
from hyperion.reproduce.progress import Display


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


def test_a_log_gets_plain_lines():
    assert show(False).splitlines() == ["[1/2] 01_x: started, 5 cells, about 1.0 min", "BANNER [x]", "01_x: done"]


def test_a_log_shows_life_while_one_cell_takes_long(monkeypatch):
    monkeypatch.setattr(progress, "_PLAIN_EVERY_S", 0.01)
    text = io.StringIO()
    with Display(Console(file=text, width=100), {"01_x": 60.0}) as display:
        display.start("01_x", 5)
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
