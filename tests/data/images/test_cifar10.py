import os
import pickle
import pickletools
import shutil

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hyperion.data import load_cifar10
from hyperion.data.images.cifar10 import (
    CLASSES,
    LAYOUTS,
    find_layout,
    published,
    read_binary_batch,
    read_layout,
    read_python_batch,
)
from hyperion.data.store.folders import DataError, cache_root
from tests.data.cifar10_files import binary_batch, numbered_pictures, python2_pickle, python_batch, small_batches, write_layout

FEW = {"train": 200, "test": 100}


@pytest.fixture
def full_mirror(tmp_path, monkeypatch, labels_in_turn):
    """A function that writes a mirror in the binary layout with numbered pictures of one colour."""
    root = tmp_path / "mirror"
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(root))

    def write(level_shift: int = 0, labels: np.ndarray | None = None, records: int = 10_000, leaked: int = 0):
        folder = root / "cifar-10-batches-bin"
        folder.mkdir(parents=True, exist_ok=True)
        in_turn = np.arange(records) % 10
        for number in range(1, 6):
            pixels = numbered_pictures(records, number - 1) + np.uint8(level_shift)
            (folder / f"data_batch_{number}.bin").write_bytes(binary_batch(pixels, in_turn))
        pixels = numbered_pictures(records, 5)
        if leaked:
            pixels[:leaked] = numbered_pictures(leaked, 2)
        (folder / "test_batch.bin").write_bytes(binary_batch(pixels, in_turn if labels is None else labels))

    return write


@pytest.mark.slow
@pytest.mark.mirror
def test_the_mirror_is_counted_and_called_not_official(mirror, monkeypatch, capsys):
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(mirror))
    images = load_cifar10(allow_synthetic=False)
    assert (images.name, images.source, images.bayes_accuracy) == ("cifar-10", "mirror", None)
    assert images.class_counts() == {"train": [5000] * 10, "test": [1000] * 10}
    assert images.train_images.shape == (50_000, 3, 32, 32) and images.test_images.flags.c_contiguous
    assert not images.checksums.official and str(mirror) not in images.detail
    assert "not official (0 of 6 files have the published md5; lossy mirror" in images.detail
    assert "0 test images among the train images" in images.detail
    assert images.classes == CLASSES and images.augmentations == ("crop", "flip")
    assert "cifar-10: source = MIRROR, NOT OFFICIAL" in capsys.readouterr().out


@pytest.mark.slow
def test_an_archive_of_the_python_layout_is_served_from_the_cache(flat_layouts, labels_in_turn, monkeypatch):
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(flat_layouts))
    assert published().stage() == "copied from the mirror"
    assert published().stage() == "present"
    monkeypatch.delenv("HYPERION_DATA_MIRROR")
    images = load_cifar10("cache")
    assert images.source == "cache" and "not official (0 of 1 files" in images.detail
    assert images.class_counts()["train"] == [5000] * 10
    staged = {path.name for path in (cache_root() / "cifar-10").iterdir()}
    assert staged == {"cifar-10-python.tar.gz", "manifest.json", ".hyperion.json"}


@pytest.mark.slow
def test_missing_images_are_counted(full_mirror):
    full_mirror(records=9_990)
    with pytest.raises(DataError, match="train split has 49950 images, expected 50000"):
        load_cifar10()


@pytest.mark.slow
def test_unbalanced_classes_are_named(full_mirror):
    labels = np.arange(10_000) % 10
    labels[0] = 1
    full_mirror(labels=labels)
    with pytest.raises(DataError, match="test split has 999 images of class airplane, expected 1000"):
        load_cifar10()


@pytest.mark.slow
def test_a_label_out_of_range_is_named_by_record(full_mirror):
    labels = np.arange(10_000) % 10
    labels[77] = 10
    full_mirror(labels=labels)
    with pytest.raises(DataError, match=r"record 77 has the label 10, outside 0 .. 9 \(1 such records\)"):
        load_cifar10()


@pytest.mark.slow
def test_other_pixels_are_refused(full_mirror):
    full_mirror(level_shift=3)
    with pytest.raises(DataError, match=r"channel means of the train split are 0.50.., .* within 0.005"):
        load_cifar10()


@pytest.mark.slow
@pytest.mark.parametrize(("leaked", "accepted"), [(10, True), (11, False)])
def test_test_images_among_the_train_images_are_refused(full_mirror, leaked, accepted):
    full_mirror(leaked=leaked)
    if accepted:
        assert "10 test images among the train images" in load_cifar10().detail
        return
    with pytest.raises(DataError, match=r"11 of 10000 images of the test split \(0.11%\) also occur in another split"):
        load_cifar10()


@pytest.mark.slow
def test_permuted_labels_are_refused(full_mirror):
    """Every class has as many images as before."""
    labels = np.arange(10_000) % 10
    labels[[0, 1]] = labels[[1, 0]]
    full_mirror(labels=labels)
    with pytest.raises(DataError, match="the labels are permuted or the records shuffled"):
        load_cifar10()


@pytest.mark.mirror
def test_permuted_labels_of_the_real_set_are_refused(mirror, tmp_path, monkeypatch):
    shutil.copytree(mirror / "cifar-10-batches-bin", tmp_path / "mirror/cifar-10-batches-bin")
    path = tmp_path / "mirror/cifar-10-batches-bin/data_batch_4.bin"
    records = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 3073).copy()
    records[:, 0] = np.random.default_rng(0).permutation(records[:, 0])
    path.chmod(0o644)
    path.write_bytes(records.tobytes())
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(tmp_path / "mirror"))
    with pytest.raises(DataError, match="the labels have sha256"):
        load_cifar10()


def test_a_download_with_the_wrong_md5_is_not_used(serve, tmp_path, capsys, data_home):
    write_layout(tmp_path / "served", "cifar-10-python.tar.gz", small_batches())
    url = serve(tmp_path / "served") + "/cifar-10-python.tar.gz"
    assert load_cifar10(synthetic_counts=FEW, url=url).source == "synthetic"
    banner = " ".join(capsys.readouterr().out.split())
    assert "expected c58f30108f718f92721af3b95e74349a; moved to quarantine/" in banner
    assert [path.name for path in (data_home / "raw").iterdir()] == ["quarantine"]


def test_a_refused_network_ends_at_synthetic_only_where_allowed(refused):
    images = load_cifar10(synthetic_counts=FEW, url=refused + "/file")
    assert (images.name, images.source) == ("synthetic-gratings", "synthetic")
    with pytest.raises(DataError, match="no source has cifar-10"):
        load_cifar10(allow_synthetic=False, url=refused + "/file")


@pytest.mark.mirror
def test_real_pixels_come_back_from_the_python_layout(mirror, tmp_path):
    found = read_layout(mirror / "cifar-10-batches-bin")
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    batches = {
        name: (found.train_images[100 * i : 100 * i + 100], found.train_labels[100 * i : 100 * i + 100])
        for i, name in enumerate(names)
    }
    again = read_layout(write_layout(tmp_path, "cifar-10-batches-py", batches))
    np.testing.assert_array_equal(again.train_images, found.train_images[:500])
    np.testing.assert_array_equal(again.train_labels, found.train_labels[:500])


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
