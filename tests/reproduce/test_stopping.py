import os
import signal

import pytest

from hyperion.errors import HyperionError
from hyperion.reproduce.stopping import Stopped, seconds_of, stoppable, told


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("6m", 360), ("1h30m", 5400), ("1.5h", 5400), (" 2M ", 120), ("1m5s", 65)],
)
def test_durations(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "6x", "-5", "m", "1m2h", "nan"])
def test_what_is_no_duration_is_an_error(text):
    with pytest.raises(HyperionError, match="no duration"):
        seconds_of(text)


def test_told():
    assert [told(s) for s in (3, 90, 7200)] == ["3 s", "1.5 min", "2.0 h"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_stops_and_the_next_does_not_disturb(number, code):
    before = signal.getsignal(number)
    with stoppable():
        with pytest.raises(Stopped) as caught:
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
    assert caught.value.exit_code == code
    assert signal.getsignal(number) is before
