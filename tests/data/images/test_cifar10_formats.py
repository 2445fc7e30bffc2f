import os
import pickle
import pickletools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hyperion.data.images.cifar10 import LAYOUTS, find_layout, read_binary_batch, read_layout, read_python_batch
from hyperion.data.store.folders import DataError
from tests.data.cifar10_files import binary_batch, python2_pickle, python_batch, small_batches, write_layout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_official_layout_gives_the_same_arrays(tmp_path, layout):
    batches = small_batches()
    path = write_layout(tmp_path, layout, batches)
    assert find_layout(tmp_path) == path
    found = read_layout(path)
    assert found.train_images.shape == (20, 3, 32, 32) and found.test_labels.dtype == np.int64
    for number in range(5):
        images, labels = batches[f"data_batch_{number + 1}"]
        np.testing.assert_array_equal(found.train_images[4 * number : 4 * number + 4], images)
        np.testing.assert_array_equal(found.train_labels[4 * number : 4 * number + 4], labels)
    np.testing.assert_array_equal(found.test_images, batches["test_batch"][0])
    np.testing.assert_array_equal(found.test_labels, batches["test_batch"][1])


def test_the_test_pickle_is_what_python_2_wrote():
    content = python_batch(*small_batches()["test_batch"], "testing batch 1 of 1")
    asked = {argument for code, argument, _ in pickletools.genops(content) if code.name == "GLOBAL"}
    assert asked == {"numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"}


class Runs:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_run_code_is_refused_and_nothing_runs(tmp_path, protocol):
    batches = small_batches()
    path = write_layout(tmp_path, "cifar-10-batches-py", batches)
    (path / "data_batch_3").write_bytes(pickle.dumps({"data": Runs(tmp_path / "trace")}, protocol=protocol))
    with pytest.raises(DataError, match=r"pickle refers to (posix|nt)\.mkdir.*nothing was executed") as caught:
        read_layout(path)
    assert str(path / "data_batch_3") in str(caught.value)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("thing", [np.array([{}], dtype=object), np.random.default_rng(0), {b"data": eval, b"labels": []}])
def test_other_globals_are_refused(thing):
    with pytest.raises(DataError):
        read_python_batch(pickle.dumps(thing, protocol=2), "here")


@pytest.mark.parametrize(
    ("batch", "fault"),
    [
        ([1, 2], "not a dictionary"),
        ({b"data": [1], b"labels": [1]}, "'data' is list, expected uint8"),
        ({b"labels": [1]}, "not a dictionary with 'data'"),
    ],
)
def test_other_contents_are_named(batch, fault):
    with pytest.raises(DataError, match=fault):
        read_python_batch(python2_pickle(batch), "here")


def test_labels_must_fit_the_images():
    images, labels = small_batches()["test_batch"]
    with pytest.raises(DataError, match="'labels' is not a list of 4 integers"):
        read_python_batch(python_batch(images, labels[:3], "short"), "here")
    with pytest.raises(DataError, match=r"'data' is uint8 \[4, 3071\]"):
        read_python_batch(python_batch(images.reshape(4, -1)[:, 1:], labels, "narrow"), "here")


def test_a_truncated_bin_is_named_with_its_bytes(tmp_path):
    path = write_layout(tmp_path, "cifar-10-batches-bin", small_batches())
    file = path / "data_batch_2.bin"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match="12192 bytes are 3 records of 3073 bytes and 2973 extra bytes") as caught:
        read_layout(path)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.endswith(".gz")])
def test_a_truncated_archive_is_named_with_its_bytes(tmp_path, layout):
    path = write_layout(tmp_path, layout, small_batches())
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match=rf"{layout} \(5000 bytes\) cannot be unpacked"):
        read_layout(path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_batch_is_named(tmp_path, layout):
    batches = small_batches()
    del batches["data_batch_4"]
    with pytest.raises(DataError, match="data_batch_4"):
        read_layout(write_layout(tmp_path, layout, batches))


@given(st.binary(max_size=7000))
@example(b"")
@example(bytes(3073))
def test_any_bytes_are_records_or_an_error(content):
    try:
        images, labels = read_binary_batch(content, "here")
    except DataError:
        assert len(content) % 3073 or not content
    else:
        assert binary_batch(images, labels) == content


@given(st.binary(max_size=300))
def test_any_bytes_are_no_pickle_that_runs(content):
    with pytest.raises(DataError):
        read_python_batch(content, "here")


@given(st.data())
def test_a_damaged_pickle_gives_arrays_or_an_error(data):
    images, labels = small_batches(2)["test_batch"]
    content = bytearray(python_batch(images, labels, "batch"))
    head = [*range(200), *range(len(content) - 200, len(content))]
    content[data.draw(st.sampled_from(head))] = data.draw(st.integers(0, 255))
    try:
        found, found_labels = read_python_batch(bytes(content), "here")
    except DataError:
        return
    assert found.dtype == np.uint8 and found.shape[1:] == (3, 32, 32) and len(found) == len(found_labels)
