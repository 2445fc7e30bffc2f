"""save and load_latest, with real faults between them."""

import json
import resource
import subprocess
import sys

import pytest
import torch

from hyperion.checkpoints import CheckpointError, load, load_latest, save

STATE = {"weights": torch.arange(6.0).reshape(2, 3), "loader": {"epoch": 2, "position": 5}, "rates": [0.1, 0.2]}


def assert_is_state(state):
    assert torch.equal(state["weights"], STATE["weights"])
    assert {name: state[name] for name in ("loader", "rates")} == {name: STATE[name] for name in ("loader", "rates")}


def test_saved_and_loaded(tmp_path):
    path = save(tmp_path, 12, STATE)
    found = load_latest(tmp_path)
    assert (found.path, found.step) == (path, 12)
    assert_is_state(found.state)


def test_nothing_saved_is_none(tmp_path):
    assert load_latest(tmp_path) is None


def test_a_pickle_with_a_matching_manifest_is_refused_and_the_last_good_one_used(tmp_path, capsys):
    import hashlib

    save(tmp_path, 1, STATE)
    bad = save(tmp_path, 2, STATE)
    torch.save({"x": 1}, bad / "tensors.safetensors")
    manifest = json.loads((bad / "manifest.json").read_text())
    content = (bad / "tensors.safetensors").read_bytes()
    manifest["files"]["tensors.safetensors"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (bad / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="pickle"):
        load(bad)
    found = load_latest(tmp_path)
    assert found.step == 1
    assert_is_state(found.state)
    assert "pickle" in capsys.readouterr().err


WRITE_TOO_MUCH = """
import resource, signal, sys
import torch
from hyperion.checkpoints import CheckpointError, save
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save(sys.argv[1], 2, {"weights": torch.zeros(100_000)})
except CheckpointError as error:
    sys.exit(f"refused: {error}")
"""


def test_a_write_error_leaves_the_checkpoint_before_intact(tmp_path):
    save(tmp_path, 1, STATE)
    child = subprocess.run([sys.executable, "-c", WRITE_TOO_MUCH, tmp_path], capture_output=True, text=True)
    assert child.returncode == 1
    assert "refused: the tensors could not be written" in child.stderr, child.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert_is_state(load_latest(tmp_path).state)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100_000  # only the child was limited
