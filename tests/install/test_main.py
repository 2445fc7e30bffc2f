"""Entry: the shell that finds a Python, the lock, and what passes through to the command."""

import errno
import fcntl
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hyperion.errors import HyperionError
from hyperion.install import __main__ as command
from hyperion.install import overlay

ROOT = Path(__file__).resolve().parents[2]
ENTER = ROOT / "hyperion/install/enter.sh"


@pytest.mark.process
def test_the_environments_exit_code_and_arguments_pass_through(tmp_path):
    code = "import os, sys; print(sys.argv[1:], os.environ['PYTHONNOUSERSITE']); sys.exit(7)"
    (tmp_path / "answer.py").write_text(code)
    done = subprocess.run(
        ["sh", str(ENTER), "run", "answer", "--flag", "two words"],
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path), "TORCH": "cpu"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (7, "['--flag', 'two words'] 1\n"), done.stderr


@pytest.mark.process
def test_an_older_python3_is_passed_over_or_the_way_out_is_named(tmp_path):
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\nexit 1\n")  # what `sys.version_info < (3, 11)` answers there
    fake.chmod(0o755)
    script = tmp_path / "hyperion/install/enter.sh"
    script.parent.mkdir(parents=True)
    script.write_text(ENTER.read_text())
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "dirname").symlink_to("/usr/bin/dirname")
    paths = {"PATH": f"{tmp_path}:{tools}"}
    done = subprocess.run(["/bin/sh", str(script), "setup"], env=paths, capture_output=True, text=True)
    assert done.returncode == 2 and "no Python >= 3.11 found" in done.stderr and "PYTHON=" in done.stderr
    (tools / "python3.12").write_text('#!/bin/sh\n[ "$1" = -m ] && echo "$@"\nexit 0\n')
    (tools / "python3.12").chmod(0o755)
    done = subprocess.run(["/bin/sh", str(script), "setup"], env=paths, capture_output=True, text=True)
    assert done.stdout == "-m hyperion.install setup\n"


@pytest.mark.process
def test_a_named_python_that_is_too_old_is_refused():
    paths = os.environ | {"PYTHON": "/bin/false"}
    done = subprocess.run(["sh", str(ENTER), "setup"], env=paths, capture_output=True, text=True)
    assert done.returncode == 2 and "PYTHON=/bin/false" in done.stderr


def test_set_up_refusals_reach_the_user_without_a_traceback(capsys):
    assert command.main(["--torch", "metal", "setup"]) == 2
    assert "TORCH=metal is not a build" in capsys.readouterr().err


@pytest.fixture
def makefile(tmp_path):
    """A checkout whose set-up prints what it was asked for."""
    root = tmp_path / "checkout"
    (root / "hyperion/install").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", root)
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "hyperion/install/enter.sh").write_text('echo "$@"\n')
    (root / "tests").mkdir()

    def make(*arguments: str) -> subprocess.CompletedProcess:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        return subprocess.run(["make", "-C", root, "-s", *arguments], env=clean, capture_output=True, text=True, check=False)

    return root, make


def asked_for(line: str) -> list[str]:
    words = line.split()
    return [extra for option, extra in itertools.pairwise(words) if option == "--extra"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("setup", []),
        ("reproduce", []),
        ("fetch", []),
        ("report", []),
        ("lab", ["lab"]),
        ("test", ["test"]),
        ("lint", ["lint"]),
        ("test-fast", ["test"]),
        ("test-book", ["test"]),
    ],
)
def test_each_target_asks_for_what_it_needs_and_nothing_else(makefile, target, extras):
    done = makefile[1](target)
    assert done.returncode == 0 and list(dict.fromkeys(asked_for(done.stdout))) == extras  # lint runs two commands


@pytest.mark.process
@pytest.mark.parametrize(("value", "dry"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_dry_run_0_is_no_dry_run(makefile, monkeypatch, value, dry):
    said = ("--dry-run " if dry else "") + "setup\n"
    assert makefile[1]("setup", f"DRY_RUN={value}").stdout == said
    monkeypatch.setenv("DRY_RUN", value)
    assert makefile[1]("setup").stdout == said


def test_a_compute_node_needs_no_server_no_linter_and_no_test_runner():
    names = {overlay._name(line) for line in overlay.requirements(ROOT, [])}
    assert not names & {"jupyterlab", "ipywidgets", "ruff", "nbstripout", "pytest", "pytest-xdist", "hypothesis"}


@pytest.mark.process
def test_make_clean_leaves_an_environment_that_it_did_not_make(makefile):
    root, make = makefile
    (root / ".venv").mkdir()
    (root / ".venv/pyvenv.cfg").write_text("")
    (root / "build").mkdir()
    done = make("clean")
    assert done.returncode == 0 and ".venv is left" in done.stdout
    assert (root / ".venv/pyvenv.cfg").is_file() and not (root / "build").exists()
    (root / ".venv/hyperion-setup.json").write_text("{}")
    assert make("clean").returncode == 0 and not (root / ".venv").exists()


@pytest.mark.process
def test_make_clean_removes_nothing_in_another_project(makefile):
    root, make = makefile
    (root / "pyproject.toml").write_text('[project]\nname = "theirs"\n')
    (root / "build").mkdir()
    done = make("clean")
    assert done.returncode == 2 and "no checkout of Hyperion" in done.stderr and (root / "build").is_dir()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_flock_can_be_set_up_on(tmp_path, monkeypatch, capfd, code):
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    with command._one_set_up():
        assert (tmp_path / ".setup.lock.exclusive").is_file()
    assert not (tmp_path / ".setup.lock.exclusive").exists()
    assert "does not support flock" in capfd.readouterr().err


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_ready_environment_in_a_checkout_that_cannot_be_changed_is_used(tmp_path, monkeypatch, code):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code), str(tmp_path / ".setup.lock"))

    monkeypatch.setattr(command.FileLock, "acquire", refuse)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    with pytest.raises(OSError, match=r"\.setup\.lock"), command._one_set_up():
        pytest.fail("the checkout can be changed, so the lock is needed")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with command._one_set_up():
        ready = True
    assert ready
    with pytest.raises(HyperionError, match="is not ready") as refused, command._one_set_up():
        raise OSError(code, os.strerror(code), str(tmp_path / ".venv"))
    assert ".venv" in refused.value.what and "owner" in (refused.value.next_step or "")


def test_two_set_ups_wait_for_each_other(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(command, "ROOT", tmp_path)
    order, inside = [], threading.Event()

    def second():
        inside.wait(10)
        with command._one_set_up():
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with command._one_set_up():
        inside.set()
        said = ""
        while "waiting" not in said:
            said += capfd.readouterr().err
            time.sleep(0.01)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
