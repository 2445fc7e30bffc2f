"""Define and check image sets with a train and a test split, and generate a synthetic set whose best accuracy is known.

An image of the synthetic set shows a grating (parallel stripes). In class k, the orientation of the stripes is k * 18 degrees,
which is clearly visible for every phase, colour, contrast and noise. In each split, the labels of exactly round(FLIP_RATE * N) of
the N images are then changed to another class. The pixels do not show which labels were changed. Therefore the best possible
model predicts the orientation, and its accuracy is 1 - round(FLIP_RATE * N) / N.
"""

import hashlib
import math
from dataclasses import dataclass, field

import numpy as np

from hyperion.data.store.folders import DataError
from hyperion.data.store.sources import Checksums

CIFAR10, GRATINGS = "cifar-10", "synthetic-gratings"  # names of the sets that `load_cifar10` returns
IMAGE_SHAPE = (3, 32, 32)
_REMEDY = "correct your own arrays, or remove damaged files and stage or prepare them again"


@dataclass(frozen=True)
class ImageSet:
    """Images and labels of a train and a test split.

    Attributes:
        name: 'cifar-10', 'synthetic-gratings', or another name that the user chose.
        source: 'mirror', 'cache', 'download', 'synthetic', or 'files' for the user's own images.
        detail: description of the source, without local paths.
        train_images, test_images: uint8 [N, 3, 32, 32].
        train_labels, test_labels: int64 [N].
        classes: names of the classes. Label k belongs to classes[k].
        augmentations: names of the augmentations that do not change the class: 'crop' (shifts), 'flip' (mirrors left to right).
        bayes_accuracy: best possible accuracy on the test split; None if it is unknown.
        checksums: result of the comparison with the published checksums; None for a synthetic set.
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

    def __post_init__(self) -> None:
        """Check that the user's own images do not have the name of a known set.

        Raises:
            DataError: the set is called 'cifar-10' without checksums, or 'synthetic-gratings' without being synthetic.
        """
        # Rows and prepared folders state only the name, so accuracies on other images would be taken for those on CIFAR-10.
        is_known = {CIFAR10: self.checksums is not None, GRATINGS: self.source == "synthetic"}
        if not is_known.get(self.name, True):
            raise DataError(
                f"the images are called {self.name!r}, but they were not loaded by `load_cifar10`",
                where=f"ImageSet of the source {self.source!r}: {self.detail}",
                next_step="give your own images another name, or load the known ones with hyperion.data.load_cifar10",
            )

    @property
    def sha256(self) -> str:
        """Hash of all images and labels."""
        digest = hashlib.sha256()
        for array in (self.train_images, self.train_labels, self.test_images, self.test_labels):
            # Dtype and shape are part of the hash, because equal bytes with another shape are another data set.
            digest.update(f"{array.dtype} {array.shape}\0".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def class_counts(self) -> dict[str, list[int]]:
        """Return the number of images of each label, for each split."""
        splits = {"train": self.train_labels, "test": self.test_labels}
        return {split: np.bincount(labels, minlength=len(self.classes)).tolist() for split, labels in splits.items()}

    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the means and standard deviations of the channels of the train images, with pixels scaled to 0 .. 1."""
        return channel_statistics(self.train_images)


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the means and standard deviations of the channels of uint8 images [N, 3, H, W], with pixels scaled to 0 .. 1."""
    means, deviations = [], []
    for channel in range(images.shape[1]):
        total = squares = 0
        # The pixels and their squares are integers, so the sums of a part are exact in float64, and need no float copy of all
        # images. The variance is a difference of large numbers. It is computed exactly, because Python's integers have unlimited
        # size.
        for start in range(0, len(images), 1024):
            pixels = images[start : start + 1024, channel].ravel().astype(np.float64)
            total += int(pixels.sum())
            squares += int(pixels @ pixels)
        count = images[:, channel].size
        means.append(total / count / 255)
        deviations.append(math.sqrt((count * squares - total**2) / count**2) / 255)
    return tuple(means), tuple(deviations)


def check_split(images: np.ndarray, labels: np.ndarray, class_count: int, where: object) -> None:
    """Check that images are uint8 [N, 3, 32, 32] and that labels contain one class per image.

    Raises:
        DataError: images or labels do not have this form. The message names the first invalid record.
    """
    check_images(images, where)
    check_labels(labels, len(images), class_count, where)


def check_images(images: np.ndarray, where: object) -> None:
    """Check that images are uint8 [N, 3, 32, 32].

    Raises:
        DataError: images have another dtype or shape. If an image contains NaN or infinity, the message names this image.
    """
    if np.issubdtype(images.dtype, np.floating):
        bad = np.flatnonzero(~np.isfinite(images).reshape(len(images), -1).all(axis=1))
        fault = f"image {bad[0]} holds NaN or infinity" if len(bad) else f"images are {images.dtype}, expected uint8"
        raise DataError(fault, where=where, next_step=_REMEDY)
    if images.dtype != np.uint8 or images.shape[1:] != IMAGE_SHAPE:
        raise DataError(
            f"images are {images.dtype} {list(images.shape)}, expected uint8 [N, 3, 32, 32]",
            where=where,
            next_step="prepared image sets have this form only: resize your own images to 32 x 32 with three channels, or pass "
            "square images of another size directly to ImageBatches; if the images come from stored files, prepare these again",
        )


def check_labels(labels: np.ndarray, image_count: int, class_count: int, where: object) -> None:
    """Check that labels contain one class per image.

    Raises:
        DataError: labels do not have this form. The message names the first invalid record.
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


