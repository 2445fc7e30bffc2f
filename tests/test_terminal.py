"""Commands in hostile surroundings: streams, locales, users and variables that a cluster or a container gives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
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
def unknown_user(tmp_path):
    (tmp_path / "nobody").mkdir()
    (tmp_path / "nobody/sitecustomize.py").write_text(NOBODY)
    return {"PYTHONPATH": f"{tmp_path / 'nobody'}:{CHECKOUT}", "HOME": None, "USER": None, "LOGNAME": None}


def test_a_reader_that_ends_first_ends_the_command_silently(shell):
    done = shell("set -o pipefail; hyperion env | true")
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_device_for_output_is_an_error_with_a_next_step(shell):
    done = shell("hyperion env > /dev/full")
    assert done.returncode == 2 and "No space left" in done.stderr and "next:" in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_do_not_stop_a_command(shell, tmp_path, closed):
    assert shell(f"hyperion env {closed}").returncode == 0
    assert shell(f"hyperion verify nope {closed}").returncode == 2
    assert not list(tmp_path.glob("results/*"))


def test_characters_that_the_terminal_lacks_are_escaped(shell):
    done = shell("hyperion --help; hyperion verify 'r×n'", **ASCII)
    assert done.returncode == 2 and "no run 'r" in done.stderr
    assert shell("hyperion doctor > out; test $? -le 1", **ASCII).returncode == 0


def test_a_user_without_a_password_entry_and_without_a_home(shell, unknown_user):
    assert shell("hyperion env", **unknown_user).returncode == 0
    done = shell("hyperion verify nope", **{**unknown_user, "HYPERION_RESULTS": "~/results"})
    assert done.returncode == 2


@pytest.mark.parametrize(
    "variables",
    [{"RANK": "abc"}, {"RANK": "0", "WORLD_SIZE": "-1"}, {"LOCAL_RANK": "x"}, {"WORLD_SIZE": "1", "LOCAL_RANK": "y"}],
)
def test_variables_of_torchrun_that_make_no_sense_are_named_or_do_not_matter(shell, variables):
    assert shell("hyperion env", **variables).returncode == 0
    script = CHECKOUT / "phase2_development/run_distributed.py"
    done = shell(f'"{sys.executable}" "{script}" --seed -1', **variables)
    assert done.returncode == 2 and ("RANK" in done.stderr or "--seed" in done.stderr)
