"""Commands in hostile surroundings: streams, locales, users and variables that a cluster or a container gives."""

import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.table import Table

from hyperion import terminal
from hyperion.cli import main
from hyperion.commands.console import PlainTextConsole
from hyperion.commands.distributed_command import main as train
from hyperion.doctor.report import Item
from hyperion.errors import HyperionError
from hyperion.terminal import progress_bar, run_command, say
from tests.reproduce.small_book import recording, write_notebook

CHECKOUT = Path(__file__).resolve().parents[1]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
SENSELESS = [{"RANK": "abc"}, {"RANK": "0", "WORLD_SIZE": "-1"}, {"LOCAL_RANK": "x"}, {"WORLD_SIZE": "1", "LOCAL_RANK": "y"}]
# As in a container that runs under a number of its own: no entry in the password file.
NOBODY = """
import pwd
def getpwuid(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = getpwuid
"""


@pytest.fixture
def shell(tmp_path):
    """A shell line that calls `hyperion` in an empty folder; variables may be added, and removed with None."""

    def call(line: str, **variables: str | None) -> subprocess.CompletedProcess:
        ours = {"PYTHONPATH": str(CHECKOUT), "HYPERION_RESULTS": str(tmp_path / "results"), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **ours, **variables}
        environment = {name: value for name, value in environment.items() if value is not None}
        script = f'hyperion() {{ "{sys.executable}" -m hyperion "$@"; }}; {line}'
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        assert "Exception ignored" not in done.stderr, done.stderr
        return done

    return call


@pytest.fixture
def book(tmp_path):
    """A checkout with one chapter, which needs neither data nor torch, but characters beyond ASCII."""
    cells = [recording("01_first"), f"print('×', open({str(tmp_path / 'text')!r}).read())"]
    write_notebook(tmp_path / "phase1_hardware", "01_first", cells)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "text").write_text("ünï×", encoding="utf-8")
    return tmp_path


@pytest.fixture
def unknown_user(tmp_path):
    (tmp_path / "nobody").mkdir()
    (tmp_path / "nobody/sitecustomize.py").write_text(NOBODY)
    return {"PYTHONPATH": f"{tmp_path / 'nobody'}:{CHECKOUT}", "HOME": None, "USER": None, "LOGNAME": None}


@pytest.fixture
def removable(tmp_path):
    """A folder of which `hyperion clean --dry-run` prints a line. This command loads no torch."""
    (tmp_path / "phase1_hardware").mkdir()
    (tmp_path / ".ruff_cache").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "hyperion"\n')


@pytest.mark.process
def test_a_reader_that_ends_first_ends_the_command_silently(shell, removable):
    done = shell("set -o pipefail; hyperion clean --dry-run | true")
    assert (done.returncode, done.stderr) == (141, "")


RELAUNCH = "from hyperion.cli import main; import sys; sys.argv = ['hyperion', 'relaunch', 'work.py', '.', '.']; sys.exit(main())"
JOB = """
import sys
from hyperion.processes.job import Job, run_job
from hyperion.terminal import run_command
from tests.processes.job_entries import sleep
sys.exit(run_command(lambda: run_job(Job(sleep, {"pid_file": "pid"}))))
"""


@pytest.mark.process
@pytest.mark.parametrize(("program", "made"), [(RELAUNCH, "results/*-relaunch"), (JOB, "tmp/hyperion-job-*")])
def test_sigterm_ends_a_command_and_leaves_no_folder(tmp_path, program, made):
    (tmp_path / "work.py").write_text("import time\ndef work(): return {'wait': lambda: time.sleep(100)}\n")
    (tmp_path / "tmp").mkdir()
    ours = {"PYTHONPATH": str(CHECKOUT), "HYPERION_RESULTS": str(tmp_path / "results"), "TMPDIR": str(tmp_path / "tmp")}
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=os.environ | ours, stderr=subprocess.PIPE)
    try:
        while not list(tmp_path.glob(made)):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM and b"Traceback" not in errors, errors
    assert list(tmp_path.glob(made)) == []


