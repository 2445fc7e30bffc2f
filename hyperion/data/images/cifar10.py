"""CIFAR-10 from a mirror, the cache or its official address, verified before use.

Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009;
https://www.cs.toronto.edu/~kriz/cifar.html
"""

import hashlib
from pathlib import Path

import numpy as np

from hyperion.data.images.cifar10_formats import (
    BINARY_ARCHIVE,
    CLASSES,
    LAYOUTS,
    PYTHON_ARCHIVE,
    find_layout,
    layout_files,
    read_layout,
)
from hyperion.data.images.imageset import ImageSet, channel_statistics, check_split, synthetic_images
from hyperion.data.store.folders import DataError, DataUnavailable, read_manifest, write_manifest
from hyperion.data.store.overlap import image_overlap, require_little_overlap
from hyperion.data.store.sources import Checksums, PublishedSet, compare_checksums, download, take
from hyperion.errors import not_none

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
FOLDER = "cifar-10"  # in the cache; a mirror has the official names at its top level
COUNTS = {"train": 50_000, "test": 10_000}
TRAIN_MEANS = (0.4914, 0.4822, 0.4465)
MEAN_TOLERANCE_OFFICIAL = 1e-4  # the published means have four digits
MEAN_TOLERANCE_OTHER = 5e-3  # lossy compression at 37 dB shifts a mean by up to 3e-3
# Hash of all labels in the official order, train then test, one byte each. Re-encoded pixels have no published checksum, but
# their labels must match: permuted labels have correct counts, and training on them is useless.
LABELS_SHA256 = "3edb456524d5918aefded81f5aef7c32efab2a788211df998a4eb0c8957baa1f"
# Stated by the data set's web page (archives) and by torchvision (files of the Python layout).
OFFICIAL_MD5 = {
    PYTHON_ARCHIVE: "c58f30108f718f92721af3b95e74349a",
    BINARY_ARCHIVE: "c32a1d4ab5d03f1284b67883e8d87530",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}


def load_cifar10(
    source: str = "auto",
    *,
    allow_synthetic: bool = True,
    synthetic_counts: dict[str, int] = COUNTS,
    seed: int = 0,
    url: str = URL,
) -> ImageSet:
    """Load CIFAR-10, or the synthetic image set if it is requested or allowed as a fallback.

    Args:
        source: 'auto', 'mirror', 'cache', 'download' or 'synthetic'.
        allow_synthetic: let 'auto' fall back to the synthetic set.
        synthetic_counts, seed: number of images per split and seed of the synthetic set; not used for CIFAR-10.
        url: address of cifar-10-python.tar.gz; the file must have the official md5.

    Raises:
        DataError: files are missing, truncated, miscounted, unsafe, or have other pixels or labels; train and test images
            overlap; or no source has the data.
    """
    suppliers = {**published(url).suppliers(), "synthetic": lambda: synthetic_images(synthetic_counts, seed)}
    return take("cifar-10", source, suppliers, allow_synthetic)


def published(url: str = URL) -> PublishedSet[ImageSet]:
    """Return the official CIFAR-10, downloaded from `url` if necessary.

    The mirror has the official names at its top level.
    """

    def fetch(work: Path) -> None:
        download(url, work / PYTHON_ARCHIVE, md5=OFFICIAL_MD5[PYTHON_ARCHIVE])
        write_manifest(work, name=FOLDER, source="download", detail=f"downloaded from {url}")

    return PublishedSet(FOLDER, _read, lambda root: layout_files(not_none(find_layout(root))), fetch, at_top=True)


def checksums(layout: Path, note: str = "") -> Checksums:
    """Compare the files of a layout with the published md5. For the unpacked binary layout none are published.

    Args:
        note: what was checked on pixels that are not official.
    """
    return compare_checksums({file: OFFICIAL_MD5.get(file.name, "") for file in layout_files(layout)}, "md5", note)


def _read(root: Path, source: str, label: str) -> ImageSet:
    layout = find_layout(root)
    if layout is None:
        raise DataUnavailable(
            f"{label} has no CIFAR-10", where=root, next_step=f"put one of {', '.join(LAYOUTS)} there, or run `make fetch`"
        )
    manifest = None if source == "mirror" else read_manifest(root)  # the top level of a mirror belongs to its owner
    if manifest is not None:
        manifest.verify(root)
    batches = read_layout(layout)
    for split, images, labels in (
        ("train", batches.train_images, batches.train_labels),
        ("test", batches.test_images, batches.test_labels),
    ):
        check_split(images, labels, len(CLASSES), f"{layout}, {split} split")
        _require_balance(split, labels, layout)
    _require_labels(batches.train_labels, batches.test_labels, layout)
    shift = _require_means(batches.train_images, layout)
    overlap = image_overlap(batches.train_images, batches.test_images)
    require_little_overlap(overlap, "images", layout)
    lossy = "lossy mirror: other pixels than the official ones" if shift > MEAN_TOLERANCE_OFFICIAL else "pixels unproven"
    published = checksums(layout, f"{lossy}, means within {shift:.1e}")
    detail = (
        f"{layout.name}: {published}; counts and labels verified, {overlap['test'].repeated} test images among the train images"
    )
    arrays = (batches.train_images, batches.train_labels, batches.test_images, batches.test_labels)
    return ImageSet("cifar-10", source, detail, *arrays, CLASSES, ("crop", "flip"), checksums=published)


def _require_balance(split: str, labels: np.ndarray, layout: Path) -> None:
    expected = COUNTS[split] // len(CLASSES)
    counts = np.bincount(labels, minlength=len(CLASSES))
    remedy = "the files are incomplete or another data set: copy the official archive"
    if len(labels) != COUNTS[split]:
        raise DataError(f"{split} split has {len(labels)} images, expected {COUNTS[split]}", where=layout, next_step=remedy)
    for name, count in zip(CLASSES, counts, strict=True):
        if count != expected:
            raise DataError(
                f"{split} split has {count} images of class {name}, expected {expected}", where=layout, next_step=remedy
            )


def _require_labels(train: np.ndarray, test: np.ndarray, layout: Path) -> None:
    """Check that the labels have the official order; permuted labels would pass all other checks."""
    found = hashlib.sha256(np.concatenate([train, test]).astype(np.uint8).tobytes()).hexdigest()  # all are 0 to 9
    if found != LABELS_SHA256:
        raise DataError(
            f"the labels have sha256 {found[:12]}, expected {LABELS_SHA256[:12]}: the labels are permuted or the records "
            "shuffled, so the labels may belong to other images",
            where=layout,
            next_step="copy CIFAR-10 with its records in the official order",
        )


def _require_means(images: np.ndarray, layout: Path) -> float:
    tolerance = MEAN_TOLERANCE_OTHER
    means, _ = channel_statistics(images)
    shift = max(abs(mean - official) for mean, official in zip(means, TRAIN_MEANS, strict=True))
    if shift > tolerance:
        raise DataError(
            f"channel means of the train split are {', '.join(f'{mean:.4f}' for mean in means)}, "
            f"expected {', '.join(map(str, TRAIN_MEANS))} within {tolerance:g}",
            where=layout,
            next_step="these are not the pixels of CIFAR-10 (channel order, scale or content): copy the official archive",
        )
    return shift
