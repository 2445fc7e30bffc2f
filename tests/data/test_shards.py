import numpy as np
import pytest

from hyperion.data.faults import DataError
from hyperion.data.manifest import write_manifest
from hyperion.data.shards import check_tokens, open_shards, token_dtype, write_shards

ARRAYS = {"train": np.arange(1000, dtype=np.uint16), "valid": np.arange(10, dtype=np.uint16)}


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path / "set", ARRAYS, name="set", source="cache", detail="for a test", facts={"vocab_size": 1000})
    return tmp_path / "set"


def test_arrays_come_back_as_memory_maps(folder):
    arrays, manifest = open_shards(folder)
    assert manifest.facts == {"vocab_size": 1000} and set(arrays) == {"train", "valid"}
    for name, array in ARRAYS.items():
        assert isinstance(arrays[name], np.memmap) and arrays[name].dtype == np.uint16
        np.testing.assert_array_equal(arrays[name], array)


def test_a_truncated_file_is_named(folder):
    content = (folder / "train.npy").read_bytes()
    (folder / "train.npy").write_bytes(content[:-10])
    with pytest.raises(DataError, match=r"train.npy holds 2118 bytes where its manifest says 2128") as caught:
        open_shards(folder)
    assert str(folder / "train.npy") in str(caught.value)


def test_a_changed_token_is_found(folder):
    content = bytearray((folder / "train.npy").read_bytes())
    content[-1] ^= 1
    (folder / "train.npy").write_bytes(content)
    with pytest.raises(DataError, match="sha256"):
        open_shards(folder)


def test_arrays_of_objects_are_never_loaded(tmp_path):
    np.save(tmp_path / "train.npy", np.array([{}], dtype=object), allow_pickle=True)
    write_manifest(tmp_path, name="set", source="cache", detail="", facts={})
    with pytest.raises(DataError, match=r"train.npy is no array of numbers"):
        open_shards(tmp_path)


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(DataError, match="no manifest"):
        open_shards(tmp_path)


def test_the_smallest_type_that_holds_every_id():
    assert token_dtype(50257) == token_dtype(65536) == np.uint16 and token_dtype(65537) == np.uint32


def test_ids_outside_the_vocabulary_are_named():
    check_tokens(ARRAYS["train"], 1000, "here")
    with pytest.raises(DataError, match=r"token 990 has the id 990, outside a vocabulary of 990 \(10 such\)"):
        check_tokens(ARRAYS["train"], 990, "here")
