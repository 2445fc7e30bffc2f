"""A real worker that serves requests: its answers, its errors, and that neither it nor its children are left behind."""

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
from hyperion.processes.child_process import child_environment, has_ended
from hyperion.processes.request_worker import RequestWorker
from tests.processes.waiting import wait_for

pytestmark = pytest.mark.process

ANSWERING = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    from hyperion.errors import HyperionError
    from hyperion.processes.request_worker import serve_requests

    print("before the first request")

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

    def hang():
        time.sleep(600)

    serve_requests({f.__name__: f for f in (double, refuse, fail, die, die_and_leave_a_child, start_a_child, hang)})
    """
)


def worker_of_launch() -> RequestWorker:
    return RequestWorker("launch 2 of B", ["-c", ANSWERING], child_environment())


def test_it_answers_or_raises_its_own_error_and_ends_with_its_children():
    with worker_of_launch() as worker:
        assert worker.call("double", 60, value=21) == {"value": 42, "read": ""}
        with pytest.raises(JobError) as error:
            worker.call("refuse", 60)
        assert str(error.value) == "launch 2 of B: the file is damaged\n  where: a.bin\n  next:  copy it again"
        with pytest.raises(JobError, match="launch 2 of B raised") as error:
            worker.call("fail", 60)
        assert "Traceback" in error.value.what and "wrong on purpose" in error.value.what
        assert "request_worker.py:" not in error.value.what  # the library's own frames are omitted
        child = worker.call("start_a_child", 60)["pid"]
        started = time.monotonic()
        with pytest.raises(JobError, match=r"gave no answer within 0\.5 s") as error:
            worker.call("hang", 0.5)
        assert "in hang" in error.value.what and time.monotonic() - started < 30
    assert has_ended(worker.pid) and wait_for(lambda: has_ended(child))


def test_the_error_of_a_worker_that_dies_has_its_signal_and_output():
    with worker_of_launch() as worker:
        with pytest.raises(JobError, match="launch 2 of B was killed by SIGKILL") as error:
            worker.call("die", 60)
        assert "the last words" in error.value.what
        with pytest.raises(JobError, match="was killed by SIGKILL"):
            worker.call("double", 60, value=1)


def test_a_worker_that_dies_is_noticed_while_its_child_lives():
    with worker_of_launch() as worker:
        worker.call("double", 60, value=1)
        with pytest.raises(JobError, match="was killed by SIGKILL"):
            worker.call("die_and_leave_a_child", 60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_its_client(number, tmp_path):
    pid_file = tmp_path / "pid"
    script = textwrap.dedent(
        f"""
        import pathlib, signal
        from tests.processes.test_request_worker import worker_of_launch
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a script starts in the background
        with worker_of_launch() as worker:
            worker.call("double", 60, value=1)
            pathlib.Path({str(pid_file)!r}).write_text(str(worker.pid))
            worker.call("hang", 600)
        """
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    client = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE)
    assert wait_for(lambda: pid_file.exists() and pid_file.read_text())
    worker = psutil.Process(int(pid_file.read_text()))
    client.send_signal(number)
    client.communicate(timeout=60)
    assert wait_for(lambda: has_ended(worker.pid))
