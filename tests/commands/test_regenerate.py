"""The programs that compute files of the repository again. tests/chapter/test_efficiency.py calls `curves` and `predictions`."""

import numpy as np
import pytest
from safetensors import safe_open

from hyperion.commands import regenerate
from hyperion.commands.console import run_app
from hyperion.doctor import numerics

STORED = {"language/losses": np.array([4.0, 3.5]), "language/logits": np.array([[1.0, -1.0]])}


def call(*arguments: str) -> int:
    return run_app(regenerate.app, "regenerate", arguments)


@pytest.fixture
def pack(monkeypatch, tmp_path):
    """A small pack in a temporary file, which the tests compute again."""
    monkeypatch.setattr(numerics, "PACK", tmp_path / "pack.safetensors")
    monkeypatch.setattr(numerics, "make_pack", lambda: {name: array.copy() for name, array in STORED.items()})
    return numerics.PACK


def test_a_written_pack_names_its_command_and_equals_the_next_one(pack, capsys):
    assert call("numerics", "--write") == 0
    with safe_open(pack, "np") as file:
        assert file.metadata()["made by"] == "python -m hyperion.commands.regenerate numerics --write"
    assert call("numerics") == 0
    assert "largest difference from the pack in git: 0," in capsys.readouterr().out


@pytest.mark.parametrize(
    ("made", "name"),
    [(STORED | {"language/losses": np.array([4.0, 3.6])}, "language/losses"), ({"language/logits": np.zeros((1, 2))}, "names")],
)
def test_a_pack_that_differs_is_reported(made, name, pack, monkeypatch, capsys):
    call("numerics", "--write")
    monkeypatch.setattr(numerics, "make_pack", lambda: made)
    assert call("numerics") == 1
    assert capsys.readouterr().out.endswith(f", in {name}\n")


def test_the_metadata_of_the_pack_in_git_name_the_command():
    with safe_open(numerics.PACK, "np") as file:
        assert file.metadata()["made by"] == "python -m hyperion.commands.regenerate numerics --write"


def test_the_help_lists_the_commands(capsys):
    assert call("--help") == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("curves", "predictions", "numerics", "trained-models"))