CLASS_COUNT = 10  # as in CIFAR-10
FLIP_RATE = 0.1  # fraction of the labels that are changed to another class
PERIOD_PIXELS = (5.0, 8.0)
NOISE_LEVELS = 12.0  # standard deviation of the noise, for pixel values from 0 to 255
CHUNK = 2048


def synthetic_images(counts: dict[str, int], seed: int = 0) -> ImageSet:
    """Generate the synthetic image set (see the module's docstring).

    Args:
        counts: number of images in 'train' and 'test'.
        seed: seed of the images and of the changed labels.
    """
    arrays, best = [], {}
    for index, split in enumerate(("train", "test")):
        # Each split has its own random stream, so the size of one split does not change the other.
        generator = np.random.default_rng((seed, index))
        classes = generator.permutation(np.arange(counts[split]) % CLASS_COUNT)
        labels = _with_flips(classes, round(FLIP_RATE * counts[split]), generator)
        best[split] = float(np.mean(labels == classes))
        arrays += [_gratings(classes, generator), labels]
    names = tuple(f"{18 * k} degrees" for k in range(CLASS_COUNT))
    detail = f"made-up gratings, seed {seed}, {counts['train']} + {counts['test']} images, {FLIP_RATE:.0%} of labels changed"
    # Mirroring left to right turns 18 degrees into 162 degrees, which is another class, so only shifts are allowed.
    train_images, train_labels, test_images, test_labels = arrays
    return ImageSet(
        GRATINGS,
        "synthetic",
        detail,
        train_images,
        train_labels,
        test_images,
        test_labels,
        classes=names,
        augmentations=("crop",),
        bayes_accuracy=best["test"],
    )


def _with_flips(classes: np.ndarray, flips: int, generator: np.random.Generator) -> np.ndarray:
    """Return int64 labels, of which exactly `flips` differ from `classes`.

    The changes are spread evenly over the classes and over the wrong labels. The label of the i-th changed image of each class
    increases by 1 + i mod 9. For each i this is a permutation of the classes, so the labels are as balanced as the classes.
    """
    labels = classes.astype(np.int64)
    order = generator.permutation(len(classes))
    position = np.empty(len(classes), dtype=np.int64)  # position of each image among the images of its class, in random order
    for label in range(CLASS_COUNT):
        members = order[classes[order] == label]
        position[members] = np.arange(len(members))
    changed = np.lexsort((classes, position))[:flips]  # take the first image of every class, then the second, ...
    labels[changed] = (classes[changed] + 1 + position[changed] % (CLASS_COUNT - 1)) % CLASS_COUNT
    return labels


def _gratings(classes: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    images = np.empty((len(classes), *IMAGE_SHAPE), dtype=np.uint8)
    # Pixel coordinates relative to the centre of the image.
    y, x = np.mgrid[0:32, 0:32].astype(np.float32) - 15.5
    for start in range(0, len(classes), CHUNK):
        part = classes[start : start + CHUNK]
        n = len(part)
        angle = (np.pi / CLASS_COUNT * part).astype(np.float32)[:, None, None]
        period = generator.uniform(*PERIOD_PIXELS, size=(n, 1, 1)).astype(np.float32)
        phase = generator.uniform(0, 2 * np.pi, size=(n, 1, 1)).astype(np.float32)
        wave = np.cos((np.cos(angle) * x + np.sin(angle) * y) * (2 * np.pi / period) + phase)
        base = generator.uniform(100, 155, size=(n, 3, 1, 1)).astype(np.float32)
        contrast = generator.uniform(35, 65, size=(n, 3, 1, 1)).astype(np.float32)
        noise = generator.standard_normal((n, *IMAGE_SHAPE), dtype=np.float32) * np.float32(NOISE_LEVELS)
        images[start : start + n] = np.clip(base + contrast * wave[:, None] + noise, 0, 255)
    return images
