"""Workers that a fork server makes: the same processes as those that are started, sooner."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from hyperion.processes import fork_server
from hyperion.processes.lifeline import child_environment, has_ended
from hyperion.processes.starting import SOCKET, Forked, fork_server_running, start
from tests.processes.waiting import wait_for

TELLS = """
import json, os, sys
print(json.dumps({
    "arguments": sys.argv[1:], "folder": os.getcwd(), "paths": sys.path, "main": __name__, "mark": os.environ.get("MARK"),
    "session": os.getsid(0) == os.getpid(), "threads": len(os.listdir("/proc/self/task")), "read": sys.stdin.read(),
    "loaded": [name for name in sys.modules if name.startswith("hyperion")], "torch": "torch" in sys.modules,
    "files": sorted(int(name) for name in os.listdir("/proc/self/fd")),
}))
print("told", file=sys.stderr)
"""


@pytest.fixture
def module(tmp_path):
    """Writes a module that start() can name, and gives the environment to find it in."""

    def write(text: str) -> dict[str, str]:
        (tmp_path / "told_module.py").write_text(textwrap.dedent(text))
        environment = child_environment()
        return environment | {"PYTHONPATH": f"{environment['PYTHONPATH']}{os.pathsep}{tmp_path}"}

    return write


def started(environment, arguments=(), **options):
    return start(sys.executable, "told_module", list(arguments), environment, **options)


def heard(process) -> str:
    """All that a process prints until its end, which must be a good one."""
    with process.stdout:
        text = process.stdout.read()
    assert process.wait(60) == 0, text
    return text


def plainly(environment, monkeypatch, **options):
    """The same process without a fork server."""
    with monkeypatch.context() as patch:
        patch.delenv(SOCKET)
        return started(environment, **options)


@pytest.mark.parametrize(("new_session", "folder"), [(False, ""), (True, "elsewhere")])
def test_a_forked_process_finds_what_a_started_one_finds(module, tmp_path, monkeypatch, new_session, folder):
    environment = module(TELLS) | {"MARK": "7"}
    (tmp_path / "elsewhere").mkdir()
    options = {"arguments": ["one", "two words"], "new_session": new_session, "folder": folder and str(tmp_path / folder)}
    forked, plain = started(environment, **options), plainly(environment, monkeypatch, **options)
    assert isinstance(forked, Forked) and isinstance(plain, subprocess.Popen)
    here, there = (json.loads(heard(process).splitlines()[0]) for process in (forked, plain))
    there["paths"] = list(dict.fromkeys(there["paths"]))  # the current folder is in PYTHONPATH too
    assert here.pop("torch") and not there.pop("torch")
    assert here.pop("threads") == there.pop("threads") == 1
    assert here == there
    assert here["loaded"] == [] and here["mark"] == "7" and here["session"] is new_session and here["read"] == ""
    assert here["folder"] == (str(tmp_path / folder) if folder else os.getcwd())


def test_a_module_that_was_edited_is_read_anew(module):
    for text in ("first", "second text"):
        assert heard(started(module(f"print({text!r})"))) == f"{text}\n"


def test_both_streams_come_in_the_order_of_writing_and_exits_run(module):
    text = """
        import atexit, sys
        atexit.register(print, "at the end")
        print("one"); print("two", file=sys.stderr); print("three", end="")
    """
    assert heard(started(module(text))) == "one\ntwo\nthreeat the end\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import sys; sys.exit(75)", 75),
        ("raise ValueError('on purpose')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os; os._exit(3)", 3),
    ],
)
def test_exit_codes_are_those_of_subprocess(module, monkeypatch, text, code):
    environment = module(text)
    for process in (started(environment), plainly(environment, monkeypatch)):
        with process.stdout:
            told = process.stdout.read()
        assert process.wait(60) == code
        assert ("ValueError: on purpose" in told) == ("ValueError" in text)


def test_a_number_is_kept_until_its_launcher_has_read_how_the_process_ended(module):
    """A launcher that saw it run a moment ago may still send a signal: as with a child of its own, nobody else gets it."""
    process = started(module("pass"), new_session=True)
    assert wait_for(lambda: has_ended(process.pid))
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0
    assert wait_for(lambda: not psutil.pid_exists(process.pid))
    process.stdout.close()


def test_nothing_is_left_of_a_process_whose_launcher_went_before_it(module):
    process = started(module("import time; time.sleep(600)"))
    process._connection.close()
    assert wait_for(lambda: not psutil.pid_exists(process.pid))
    process.stdout.close()


def test_a_wait_ends_with_its_timeout_and_signals_arrive(module):
    process = started(module("import time; print('here', flush=True); time.sleep(600)"))
    assert process.stdout.readline() == "here\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    process.kill()  # nobody is there: nothing happens
    process.stdout.close()


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "TORCH_LOGS", "PYTORCH_ALLOC_CONF", "TORCHINDUCTOR_COMPILE_THREADS"])
def test_what_is_read_when_a_library_is_loaded_needs_a_process_of_its_own(module, name):
    assert not isinstance(process := started(module(TELLS) | {name: "ACTIVE"}), Forked)
    assert not json.loads(heard(process).splitlines()[0])["torch"]
    later = {"PYTHONPATH": "a", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "PYTHON": "python3"}
    assert fork_server.read_once({name: "3", **later}) == {name: "3"}


def test_a_library_that_is_wanted_is_imported_once_for_all_and_nothing_of_hyperion_stays(module, monkeypatch):
    tells = "import sys; print('peft' in sys.modules, [n for n in sys.modules if n.startswith('hyperion')])"
    monkeypatch.delenv(SOCKET)
    with fork_server_running():
        without, wanting, after = (
            heard(started(module(tells) | {fork_server.WANTED: wanted})) for wanted in ("", "peft,no_such_module", "")
        )
    assert (without, wanting, after) == ("False []\n", "True []\n", "True []\n")


def test_an_import_in_the_server_cannot_ask_the_driver():
    compiled = pytest.importorskip("torch")._C
    before = getattr(compiled, "_cuda_getDeviceCount", None)
    with fork_server._driver_not_asked(), pytest.raises(RuntimeError, match="must not touch a GPU"):
        compiled._cuda_getDeviceCount()
    assert getattr(compiled, "_cuda_getDeviceCount", None) is before


def test_the_number_of_threads_is_taken_over(module):
    environment = module("import torch; print(torch.get_num_threads())") | {"OMP_NUM_THREADS": "3"}
    process = started(environment)
    assert isinstance(process, Forked) and heard(process) == "3\n"


def test_another_interpreter_is_started(module, tmp_path):
    (python := tmp_path / "python").symlink_to(sys.executable)
    environment = module("print('here')") | {"PYTHONHOME": sys.base_prefix}
    with start(str(python), "told_module", [], environment) as process:
        assert not isinstance(process, Forked)


def test_the_server_ends_with_its_block_and_its_children_are_waited_for(module, monkeypatch):
    monkeypatch.delenv(SOCKET)
    environment = module("import time; print('here', flush=True); time.sleep(600)")
    with fork_server_running():
        process = started(environment)
        assert isinstance(process, Forked) and process.stdout.readline() == "here\n"
        server = psutil.Process(process.pid).parent()
        address = os.environ[SOCKET]
        with fork_server_running():
            assert os.environ[SOCKET] == address
        with fork_server_running(dict(os.environ) | {"OMP_WAIT_POLICY": "ACTIVE"}):
            assert os.environ[SOCKET] != address
        other = started(environment)
        assert os.environ[SOCKET] == address and isinstance(other, Forked)
        other.kill()
        other.stdout.close()
    assert SOCKET not in os.environ and not server.is_running()
    assert process.poll() is None  # it did not ask to die with its parent
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM  # what is assumed, since nobody is left to tell
    assert has_ended(process.pid)
    process.stdout.close()


def test_the_server_ends_with_its_owner(tmp_path):
    code = """
