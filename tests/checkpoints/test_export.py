"""One file with the whole model; tests/training/test_loop_on_ranks.py exports a sharded one."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hyperion.checkpoints import CheckpointError, export_model


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
    with pytest.raises(CheckpointError, match="the model could not be exported: File exists"):
        export_model(Tied(), path / "below")
    assert path.read_bytes() == before
