"""The README's variants of `make reproduce` that name a profile are run as printed.

They start runs of their own and need no results of the whole book, so they run beside it. The replay of the whole book belongs to
the long tests: test_replay runs the same cells. Here, one chapter is replayed with the command.
"""

import pytest

from tests.readme import folders, reproduces, run

pytestmark = pytest.mark.book

REPLAY = "make reproduce PROFILE=replay"
VARIANTS = [
    pytest.param(command, marks=pytest.mark.long) for command in reproduces() if "PROFILE=" in command and command != REPLAY
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return folders(tmp_path_factory.mktemp("variants"))


@pytest.mark.parametrize("command", [f"{REPLAY} ONLY=03_interconnect", pytest.param(REPLAY, marks=pytest.mark.long), *VARIANTS])
def test_variants_of_make_reproduce(command, place):
    done = run(command, place)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    if "replay" in command:
        assert "BANNER: replay" in done.stdout and "done" in done.stdout
