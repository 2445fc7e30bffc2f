"""Functions of the jobs that test_job.py runs."""

import atexit
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.processes import report_progress


def double(value):
    print("doubling", value)
    report_progress(1, 2, "half way")
    return {"value": 2 * value}


def environment(names):
    return {name: os.environ.get(name) for name in names}


def leave_work_for_the_end(folder):
    threading.Thread(target=lambda: (time.sleep(0.5), (Path(folder) / "thread").touch())).start()
    atexit.register(lambda: (Path(folder) / "handler").touch())
    return {}


def fail():
    raise ValueError("the sum is wrong on purpose")


def refuse():
    raise HyperionError("the file is damaged", where="a.bin", next_step="copy it again")


class Stopped(HyperionError):
    exit_code = 75


def stop():
    raise Stopped("the state was saved")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(pid_file):
    with open(pid_file, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


def leave_a_child(pid_file):
    """Return while a child process, which keeps the pipe of the output open, still runs."""
    print("one line")
    child = subprocess.Popen(["sleep", "60"])
    Path(pid_file).write_text(str(child.pid))
    print("the last line", end="")
    return {"ok": 1}