import os, sys, time
from hyperion.processes.lifeline import child_environment
from hyperion.processes.starting import fork_server_running, start
with fork_server_running():
    start(sys.executable, "json.tool", ["--help"], child_environment()).wait()
    print(os.environ["HYPERION_FORK_SERVER"], flush=True)
    time.sleep(600)
"""
    environment = child_environment()
    del environment[SOCKET]
    owner = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    folder = Path(owner.stdout.readline()).parent
    (server,) = psutil.Process(owner.pid).children()
    owner.kill()
    owner.communicate()
    assert server.wait(30) is None or has_ended(server.pid)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("harm", "asked"),
    [({"environment": {"OMP_NUM_THREADS": "0"}}, 0), ({"folder": "/nothing/here"}, None), ({"module": None}, None)],
)
def test_a_request_that_cannot_be_met_leaves_the_server_serving(module, harm, asked):
    environment = module("print('here')")
    request = {
        "python": sys.executable,
        "module": "told_module",
        "arguments": [],
        "environment": environment,
        "folder": os.getcwd(),
        "new_session": False,
    } | harm
    request["environment"] = environment | harm.get("environment", {})
    with socket.socket(socket.AF_UNIX) as caller, open(os.devnull, "r+") as nothing:
        caller.connect(os.environ[SOCKET])
        socket.send_fds(caller, [json.dumps(request).encode() + b"\n"], [nothing.fileno()] * 3)
        answer = json.loads(caller.makefile().readline())
    assert answer == {"pid": asked} if asked is not None else answer
    assert isinstance(process := started(environment), Forked) and heard(process) == "here\n"


def test_callers_that_leave_at_once_do_not_disturb_the_server(module):
    environment = module("pass")
    for _ in range(20):
        started(environment).kill()  # the child and its caller end together
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(os.environ[SOCKET])
    environment = module("print('still here')")
    assert isinstance(process := started(environment), Forked) and heard(process) == "still here\n"


def test_where_the_server_is_gone_workers_are_started(module, monkeypatch, tmp_path):
    monkeypatch.setenv(SOCKET, str(tmp_path / "nothing"))
    process = started(module("print('here')"))
    assert isinstance(process, subprocess.Popen) and heard(process) == "here\n"


def test_a_child_is_asked_to_end_when_its_launcher_is_killed(module, tmp_path):
    sleeps = module("""
        import os, sys, time
        from pathlib import Path
        Path(sys.argv[1]).write_text(str(os.getpid()))
        time.sleep(600)
    """)
    pid = tmp_path / "pid"
    code = f"""
import sys
from hyperion.processes.starting import start, Forked
process = start(sys.executable, "told_module", [{str(pid)!r}], {sleeps!r})
assert isinstance(process, Forked)
process.stdout.read()
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], env=os.environ | child_environment())
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()):
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    child = psutil.Process(int(pid.read_text()))
    launcher.kill()
    launcher.wait()
    assert child.wait(30) is None or not child.is_running()


def test_ten_children_at_once_are_told_apart(module):
    environment = module("import sys; print(sys.argv[1]); sys.exit(int(sys.argv[1]))")
    processes = [started(environment, [str(number)]) for number in range(10)]
    assert [process.stdout.read() for process in processes] == [f"{number}\n" for number in range(10)]
    assert [process.wait(60) for process in processes] == list(range(10))
    for process in processes:
        process.stdout.close()
