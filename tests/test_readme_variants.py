"""The README's variants of `make reproduce` that name a profile are run as printed.

They start runs of their own and need no results of the whole book, so they run beside it.
"""

import pytest

from tests.readme import folders, reproduces, run

pytestmark = pytest.mark.book


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return folders(tmp_path_factory.mktemp("variants"))


@pytest.mark.parametrize("command", [c for c in reproduces() if "PROFILE=" in c])
def test_variants_of_make_reproduce(command, place):
    done = run(command, place)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    if "replay" in command:
        assert "BANNER: replay" in done.stdout and "done" in done.stdout
