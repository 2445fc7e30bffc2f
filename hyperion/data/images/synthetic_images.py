"""Made-up images whose best possible accuracy is known exactly.

A class is the orientation of a grating, k * 18 degrees, plain to see whatever its phase, colour, contrast and noise.
Then the labels of exactly round(flip_rate * N) images of each split are changed to another class, evenly, so that
nothing in the pixels tells which: the best any model can do is to name the orientation, and its accuracy is 1 -
round(flip_rate * N) / N.
"""

import numpy as np

from hyperion.data.images.imageset import IMAGE_SHAPE, ImageSet

CLASS_COUNT = 10
PERIOD_PIXELS = (5.0, 8.0)
NOISE_LEVELS = 12.0  # standard deviation, of 255
CHUNK = 2048


def synthetic_images(counts: dict[str, int], seed: int = 0, flip_rate: float = 0.1) -> ImageSet:
    """The synthetic image set.

    Args:
        counts: images in 'train' and 'test'.
        flip_rate: share of labels changed.
    """
    arrays, best = [], {}
    for index, split in enumerate(("train", "test")):
        generator = np.random.default_rng((seed, index))
        classes = generator.permutation(np.arange(counts[split]) % CLASS_COUNT)
        labels = _with_flips(classes, round(flip_rate * counts[split]), generator)
        best[split] = float(np.mean(labels == classes))
        arrays += [_gratings(classes, generator), labels]
    names = tuple(f"{18 * k} degrees" for k in range(CLASS_COUNT))
    detail = f"made-up gratings, seed {seed}, {counts['train']} + {counts['test']} images, {flip_rate:.0%} of labels changed"
    # A flip from left to right turns 18 degrees into 162: another class, so only shifts keep the label.
    return ImageSet("synthetic-gratings", "synthetic", detail, *arrays, names, ("crop",), best["test"])


def _with_flips(classes: np.ndarray, flips: int, generator: np.random.Generator) -> np.ndarray:
    """Labels int64 of which exactly `flips` differ from `classes`, spread evenly over classes and over the wrong
    labels.

    The i-th changed image of every class moves up by 1 + i mod 9 classes: a permutation of the classes for each i, so
    the label counts stay as balanced as the classes were.
    """
    labels = classes.astype(np.int64)
    order = generator.permutation(len(classes))
    position = np.empty(len(classes), dtype=np.int64)  # of each image among those of its class, in random order
    for label in range(CLASS_COUNT):
        members = order[classes[order] == label]
        position[members] = np.arange(len(members))
    changed = np.lexsort((classes, position))[:flips]  # the first of every class, then the second of every class, ...
    labels[changed] = (classes[changed] + 1 + position[changed] % (CLASS_COUNT - 1)) % CLASS_COUNT
    return labels


def _gratings(classes: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    images = np.empty((len(classes), *IMAGE_SHAPE), dtype=np.uint8)
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
