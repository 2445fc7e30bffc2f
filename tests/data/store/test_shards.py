import numpy as np
import pytest

from hyperion.data.store.arrays import ArrayWriter, check_tokens, narrowed, open_shards, token_dtype, write_shards
from hyperion.data.store.folders import DataError, write_manifest

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
    with pytest.raises(DataError, match=r"train.npy has 2118 bytes, expected 2128: truncated or edited") as caught:
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
    with pytest.raises(DataError, match=r"train.npy is not an array of numbers"):
        open_shards(tmp_path)


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(DataError, match="no manifest"):
        open_shards(tmp_path)


def test_the_smallest_type_that_holds_every_id():
    assert token_dtype(50257) == token_dtype(65536) == np.uint16 and token_dtype(65537) == np.uint32


def test_ids_that_no_type_of_a_loader_holds_are_refused():
    for size in (0, (1 << 31) + 1):
        with pytest.raises(DataError, match=f"a vocabulary of {size} ids"):
            token_dtype(size)


@pytest.mark.parametrize(
    "values, dtype",
    [
        ([1, 70_000], np.uint16),
        ([1, -1], np.uint16),
        ([0, -1], np.uint64),
        ([1, 1 << 31], np.int32),
        ([1, 0.5], np.int64),
        ([1, np.nan], np.int64),
        ([1, np.inf], np.int32),
        ([1, 1 << 40], np.int16),
    ],
)
def test_a_value_that_a_narrower_type_does_not_hold_is_named(values, dtype):
    with pytest.raises(DataError, match=f"value 1 is .*, which {np.dtype(dtype)} cannot represent .1 values"):
        narrowed(np.array(values), dtype, "here")


def test_values_that_fit_come_back_in_memory_of_their_own():
    values = np.array([0, 65_535])
    assert narrowed(values, np.uint16, "here").tolist() == values.tolist()
    assert not np.shares_memory(narrowed(values, values.dtype, "here"), values)


def test_a_writer_refuses_what_its_type_does_not_hold(tmp_path):
    with ArrayWriter(tmp_path, "train", np.uint16) as writer, pytest.raises(DataError, match="value 2 is 70000"):
        writer.append(np.array([1, 2, 70_000], dtype=np.uint32))


def test_ids_outside_the_vocabulary_are_named():
    check_tokens(ARRAYS["train"], 1000, "here")
    with pytest.raises(DataError, match=r"token 3 has the id -1"):
        check_tokens(np.array([0, 1, 2, -1]), 1000, "here")
    with pytest.raises(DataError, match=r"tokens are float64 \[2\], expected integers"):
        check_tokens(np.array([np.nan, 1]), 1000, "here")
    with pytest.raises(DataError, match=r"token 990 has the id 990, outside a vocabulary of 990 \(10 such tokens\)"):
        check_tokens(ARRAYS["train"], 990, "here")
