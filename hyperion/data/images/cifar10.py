"""CIFAR-10 from a mirror, the cache or its official address, checked before use.

Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009;
https://www.cs.toronto.edu/~kriz/cifar.html
"""

import hashlib
from pathlib import Path

import numpy as np

from hyperion.data.errors import DataError, DataUnavailable
from hyperion.data.images.cifar10_formats import (
    BINARY_ARCHIVE,
    CLASSES,
    LAYOUTS,
    PYTHON_ARCHIVE,
    REMEDY,
    UNPACKED_BYTES,
    find_layout,
    layout_files,
    read_layout,
)
from hyperion.data.images.imageset import ImageSet, channel_statistics, check_split, synthetic_images
from hyperion.data.store.manifest import read_manifest, write_manifest
from hyperion.data.store.network import download
from hyperion.data.store.overlap import image_overlap, require_little_overlap
from hyperion.data.store.sources import Checksums, compare_checksums, mirror_root, take
from hyperion.data.store.staging import cache_root, staged
from hyperion.untrusted import read_bounded

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
FOLDER = "cifar-10"  # in the cache; a mirror holds the official names at its top
COUNTS = {"train": 50_000, "test": 10_000}
TRAIN_MEANS = (0.4914, 0.4822, 0.4465)
MEAN_TOLERANCE_OFFICIAL = 1e-4  # the published means have four digits
MEAN_TOLERANCE_OTHER = 5e-3  # pixels that went through lossy compression at 37 dB shift a mean by up to 3e-3
# Of all labels, train then test, one byte each, in the official order. Other encodings of the pixels have no published
# checksum, but their labels must be these: permuted labels have the right counts and teach nothing.
LABELS_SHA256 = "3edb456524d5918aefded81f5aef7c32efab2a788211df998a4eb0c8957baa1f"
# Stated by the data set's page (archives) and by torchvision (the files of the Python layout).
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
    """CIFAR-10, or the synthetic image set that takes its place where that is allowed or asked for.

    Args:
        source: 'auto', 'mirror', 'cache', 'download' or 'synthetic'.
        allow_synthetic: whether 'auto' may end at the synthetic set.
        synthetic_counts, seed: images a split and seed of the synthetic set; the real one ignores both.
        url: address of cifar-10-python.tar.gz; its md5 must be the official one.

    Raises:
        DataError: files missing, truncated, miscounted, unsafe, of other pixels or other labels (named), or test images
            among the train images; no source has it.
    """
    suppliers = {
        "mirror": lambda: _read(mirror_root(), "mirror", "the mirror"),
        "cache": cached_cifar10,
        "download": lambda: _downloaded(url),
        "synthetic": lambda: synthetic_images(synthetic_counts, seed),
    }
    return take("cifar-10", source, suppliers, allow_synthetic)


def stage_cifar10(url: str = URL) -> str:
    """Put CIFAR-10 into the cache, from the mirror where one is named, else from its official address.

    Returns:
        'present' when the cache already had it, else where it came from.

    Raises:
        DataError: neither can be had, or what came is wrong; the cache is as it was.
    """
    target = cache_root() / FOLDER
    if target.is_dir():
        cached_cifar10()
        return "present"
    try:
        root = mirror_root()
        _read(root, "mirror", "the mirror")
    except DataUnavailable:
        _stage_from_url(target, url)
        return "downloaded"
    layout = find_layout(root)
    with staged(target) as work:
        for file in layout_files(layout):
            copy = work / file.relative_to(root)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(read_bounded(file, DataError, REMEDY, UNPACKED_BYTES))
        write_manifest(work, name=FOLDER, source="mirror", detail="copied from the mirror")
    return "copied from the mirror"


def cached_cifar10() -> ImageSet:
    """CIFAR-10 of the cache.

    Raises:
        DataError: it is not there, or wrong.
    """
    return _read(cache_root() / FOLDER, "cache", "the cache")


def checksums(layout: Path, note: str = "") -> Checksums:
    """Compare the files of a layout with the published md5; there is none for the unpacked binary layout.

    Args:
        note: what is known of pixels that are not official.
    """
    return compare_checksums({file: OFFICIAL_MD5.get(file.name, "") for file in layout_files(layout)}, "md5", note)


def _read(root: Path, source: str, label: str) -> ImageSet:
    layout = find_layout(root)
    if layout is None:
        raise DataUnavailable(
            f"{label} has no CIFAR-10", where=root, next_step=f"put one of {', '.join(LAYOUTS)} there, or run `make fetch`"
        )
    manifest = None if source == "mirror" else read_manifest(root)  # a mirror's top is its owner's
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
    found = checksums(layout, f"{lossy}, means within {shift:.1e}")
    detail = f"{layout.name}: {found}; counts and labels verified, {overlap['test'].repeated} test images among the train images"
    arrays = (batches.train_images, batches.train_labels, batches.test_images, batches.test_labels)
    return ImageSet("cifar-10", source, detail, *arrays, CLASSES, ("crop", "flip"), checksums=found)


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
    """Refuse labels in another order than the official one: they would fit, and belong to other images."""
    found = hashlib.sha256(np.concatenate([train, test]).astype(np.uint8).tobytes()).hexdigest()  # all are 0 to 9
    if found != LABELS_SHA256:
        raise DataError(
            f"the labels have sha256 {found[:12]}, CIFAR-10's in their order have {LABELS_SHA256[:12]}: permuted, or the "
            "records were shuffled, and nothing proves that a label belongs to its image",
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
            next_step="these are not CIFAR-10's pixels (channel order, scale or content): copy the official archive",
        )
    return shift


def _downloaded(url: str) -> ImageSet:
    target = cache_root() / FOLDER
    if target.is_dir():
        return cached_cifar10()  # no second download, and the record says so
    _stage_from_url(target, url)
    return _read(target, "download", "the cache")


def _stage_from_url(target: Path, url: str) -> None:
    with staged(target) as work:
        download(url, work / PYTHON_ARCHIVE, md5=OFFICIAL_MD5[PYTHON_ARCHIVE])
        write_manifest(work, name=FOLDER, source="download", detail=f"downloaded from {url}")
