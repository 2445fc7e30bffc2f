"""Child processes: a new interpreter, with the arguments, folder, session and streams that were asked for."""

import gc
import json
import os
import signal
import sys
import textwrap

import psutil
import pytest

from hyperion.processes.child_process import child_environment, has_ended, start
from hyperion.processes.job import load_entry

pytestmark = pytest.mark.process

DESCRIBE = """
import json, os, sys
print(json.dumps({
    "arguments": sys.argv[1:], "folder": os.getcwd(), "main": __name__, "mark": os.environ.get("MARK"),
    "session": os.getsid(0) == os.getpid(), "threads": len(os.listdir("/proc/self/task")), "read": sys.stdin.read(),
    "torch": "torch" in sys.modules, "parent": os.getppid(),
}))
"""


@pytest.fixture
def module(tmp_path):
    """Writes a module that start() can name, and gives the environment to find it in."""

    def write(text: str) -> dict[str, str]:
        (tmp_path / "some_module.py").write_text(textwrap.dedent(text))
        environment = child_environment()
        return environment | {"PYTHONPATH": f"{environment['PYTHONPATH']}{os.pathsep}{tmp_path}"}

    return write


def started(environment, arguments=(), **options):
    return start(sys.executable, "some_module", list(arguments), environment, **options)


def output_of(process) -> str:
    """All that a process prints until its end, which must be a good one."""
    with process.stdout:
        text = process.stdout.read()
    assert process.wait(60) == 0, text
    return text


@pytest.mark.parametrize(("new_session", "folder"), [(False, ""), (True, "elsewhere")])
def test_a_process_has_what_it_was_started_with(module, tmp_path, new_session, folder):
    environment = module(DESCRIBE) | {"MARK": "7"}
    (tmp_path / "elsewhere").mkdir()
    options = {"new_session": new_session, "folder": folder and str(tmp_path / folder) or None}
    assert json.loads(output_of(started(environment, ["one", "two words"], **options))) == {
        "arguments": ["one", "two words"],
        "folder": str(tmp_path / folder) if folder else os.getcwd(),
        "main": "__main__",
        "mark": "7",
        "session": new_session,
        "threads": 1,
        "read": "",
        "torch": False,
        "parent": os.getpid(),
    }


def test_a_command_before_the_interpreter_starts_it(module):
    environment = module("import os; print(os.environ['MARK'])")
    assert output_of(started(environment, before=["/usr/bin/env", "MARK=8"])) == "8\n"


def test_both_streams_come_in_the_order_of_writing_and_exits_run(module):
    text = """
        import atexit, sys
        atexit.register(print, "at the end")
        print("one"); print("two", file=sys.stderr); print("three", end="")
    """
    assert output_of(started(module(text))) == "one\ntwo\nthreeat the end\n"


def test_torchruns_variables_do_not_reach_a_child(monkeypatch):
    for name in ("RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PET_NNODES", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "1")
    environment = child_environment()
    assert environment["NCCL_DEBUG"] == "1"
    assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PET_NNODES"} & set(environment)


def test_a_zombie_has_ended(module):
    process = started(module("print('here')"))
    assert process.stdout.read() == "here\n"
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is left as a zombie
    assert psutil.pid_exists(process.pid) and has_ended(process.pid)
    assert process.wait(60) == 0
    process.stdout.close()


def test_a_process_ends_with_its_launcher(module):
    text = """
        import os, sys
        from hyperion.processes.child_process import die_with
        die_with(int(sys.argv[1]))
    """
    process = started(module(text), [str(os.getpid())])
    assert output_of(process) == ""
    process = started(module(text), ["1"])
    assert "the launcher ended before" in process.stdout.read() and process.wait(60) == 1
    process.stdout.close()


def test_the_exit_code_of_a_killed_process_is_the_negative_signal(module):
    process = started(module("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    assert process.wait(60) == -signal.SIGKILL
    process.stdout.close()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_pauses_while_a_job_is_imported_and_is_then_as_before(enabled, monkeypatch, tmp_path):
    (tmp_path / "module_of_a_job.py").write_text("import gc\ndef collects(before=gc.isenabled()): return before")
    (tmp_path / "broken_job.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "module_of_a_job", raising=False)
    try:
        (gc.enable if enabled else gc.disable)()
        assert load_entry("module_of_a_job:collects")() is False
        assert gc.isenabled() is enabled
        with pytest.raises(ZeroDivisionError):
            load_entry("broken_job:function")
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
