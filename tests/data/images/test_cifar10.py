import shutil

import numpy as np
import pytest

from hyperion.data import load_cifar10
from hyperion.data.images.cifar10 import CLASSES, published, read_layout
from hyperion.data.store.folders import DataError, cache_root
from tests.data.cifar10_files import binary_batch, numbered_pictures, small_batches, write_layout

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


def test_missing_images_are_counted(full_mirror):
    full_mirror(records=9_990)
    with pytest.raises(DataError, match="train split has 49950 images, expected 50000"):
        load_cifar10()


def test_unbalanced_classes_are_named(full_mirror):
    labels = np.arange(10_000) % 10
    labels[0] = 1
    full_mirror(labels=labels)
    with pytest.raises(DataError, match="test split has 999 images of class airplane, expected 1000"):
        load_cifar10()


def test_a_label_out_of_range_is_named_by_record(full_mirror):
    labels = np.arange(10_000) % 10
    labels[77] = 10
    full_mirror(labels=labels)
    with pytest.raises(DataError, match=r"record 77 has the label 10, outside 0 .. 9 \(1 such records\)"):
        load_cifar10()


def test_other_pixels_are_refused(full_mirror):
    full_mirror(level_shift=3)
    with pytest.raises(DataError, match=r"channel means of the train split are 0.50.., .* within 0.005"):
        load_cifar10()


@pytest.mark.parametrize(("leaked", "accepted"), [(10, True), (11, False)])
def test_test_images_among_the_train_images_are_refused(full_mirror, leaked, accepted):
    full_mirror(leaked=leaked)
    if accepted:
        assert "10 test images among the train images" in load_cifar10().detail
        return
    with pytest.raises(DataError, match=r"11 of 10000 images of the test split \(0.11%\) also occur in another split"):
        load_cifar10()


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
    banner = capsys.readouterr().out
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
