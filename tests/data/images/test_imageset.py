import numpy as np
import pytest

from hyperion.data.images.imageset import ImageSet, channel_statistics, check_split, synthetic_images
from hyperion.data.store.folders import DataError

IMAGES, LABELS = np.zeros((5, 3, 32, 32), np.uint8), np.arange(5)


def test_statistics_are_those_of_float64():
    images = np.random.default_rng(0).integers(0, 256, (5000, 3, 32, 32), dtype=np.uint8)
    mean, deviation = channel_statistics(images)
    np.testing.assert_allclose(mean, (images / 255).mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(deviation, (images / 255).std(axis=(0, 2, 3)), rtol=1e-12)


def test_good_records_pass():
    check_split(IMAGES, LABELS, 5, "here")


def test_a_nan_image_is_named():
    images = IMAGES.astype(np.float32)
    images[3, 1, 2, 2] = np.nan
    with pytest.raises(DataError, match="image 3 holds NaN or infinity"):
        check_split(images, LABELS, 5, "here")


@pytest.mark.parametrize(
    ("images", "labels", "fault"),
    [
        (IMAGES.astype(np.float32), LABELS, "images are float32, expected uint8"),
        (IMAGES[:, :1], LABELS, r"images are uint8 \[5, 1, 32, 32\]"),
        (IMAGES, LABELS[:4], r"labels are int64 \[4\] for 5 images"),
        (IMAGES, LABELS.astype(float), "labels are float64"),
        (IMAGES, LABELS - 1, "record 0 has the label -1"),
        (IMAGES, LABELS + 1, "record 4 has the label 5, outside 0 .. 4"),
    ],
)
def test_bad_records_are_named(images, labels, fault):
    with pytest.raises(DataError, match=fault):
        check_split(images, labels, 5, "here")


def test_images_of_another_size_are_sent_to_the_batches_that_take_them():
    with pytest.raises(DataError, match=r"\[5, 3, 64, 64\]") as refused:
        check_split(np.zeros((5, 3, 64, 64), np.uint8), LABELS, 5, "here")
    assert "32 x 32" in (refused.value.next_step or "") and "ImageBatches" in (refused.value.next_step or "")


def test_the_hash_sees_one_pixel():
    one, other = (synthetic_images({"train": 20, "test": 10}) for _ in range(2))
    assert one.sha256 == other.sha256
    other.test_images[0, 0, 0, 0] ^= 1
    assert one.sha256 != other.sha256


@pytest.mark.parametrize(("name", "source"), [("cifar-10", "files"), ("cifar-10", "mirror"), ("synthetic-gratings", "files")])
def test_images_of_another_origin_cannot_have_the_name_of_a_known_set(name, source):
    with pytest.raises(DataError, match=f"the images are called '{name}'") as refused:
        ImageSet(name, source, "my folder", IMAGES, LABELS, IMAGES, LABELS, tuple("abcde"), ("flip",))
    assert "another name" in refused.value.next_step
