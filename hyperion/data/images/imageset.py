"""Labelled images in two splits, and the checks that every set passes before anybody sees it."""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from hyperion.data.store.faults import DataError
from hyperion.data.store.sources import Checksums

IMAGE_SHAPE = (3, 32, 32)
_REMEDY = "remove these files and stage or prepare them again"


@dataclass(frozen=True)
class ImageSet:
    """Images and labels of a train and a test split.

    Attributes:
        name: 'cifar-10' or 'synthetic-gratings'; a synthetic set never carries the real one's name.
        source: 'mirror', 'cache', 'download' or 'synthetic'.
        detail: what the source says of itself, without machine paths.
        train_images, test_images: uint8 [N, 3, 32, 32].
        train_labels, test_labels: int64 [N].
        classes: class names by label.
        augmentations: random changes that keep the label: 'crop' (shifts), 'flip' (left to right).
        bayes_accuracy: the best accuracy any model can expect on the test split, None where unknown.
        checksums: whether the files are their publisher's; None for a synthetic set.
    """

    name: str
    source: str
    detail: str
    train_images: np.ndarray = field(repr=False)
    train_labels: np.ndarray = field(repr=False)
    test_images: np.ndarray = field(repr=False)
    test_labels: np.ndarray = field(repr=False)
    classes: tuple[str, ...]
    augmentations: tuple[str, ...]
    bayes_accuracy: float | None = None
    checksums: Checksums | None = None

    @property
    def sha256(self) -> str:
        """Hash of all images and labels."""
        digest = hashlib.sha256()
        for array in (self.train_images, self.train_labels, self.test_images, self.test_labels):
            digest.update(f"{array.dtype} {array.shape}\0".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def class_counts(self) -> dict[str, list[int]]:
        """Images by label, for each split."""
        splits = {"train": self.train_labels, "test": self.test_labels}
        return {split: np.bincount(labels, minlength=len(self.classes)).tolist() for split, labels in splits.items()}

    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel of the train images, in units of full scale (0 to 1)."""
        return channel_statistics(self.train_images)


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation by channel of uint8 [N, 3, H, W], in units of full scale (0 to 1), in float64."""
    means, deviations, levels = [], [], np.arange(256) / 255
    for channel in range(images.shape[1]):
        counts = np.zeros(256, dtype=np.int64)
        for start in range(0, len(images), 4096):
            counts += np.bincount(images[start : start + 4096, channel].ravel(), minlength=256)
        mean = float(counts @ levels / counts.sum())
        means.append(mean)
        deviations.append(float(np.sqrt(counts @ (levels - mean) ** 2 / counts.sum())))
    return tuple(means), tuple(deviations)


def check_split(images: np.ndarray, labels: np.ndarray, class_count: int, where: object) -> None:
    """Refuse images that are not finite uint8 [N, 3, 32, 32], or labels that do not fit them.

    Raises:
        DataError: names the first bad record.
    """
    check_images(images, where)
    check_labels(labels, len(images), class_count, where)


def check_images(images: np.ndarray, where: object) -> None:
    """Refuse images that are not finite uint8 [N, 3, 32, 32].

    Raises:
        DataError: names the first bad record.
    """
    if np.issubdtype(images.dtype, np.floating):
        bad = np.flatnonzero(~np.isfinite(images).reshape(len(images), -1).all(axis=1))
        fault = f"image {bad[0]} holds NaN or infinity" if len(bad) else f"images are {images.dtype}, expected uint8"
        raise DataError(fault, where=where, next_step=_REMEDY)
    if images.dtype != np.uint8 or images.shape[1:] != IMAGE_SHAPE:
        raise DataError(
            f"images are {images.dtype} {list(images.shape)}, expected uint8 [N, 3, 32, 32]", where=where, next_step=_REMEDY
        )


def check_labels(labels: np.ndarray, image_count: int, class_count: int, where: object) -> None:
    """Refuse labels that are not one class for each image.

    Raises:
        DataError: names the first bad record.
    """
    if labels.shape != (image_count,) or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"labels are {labels.dtype} {list(labels.shape)} for {image_count} images", where=where, next_step=_REMEDY
        )
    bad = np.flatnonzero((labels < 0) | (labels >= class_count))
    if len(bad):
        raise DataError(
            f"record {bad[0]} has the label {labels[bad[0]]}, outside 0 .. {class_count - 1} ({len(bad)} such records)",
            where=where,
            next_step=_REMEDY,
        )
