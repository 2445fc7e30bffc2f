import numpy as np
import pytest

from hyperion.data.images.imageset import CLASS_COUNT, check_split, synthetic_images


def _orientation(images: np.ndarray) -> np.ndarray:
    """Class of each image from its power spectrum: the angle of the strongest frequency."""
    grey = images.astype(np.float64).mean(axis=1)
    power = np.abs(np.fft.fft2(grey - grey.mean(axis=(1, 2), keepdims=True), s=(128, 128))) ** 2
    strongest = power.reshape(len(images), -1).argmax(axis=1)
    frequency = np.fft.fftfreq(128)
    angle = np.arctan2(frequency[strongest // 128], frequency[strongest % 128])
    return np.round(angle / np.pi * CLASS_COUNT).astype(int) % CLASS_COUNT


@pytest.mark.slow
@pytest.mark.parametrize("count", [1000, 1800, 777])
def test_exactly_the_stated_share_of_labels_is_wrong_and_the_pixels_tell_the_class(count):
    images = synthetic_images({"train": 10, "test": count}, seed=1)
    truth = _orientation(images.test_images)
    assert (truth != images.test_labels).sum() == round(0.1 * count)
    assert images.bayes_accuracy == 1 - round(0.1 * count) / count


@pytest.mark.slow
def test_labels_stay_balanced_and_wrong_ones_are_spread_evenly():
    images = synthetic_images({"train": 10, "test": 1800}, seed=2)
    assert images.class_counts()["test"] == [180] * 10
    truth = _orientation(images.test_images)
    table = np.zeros((10, 10), int)
    np.add.at(table, (truth, images.test_labels), 1)
    assert (np.diag(table) == 162).all() and set(table[~np.eye(10, dtype=bool)]) == {2}


def test_the_same_seed_gives_the_same_images():
    counts = {"train": 50, "test": 20}
    one, again, other = (synthetic_images(counts, seed) for seed in (0, 0, 1))
    assert one.sha256 == again.sha256 != other.sha256
    check_split(one.train_images, one.train_labels, 10, "here")
    assert not np.array_equal(one.train_images[:20], one.test_images)


def test_a_flip_is_not_among_the_augmentations_because_it_changes_the_class():
    images = synthetic_images({"train": 10, "test": 400})
    mirrored = _orientation(images.test_images[..., ::-1])
    truth = _orientation(images.test_images)
    np.testing.assert_array_equal(mirrored, (10 - truth) % 10)
    assert images.augmentations == ("crop",)
