"""Weights from each kind of file, and the refusal of everything else."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hyperion.checkpoints import CheckpointError, export_model
from hyperion.checkpoints.folders import saving
from hyperion.checkpoints.sharded import write_sharded
from hyperion.checkpoints.weights import read_weights
from tests.checkpoints.single import save

TENSORS = {"layer.weight": torch.arange(6.0).view(2, 3), "layer.bias": torch.ones(2, dtype=torch.bfloat16)}
STATE = {"model": TENSORS, "optimizer": {"step": 3, "moment": torch.zeros(2)}, "note": "kept"}


def assert_same(found, wanted=TENSORS):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def safetensors_file(folder):
    save_file(TENSORS, folder / "model.safetensors")
    return folder / "model.safetensors"


def pickled(folder, content):
    torch.save(content, folder / "model.pt")
    return folder / "model.pt"


@pytest.mark.parametrize(
    "make",
    [safetensors_file, lambda f: pickled(f, TENSORS), lambda f: pickled(f, {"epoch": 4, "state_dict": TENSORS})],
    ids=["safetensors", "state dict", "state dict within a checkpoint"],
)
def test_a_file_gives_its_tensors_and_its_hash(tmp_path, make):
    path = make(tmp_path)
    weights = read_weights(path)
    assert_same(weights.tensors)
    assert weights.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_checkpoint_of_the_library_gives_its_model_alone(tmp_path):
    assert_same(read_weights(save(tmp_path, 7, STATE)).tensors)


def test_a_sharded_checkpoint_gives_its_model_alone(tmp_path):
    with saving(tmp_path, 7) as new:
        write_sharded(new, STATE)
    assert_same(read_weights(tmp_path / "step-00000007").tensors)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    path = save(tmp_path, 7, STATE)
    victim = next(path.glob("*.safetensors"))
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    with pytest.raises(CheckpointError, match=victim.name):
        read_weights(path)


def test_a_checkpoint_without_a_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no model"):
        read_weights(save(tmp_path, 1, {"optimizer": {"moment": torch.zeros(2)}}))


class Trap:
    """What a pickle must never get to do."""

    ran = False

    def __reduce__(self):
        return setattr, (Trap, "ran", True)


def test_nothing_in_a_pickle_is_executed(tmp_path):
    path = pickled(tmp_path, {"weights": Trap()})
    Trap.ran = False
    with pytest.raises(CheckpointError, match="nothing in it was executed"):
        read_weights(path)
    assert not Trap.ran


@pytest.mark.parametrize(
    "name, content, why",
    [
        ("model.safetensors", b"\x80\x04pickle", "it is a pickle"),
        ("model.safetensors", b"\x10\0\0\0\0\0\0\0{}", "holds no weights"),
        ("model.pt", b"", "holds no weights"),
        ("model.pt", b"hello", "holds no weights"),
    ],
)
def test_what_holds_no_tensors_is_refused_by_name(tmp_path, name, content, why):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=why):
        read_weights(tmp_path / name)


def test_other_objects_and_missing_files_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not a state dict"):
        read_weights(pickled(tmp_path, [1, 2]))
    with pytest.raises(CheckpointError, match="no such file"):
        read_weights(tmp_path / "nowhere.pt")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(3)


def test_the_file_is_a_plain_state_dict(tmp_path):
    model = Tied()
    path = export_model(model, tmp_path / "deep" / "model.safetensors")
    other = Tied()
    other.load_state_dict(load_file(path))
    assert other.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]


def test_a_refused_export_leaves_the_file_that_was_there(tmp_path):
    path = export_model(Tied(), tmp_path / "model.safetensors")
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="cannot export the model: File exists"):
        export_model(Tied(), path / "below")
    assert path.read_bytes() == before
