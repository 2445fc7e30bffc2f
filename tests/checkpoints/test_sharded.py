"""The sharded format on one process; tests/training/test_loop_on_ranks.py has the ranks."""

import hashlib
import json
import os
import pickle
import resource
import signal

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from hyperion.checkpoints import (
    CheckpointError,
    agreed,
    gathered,
    on_rank_0,
    rank_and_size,
    read_sharded,
    saving,
    verify,
    write_sharded,
)
from hyperion.checkpoints.sharded import _tile


def state_of(fill=True):
    """Every kind of tensor that a model and its optimizer hold; zeros when not filled."""
    generator = torch.Generator().manual_seed(0)
    tied = torch.randn(4, 3, generator=generator)
    tensors = {
        "kernel": torch.randn(4, 3, 2, 2, generator=generator).contiguous(memory_format=torch.channels_last),
        "tied": {"embedding": tied, "head": tied},
        "slice": torch.arange(12.0)[3:7],
        "half": torch.randn(5, generator=generator).bfloat16(),
        "step": torch.tensor(3.0),
        "mask": torch.tensor([True, False]),
        "count": torch.tensor([2**40, -1]),
        "empty": torch.empty(0, 2),
    }
    if not fill:
        leaves = [*(value for value in tensors.values() if torch.is_tensor(value)), tied]
        for tensor in leaves:
            tensor.zero_()
    return {"tensors": tensors, "groups": [{"params": ["a", "b"], "lr": 0.1, "fused": True}], "steps": 4 if fill else 0}


def assert_same(found, expected):
    if torch.is_tensor(expected):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    else:
        assert found == expected


def test_every_kind_of_tensor_comes_back_into_the_tensors_that_are_there(tmp_path):
    write_sharded(tmp_path, state_of())
    here = state_of(fill=False)
    found = read_sharded(tmp_path, here)
    assert_same(found, state_of())
    assert found["tensors"]["kernel"].data_ptr() == here["tensors"]["kernel"].data_ptr()
    assert here["tensors"]["kernel"].is_contiguous(memory_format=torch.channels_last)


def test_nothing_but_safetensors_and_json_is_written(tmp_path):
    write_sharded(tmp_path, state_of())
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json"}


def other_shape(tensors):
    tensors["slice"] = torch.zeros(5)


def other_type(tensors):
    tensors["half"] = tensors["half"].float()


def one_more(tensors):
    tensors["bias"] = torch.zeros(2)


def one_less(tensors):
    del tensors["step"]


MISFITS = {
    other_shape: "slice is float32 [4] in the checkpoint and float32 [5] here",
    other_type: "half is bfloat16 [5] in the checkpoint and float32 [5] here",
    one_more: "bias is not in the checkpoint",
    one_less: "step is in the checkpoint, but not in this model and optimizer",
}


@pytest.mark.parametrize("change", MISFITS, ids=lambda change: change.__name__)
def test_a_state_of_another_shape_is_refused_before_anything_is_overwritten(tmp_path, change):
    write_sharded(tmp_path, state_of())
    here = state_of(fill=False)
    change(here["tensors"])
    with pytest.raises(CheckpointError, match="does not fit this model") as caught:
        read_sharded(tmp_path, here)
    assert MISFITS[change] in caught.value.what
    assert not here["tensors"]["kernel"].any()


class Payload:
    """Unpickling it would leave a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def vouch_for(folder, name):
    """Make the manifest's entry fit, as somebody who plants a file would."""
    manifest, content = json.loads((folder / "manifest.json").read_text()), (folder / name).read_bytes()
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("planted", [".metadata", "__0_0.distcp", "shard-00001-model-00001-of-00001.safetensors", "state.json"])
@pytest.mark.parametrize("write", [pickle.dump, torch.save], ids=["pickle", "torch.save"])
def test_a_pickle_with_a_fitting_manifest_is_not_run(tmp_path, planted, write):
    with saving(tmp_path, 1) as new:
        (new / "engine").mkdir()
        write_sharded(new / "engine", state_of())
    folder = tmp_path / "step-00000001"
    with (folder / "engine" / planted).open("wb") as file:
        write(Payload(tmp_path / "it ran"), file)
    vouch_for(folder, f"engine/{planted}")
    verify(folder)
    with pytest.raises(CheckpointError, match="pickle") as caught:
        read_sharded(folder / "engine", state_of(fill=False))
    assert caught.value.where == folder / "engine" / planted
    assert not (tmp_path / "it ran").exists()


def test_a_shard_that_is_missing_is_told(tmp_path):
    write_sharded(tmp_path, state_of())
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="is not in the checkpoint"):
        read_sharded(tmp_path, state_of(fill=False))


def test_a_file_that_may_not_be_written_is_told_in_the_systems_words(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot write the tensors: File too large"):
            write_sharded(tmp_path, state_of())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("together", [agreed, on_rank_0])
def test_alone_work_is_done_and_its_errors_are_its_own(together):
    assert together(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        together(lambda: 1 // 0)


def test_alone_there_is_one_rank():
    assert rank_and_size() == (0, 1)
    assert gathered("mine") == ["mine"]


@pytest.mark.parametrize(
    ("shards", "whole"),
    [
        ([((0, 0), (2, 4)), ((2, 0), (1, 4))], True),
        ([((0, 0), (3, 1)), ((0, 1), (3, 3)), ((0, 4), (3, 0))], True),  # the last shard is empty
        ([((0, 0), (2, 4))], False),
        ([((0, 0), (1, 4)), ((2, 0), (1, 4))], False),
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], False),
        ([((0, 0), (2, 4)), ((1, 0), (1, 4))], False),  # as many elements as the tensor, but two of them are missing
    ],
)
def test_shards_cover_a_tensor_once_or_are_refused(shards, whole):
    chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in shards]
    assert _tile(TensorStorageMetadata(TensorProperties(), torch.Size((3, 4)), chunks)) is whole
