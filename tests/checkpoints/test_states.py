"""A state comes back as it was, bit for bit, and nothing that could run code is opened."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperion.checkpoints import CheckpointError, read_state, write_state

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(value=json_values)
def test_json_values_come_back_exactly(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("state")
    write_state(folder, {"value": value})
    assert read_state(folder) == {"value": value}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_tensors_come_back_exactly(tmp_path, dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    write_state(tmp_path, {"a": {"b": [tensor, tensor.T, torch.tensor(3)]}, "empty": torch.empty(0, 2)})
    state = read_state(tmp_path)
    for found, expected in zip(state["a"]["b"], [tensor, tensor.T, torch.tensor(3)], strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    assert state["empty"].shape == (0, 2)


def test_nan_tensors_keep_their_bits(tmp_path):
    write_state(tmp_path, {"x": torch.tensor([math.nan, math.inf, -0.0])})
    assert (
        read_state(tmp_path)["x"].view(torch.int32).tolist()
        == torch.tensor([math.nan, math.inf, -0.0]).view(torch.int32).tolist()
    )


def test_tensors_that_share_storage_are_stored_apart(tmp_path):
    tensor = torch.ones(2)
    write_state(tmp_path, {"a": tensor, "b": tensor})
    state = read_state(tmp_path)
    assert state["a"].data_ptr() != state["b"].data_ptr()


@pytest.mark.parametrize(
    "value, reason",
    [(math.nan, "float nan"), (object(), "object"), ({1: 2}, "key 1"), ({"$tensor": "x"}, "key"), (lambda: 0, "function")],
)
def test_what_cannot_be_stored_is_named(tmp_path, value, reason):
    with pytest.raises(CheckpointError, match=reason) as caught:
        write_state(tmp_path, {"deep": [value]})
    assert "deep" in str(caught.value)


class Trap:
    """Unpickling this raises the alarm."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


def write_pickle(path):
    path.write_bytes(pickle.dumps(Trap()))


def write_torch_file(path):
    torch.save({"x": Trap()}, path)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("write", [write_pickle, write_torch_file])
def test_a_pickle_is_refused_unopened(tmp_path, name, write):
    write_state(tmp_path, {"x": torch.ones(2)})
    write(tmp_path / name)
    with pytest.raises(CheckpointError, match="pickle") as caught:
        read_state(tmp_path)
    assert caught.value.where == tmp_path / name
    assert caught.value.next_step


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"\xff\xff garbage", b"[" * 50, b"\xff" * 8 + b"{}"])
def test_garbage_is_refused_by_name(tmp_path, name, content):
    write_state(tmp_path, {"x": torch.ones(2)})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        read_state(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    write_state(tmp_path, {"x": torch.ones(2)})
    (tmp_path / "tensors.safetensors").unlink()
    with pytest.raises(CheckpointError, match="the file is missing"):
        read_state(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"x": {"$tensor": "y"}}', "must contain the tensor with the name"),
        ('{"x": {"$tensor": ["x"]}}', "must contain the tensor with the name"),
        ('{"x": {"$tensor": "x"}, "y": {"$tensor": "y"}}', "the tensor 'y' is not stored"),
        ("{}", "does not refer to the stored tensor 'x'"),
        ('{"x": {"$tensor": "x"}, "y": 1e999}', "1e999 is too large for a number"),
        ('{"x": {"$tensor": "x"}, "x": {"$tensor": "x"}}', "twice"),
        ("[1]", "list"),
        ('{"a":' * 480 + "1" + "}" * 480, "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_state_that_does_not_belong_to_its_tensors_is_refused(tmp_path, content, reason):
    write_state(tmp_path, {"x": torch.ones(2)})
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_state(tmp_path)
    assert caught.value.where == tmp_path / "state.json"


def test_two_tensors_of_one_path_are_refused_instead_of_one_being_lost(tmp_path):
    with pytest.raises(CheckpointError, match="two tensors have the path 'a/b'"):
        write_state(tmp_path, {"a/b": torch.ones(2), "a": {"b": torch.zeros(2)}})


def test_a_document_larger_than_can_be_read_back_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("hyperion.checkpoints.states.STATE_BYTES", 1000)
    write_state(tmp_path, {"series": [1.5] * 100})
    with pytest.raises(CheckpointError, match="numbers and text"):
        write_state(tmp_path, {"series": [1.5] * 1000})
