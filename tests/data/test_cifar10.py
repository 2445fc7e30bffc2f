import numpy as np
import pytest
from cifar10_files import FLAT_PIXELS, binary_batch, small_batches, write_layout

from hyperion.data import load_cifar10
from hyperion.data.cifar10 import stage_cifar10
from hyperion.data.cifar10_formats import CLASSES, read_layout
from hyperion.data.faults import DataError
from hyperion.data.staging import cache_root

FEW = {"train": 200, "test": 100}


@pytest.fixture
def full_mirror(tmp_path, monkeypatch):
    """A mirror in the binary layout with one-coloured pictures; change `arrays` and call `write`."""
    root = tmp_path / "mirror"
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(root))
    image = np.repeat(np.array(FLAT_PIXELS, np.uint8), 1024)

    def write(level_shift: int = 0, labels: np.ndarray | None = None, records: int = 10_000) -> None:
        folder = root / "cifar-10-batches-bin"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.broadcast_to((image + level_shift).reshape(1, 3, 32, 32), (records, 3, 32, 32))
        content = binary_batch(pixels, np.arange(records) % 10)
        for number in range(1, 6):
            (folder / f"data_batch_{number}.bin").write_bytes(content)
        changed = content if labels is None else binary_batch(pixels, labels)
        (folder / "test_batch.bin").write_bytes(changed)

    return write


@pytest.mark.mirror
def test_the_mirror_is_counted_and_called_not_official(mirror, monkeypatch, capsys):
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(mirror))
    images = load_cifar10(allow_synthetic=False)
    assert (images.name, images.source, images.bayes_accuracy) == ("cifar-10", "mirror", None)
    assert images.class_counts() == {"train": [5000] * 10, "test": [1000] * 10}
    assert images.train_images.shape == (50_000, 3, 32, 32) and images.test_images.flags.c_contiguous
    assert "not official pixels" in images.detail and str(mirror) not in images.detail
    assert images.classes == CLASSES and images.augmentations == ("crop", "flip")
    assert "cifar-10: source = MIRROR" in capsys.readouterr().out


def test_an_archive_of_the_python_layout_is_served_from_the_cache(flat_layouts, monkeypatch):
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(flat_layouts))
    assert stage_cifar10() == "copied from the mirror"
    assert stage_cifar10() == "present"
    monkeypatch.delenv("HYPERION_DATA_MIRROR")
    images = load_cifar10("cache")
    assert images.source == "cache" and "not official pixels" in images.detail
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
    with pytest.raises(DataError, match=r"channel means of the train split are 0.5020, .* within 0.005"):
        load_cifar10()


def test_a_download_with_the_wrong_md5_is_not_used(serve, tmp_path, capsys, data_home):
    write_layout(tmp_path / "served", "cifar-10-python.tar.gz", small_batches())
    url = serve(tmp_path / "served") + "/cifar-10-python.tar.gz"
    assert load_cifar10(synthetic_counts=FEW, url=url).source == "synthetic"
    banner = capsys.readouterr().out
    assert "expected c58f30108f718f92721af3b95e74349a; kept as quarantine/" in banner
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