def test_a_handler_of_sigterm_outside_of_a_command_stays():
    earlier = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert run_command(lambda: int(signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN)) == 0
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, earlier)


@pytest.mark.process
def test_a_full_device_for_output_is_an_error_with_a_next_step(shell, removable):
    done = shell("hyperion clean --dry-run > /dev/full")
    assert done.returncode == 2 and "No space left" in done.stderr and "next:" in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_a_closed_stream_does_not_stop_a_command(shell, closed):
    """These answers need neither torch nor pandas, which take seconds to load."""
    assert shell(f"hyperion --help {closed}").returncode == 0
    assert shell(f"hyperion verify --nonsense {closed}").returncode == 2


@pytest.mark.process
def test_all_streams_closed_do_not_stop_a_command(shell, tmp_path):
    assert shell("hyperion env >&- 2>&- <&-").returncode == 0
    assert shell("hyperion verify nope >&- 2>&- <&-").returncode == 2
    assert not list(tmp_path.glob("results/*"))


@pytest.mark.process
def test_characters_that_the_terminal_lacks_are_escaped(shell):
    done = shell("hyperion --help; hyperion verify 'r×n'", **ASCII)
    assert done.returncode == 2 and "no run 'r" in done.stderr


def test_the_words_of_the_doctor_are_escaped_on_a_terminal_that_lacks_their_characters(monkeypatch):
    finding = Item("system", "disk", "import", True, "", "free space", "warn", "12 × 4 µs", "clean 日本", 0.1)
    others = [replace(finding, level=level, result="ok") for level in ("correctness", "floor")]
    monkeypatch.setattr("hyperion.doctor.components.check_components", lambda *options: [finding, *others])
    monkeypatch.setattr("hyperion.doctor.rules.apply_rules", lambda state: [])
    monkeypatch.setattr(sys, "argv", ["hyperion", "doctor"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    code = main()
    sys.stdout.flush()
    said = sys.stdout.buffer.getvalue().decode("ascii")
    assert code == 0 and "warn   disk (import): 12 \\xd7 4 \\xb5s" in said and "next:  clean \\u65e5\\u672c" in said


@pytest.mark.process
def test_a_user_without_a_password_entry_and_without_a_home(shell, unknown_user):
    assert shell("hyperion env", **unknown_user).returncode == 0
    done = shell("hyperion verify nope", **{**unknown_user, "HYPERION_RESULTS": "~/results"})
    assert done.returncode == 2


def finished(book: Path) -> bool:
    return (book / "results/latest/notebooks/01_first.html").is_file()


@pytest.mark.book
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.long
def test_a_chapter_runs_for_a_user_without_a_home_and_with_closed_streams(shell, book, unknown_user):
    assert shell("hyperion reproduce <&- >&- 2>&-", **unknown_user).returncode == 0 and finished(book)


@pytest.mark.book
@pytest.mark.process
@pytest.mark.slow
def test_a_chapter_runs_in_an_ascii_locale_with_a_home_that_cannot_be_written(shell, book):
    done = shell("hyperion reproduce", **ASCII, HOME="/proc/1", RANK="abc", WORLD_SIZE="-1")
    assert done.returncode == 0 and finished(book), done.stdout + done.stderr
    assert done.stdout.isascii()


@pytest.mark.book
@pytest.mark.process
@pytest.mark.slow
def test_a_reader_that_ends_first_ends_a_run_with_a_code_of_its_own(shell, book):
    done = shell("set -o pipefail; hyperion reproduce | true")
    assert (done.returncode, done.stderr) == (141, "") and not finished(book)


@pytest.mark.parametrize("variables", SENSELESS)
def test_variables_of_torchrun_that_make_no_sense_do_not_matter_to_one_process(monkeypatch, capsys, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["hyperion", "env"])
    assert main() == 0 and '"torch"' in capsys.readouterr().out


@pytest.mark.process
def test_variables_of_torchrun_that_make_no_sense_do_not_matter_to_a_new_process(shell):
    """The same variables while the library and torch are loaded."""
    assert shell("hyperion env", RANK="abc", WORLD_SIZE="-1", LOCAL_RANK="x").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("variables", "message"), [({"RANK": "abc"}, "WORLD_SIZE"), ({"LOCAL_RANK": "x"}, "seed is -1")])
def test_a_training_names_the_variable_or_the_seed_that_makes_no_sense(monkeypatch, capsys, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert train("", lambda run: None, ["--seed", "-1"]) == 2
    said = capsys.readouterr().err
    assert message in said and "next:" in said and "Traceback" not in said


def test_strings_of_others_cannot_control_the_terminal(capsys):
    name = "red\x1b[31m\u202e"
    output = PlainTextConsole(width=80)
    output.print(name, markup=False)
    table = Table("a", title=name)
    table.add_row(name)
    output.print(table)
    say(name)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\u202e" not in shown and shown.count("red\\x1b[31m\\u202e") == 4


@pytest.mark.parametrize(
    ("name", "step"),
    [("missing/file", "create the folder"), ("", "instead of this folder"), ("file/file", "whose parents are folders")],
)
def test_a_wrong_path_has_a_next_step_of_its_own(tmp_path, capsys, name, step):
    (tmp_path / "file").touch()
    assert run_command(lambda: (tmp_path / name).write_text("")) == 2
    shown = capsys.readouterr().err
    assert str(tmp_path) in shown and step in shown and "disk" not in shown


@pytest.mark.parametrize(("error", "code"), [(HyperionError("\x1b]0;title\x07"), 2), (OSError(28, "No space", "\x1b[2J"), 2)])
def test_errors_are_printed_with_control_characters_escaped(capsys, error, code):
    def command() -> int:
        raise error

    assert run_command(command) == code
    shown = capsys.readouterr().err
    assert "\\x1b" in shown and "\x1b" not in shown


class Output:
    """An output of a cell, with everything that was shown in it."""

    def __init__(self):
        self.shown: list[dict] = []

    def display(self, bundle: dict, raw: bool, display_id: bool) -> "Output":
        assert raw and display_id and not self.shown
        return self.update(bundle, raw)

    def update(self, bundle: dict, raw: bool) -> "Output":
        self.shown.append(bundle)
        return self


def test_a_progress_bar_in_a_notebook_is_one_output_that_is_empty_at_the_end(monkeypatch):
    output = Output()
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=None))
    monkeypatch.setattr("IPython.display.display", output.display)
    with progress_bar(desc="gemm", leave=False) as bar:
        bar.total, bar.n = 2, 1
        bar.set_postfix_str("a < b")
    half = output.shown[[bool(bundle["text/plain"]) for bundle in output.shown].index(False) - 1]
    assert "gemm:  50%|" in half["text/plain"] and "1/2" in half["text/plain"] and "a &lt; b" in half["text/html"]
    assert output.shown[-1] == {"text/html": "", "text/plain": ""}


def test_a_progress_bar_that_stays_shows_its_last_state(monkeypatch):
    output = Output()
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=None))
    monkeypatch.setattr("IPython.display.display", output.display)
    with progress_bar(desc="file", total=2) as bar:
        bar.update(2)
    assert "file: 100%|" in output.shown[-1]["text/plain"]


def test_outside_a_notebook_a_progress_bar_is_text_on_standard_error(monkeypatch, capsys):
    monkeypatch.setattr("IPython.get_ipython", SimpleNamespace)  # IPython in a terminal has no kernel
    with progress_bar(desc="gemm", total=2) as bar:
        bar.update(2)
    assert capsys.readouterr().err.count("\n") == 1  # no terminal: only the last state


def test_a_progress_bar_outside_of_a_terminal_is_a_line_at_each_interval(monkeypatch, capsys):
    monkeypatch.setattr("IPython.get_ipython", SimpleNamespace)
    now_s = [0.0]
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with progress_bar(desc="gemm", total=100, leave=False) as bar:
        for step in range(100):
            now_s[0] = 0.25 * step
            bar.n = step
            bar.refresh()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("|")[0] for line in lines] == ["gemm:  40%", "gemm:  80%"]
