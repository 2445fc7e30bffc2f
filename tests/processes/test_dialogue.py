"""A real process that is asked: what it answers, how it fails, and that neither it nor its children stay behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from hyperion.processes import JobError
from hyperion.processes.dialogue import Partner
from hyperion.processes.lifeline import child_environment, has_ended
from tests.processes.waiting import wait_for

pytestmark = pytest.mark.process

ANSWERING = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    from hyperion.errors import HyperionError
    from hyperion.processes.dialogue import answer_questions

    print("before the first question")

    def double(value):
        print("to the log, not into the answer")
        return {"value": 2 * value, "read": sys.stdin.read()}

    def refuse():
        raise HyperionError("the file is damaged", where="a.bin", next_step="copy it again")

    def fail():
        raise ValueError("the sum is wrong on purpose")

    def die():
        print("the last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def die_and_leave_a_child():
        if os.fork() == 0:
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)

    def start_a_child():
        return {"pid": subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid}

    def stand_still():
        time.sleep(600)

    answer_questions({f.__name__: f for f in (double, refuse, fail, die, die_and_leave_a_child, start_a_child, stand_still)})
    """
)


def partner() -> Partner:
    return Partner("launch 2 of B", ["-c", ANSWERING], child_environment())


def test_it_answers_in_its_own_words_and_takes_its_children_along():
    with partner() as asked:
        assert asked.ask("double", 60, value=21) == {"value": 42, "read": ""}
        with pytest.raises(JobError) as error:
            asked.ask("refuse", 60)
        assert str(error.value) == "launch 2 of B: the file is damaged\n  where: a.bin\n  next:  copy it again"
        with pytest.raises(JobError, match="launch 2 of B raised") as error:
            asked.ask("fail", 60)
        assert "Traceback" in error.value.what and "wrong on purpose" in error.value.what
        assert "dialogue.py" not in error.value.what  # the way through the library helps no reader
        child = asked.ask("start_a_child", 60)["pid"]
        started = time.monotonic()
        with pytest.raises(JobError, match=r"gave no answer within 0\.5 s") as error:
            asked.ask("stand_still", 0.5)
        assert "in stand_still" in error.value.what and time.monotonic() - started < 30
    assert has_ended(asked.pid) and wait_for(lambda: has_ended(child))


def test_one_that_dies_is_named_with_its_signal_and_what_it_printed():
    with partner() as asked:
        with pytest.raises(JobError, match="launch 2 of B was killed by SIGKILL") as error:
            asked.ask("die", 60)
        assert "the last words" in error.value.what
        with pytest.raises(JobError, match="was killed by SIGKILL"):
            asked.ask("double", 60, value=1)


def test_one_that_dies_is_named_though_a_process_that_it_forked_lives_on():
    with partner() as asked:
        asked.ask("double", 60, value=1)
        with pytest.raises(JobError, match="was killed by SIGKILL"):
            asked.ask("die_and_leave_a_child", 60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_the_one_that_asks(number, tmp_path):
    pid_file = tmp_path / "pid"
    script = textwrap.dedent(
        f"""
        import pathlib, signal
        from tests.processes.test_dialogue import partner
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a script starts in the background
        with partner() as asked:
            asked.ask("double", 60, value=1)
            pathlib.Path({str(pid_file)!r}).write_text(str(asked.pid))
            asked.ask("stand_still", 600)
        """
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    asking = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE)
    assert wait_for(lambda: pid_file.exists() and pid_file.read_text())
    asked = psutil.Process(int(pid_file.read_text()))
    asking.send_signal(number)
    asking.communicate(timeout=60)
    assert wait_for(lambda: has_ended(asked.pid))
