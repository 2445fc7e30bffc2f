"""A function in a process of its own: its result or error comes back, and a crash, a hang or a killed parent leaves nothing."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from hyperion.processes import isolated as isolated_module
from hyperion.processes.child_process import has_ended
from hyperion.processes.isolated import IsolatedError, IsolatedProcess
from tests.processes.waiting import wait_for

pytestmark = pytest.mark.process


def crash() -> None:
    os.write(2, b"the last words")
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error() -> None:
    print("output of a package")
    raise KeyError("libamd_smi.so")


def hang(file: str | None = None) -> None:
    if file is not None:
        Path(file).write_text(str(os.getpid()))
    time.sleep(600)


def raise_timeout() -> None:
    raise TimeoutError("of the function")


def test_a_timeout_of_the_function_is_its_own_error_and_the_process_stays():
    with IsolatedProcess(timeout_s=30) as isolated:
        first = isolated.run(os.getpid)
        with pytest.raises(TimeoutError, match="of the function"):
            isolated.run(raise_timeout)
        assert isolated.run(os.getpid) == first


def test_a_process_that_is_never_ready_is_killed(monkeypatch):
    monkeypatch.setattr(isolated_module, "_START_S", 3.0)
    begin = time.monotonic()
    with (
        IsolatedProcess(timeout_s=1, prepare=hang) as isolated,
        pytest.raises(IsolatedError, match="the process was not ready within 3 s"),
    ):
        isolated.run(os.getpid)
    assert time.monotonic() - begin < 60  # `hang` takes 600 s


def test_results_and_errors_come_back_and_the_process_is_replaced_after_a_crash_and_a_timeout(capfd, monkeypatch):
    with IsolatedProcess(timeout_s=60) as isolated:
        first = isolated.run(os.getpid)
        assert first != os.getpid()
        with pytest.raises(KeyError, match="libamd_smi"):
            isolated.run(raise_error)
        assert isolated.run(os.getpid) == first
        with pytest.raises(IsolatedError, match="crashed; its last output: (?s:.*)the last words"):
            isolated.run(crash)
        second = isolated.run(os.getpid)
        with monkeypatch.context() as patch, pytest.raises(IsolatedError, match="within 1 s"):
            patch.setattr(isolated, "_timeout_s", 1.0)
            isolated.run(hang)
        assert len({first, second, isolated.run(os.getpid)}) == 3
    assert not Path(f"/proc/{second}").exists()
    assert capfd.readouterr() == ("", "")


def test_the_process_ends_with_a_parent_that_was_killed(tmp_path):
    file = tmp_path / "pid"
    code = (
        "from hyperion.processes.isolated import IsolatedProcess\nfrom tests.processes.test_isolated import *\n"
        f"with IsolatedProcess(600) as isolated: isolated.run(partial(hang, {str(file)!r}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    while not file.exists() or not file.read_text():
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    process = Path("/proc", file.read_text(), "stat")
    while process.exists() and process.read_text().rpartition(") ")[2][0] != "Z":  # the test times out if the process stays
        time.sleep(0.05)


def blocked_signals() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_ctrl_c_interrupts_only_the_caller_and_ends_a_function_that_takes_long(tmp_path):
    with IsolatedProcess(60) as isolated:
        assert signal.SIGINT in isolated.run(blocked_signals) and signal.SIGINT not in blocked_signals()
    file = tmp_path / "pid"
    # A shell that started the tests in the background has made them ignore SIGINT.
    code = (
        "import sys\nfrom hyperion.processes.isolated import IsolatedProcess\nfrom tests.processes.test_isolated import *\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"try:\n    with IsolatedProcess(600) as isolated: isolated.run(partial(hang, {str(file)!r}))\n"
        "except KeyboardInterrupt: sys.exit(130)"
    )
    arguments = [sys.executable, "-c", code]
    caller = subprocess.Popen(arguments, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert wait_for(lambda: caller.poll() is not None or (file.exists() and file.read_text()))
    os.killpg(caller.pid, signal.SIGINT)
    assert caller.communicate(timeout=120) == (None, "") and caller.returncode == 130
    assert wait_for(lambda: has_ended(int(file.read_text())))


def test_partial_functions_are_accepted():
    with IsolatedProcess(60) as isolated:
        assert isolated.run(partial(int, "7")) == 7
