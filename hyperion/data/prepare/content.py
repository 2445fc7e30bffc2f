"""Check the content of prepared arrays: ids within the vocabulary, text that the tokenizer reproduces, valid images and labels,
and the counts recorded when the data were prepared.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tokenizers

from hyperion.data.errors import DataError
from hyperion.data.images.imageset import IMAGE_SHAPE, channel_statistics, check_images, check_labels
from hyperion.data.store.arrays import check_tokens, first_bad, token_dtype
from hyperion.data.store.manifest import FILE_NAME, DataManifest
from hyperion.data.store.overlap import Overlap, image_overlap, require_little_overlap, token_overlap
from hyperion.data.text.corpus import SPLITS
from hyperion.untrusted import printable, read_bounded

FORMAT = 3  # version of the layout; part of the folder names and the manifests, so that a new layout gets new folders
SAMPLES = "_samples"  # suffix of the array with the start and length of each line of a split
TOKENIZER_FILE = "tokenizer.json"
ARRAYS_OF = {
    "text": tuple(f"{split}{kind}" for split in SPLITS for kind in ("", SAMPLES)),
    "images": tuple(f"{split}_{kind}" for split in ("train", "test") for kind in ("images", "labels")),
}
_REMEDY = "prepare the data again"


def content_faults(
    folder: Path, arrays: dict[str, np.ndarray], manifest: DataManifest, thorough: bool = False
) -> Iterator[DataError]:
    """Yield one error for each fault in the content of prepared arrays.

    Args:
        arrays: by name; missing ones are not checked.
        thorough: also compare with the counts and statistics recorded when the data were prepared. This detects an undamaged
            file of another split or tokenizer, even if the manifest was rewritten to match it.
    """
    facts = manifest.facts
    checks = _text_checks if facts["kind"] == "text" else _image_checks
    try:
        for check, *arguments in checks(folder, arrays, facts, thorough):
            try:
                check(*arguments)
            except DataError as fault:
                yield fault
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        fault = f"its facts do not fit its kind of data: {printable(repr(error))[:200]}"
        yield DataError(fault, where=folder / FILE_NAME, next_step=_REMEDY)


def _text_checks(folder: Path, arrays: dict[str, np.ndarray], facts: dict, thorough: bool) -> Iterator[tuple]:
    decoder = _decoder(folder / TOKENIZER_FILE) if thorough else None
    for split in SPLITS:
        tokens, samples, steps = arrays.get(split), arrays.get(f"{split}{SAMPLES}"), facts["steps"][split]
        path, places = folder / f"{split}.npy", folder / f"{split}{SAMPLES}.npy"
        if tokens is not None:
            yield _check_token_type, path, tokens, facts["vocab_size"]
            yield check_tokens, tokens, facts["vocab_size"], path
        if tokens is not None and thorough:
            yield _check_count, path, "tokens", len(tokens), steps["tokenize"]["tokens"]
        if tokens is not None and decoder is not None:
            yield _check_opening, path, tokens, decoder, steps["tokenize"]["opening"]
        if samples is not None:
            yield _check_samples, places, samples, steps["tokenize"]["tokens"]
        if samples is not None and thorough:
            yield _check_count, places, "samples", len(samples), steps["filter"]["non_empty"]
    if thorough and all(f"{split}{kind}" in arrays for split in SPLITS for kind in ("", SAMPLES)):
        yield _check_text_overlap, folder, arrays, facts["overlap"]


def _image_checks(folder: Path, arrays: dict[str, np.ndarray], facts: dict, thorough: bool) -> Iterator[tuple]:
    for split in ("train", "test"):
        images, labels, steps = arrays.get(f"{split}_images"), arrays.get(f"{split}_labels"), facts["steps"][split]
        path, label_path = folder / f"{split}_images.npy", folder / f"{split}_labels.npy"
        if images is not None:
            yield check_images, images, path
            yield _check_type, path, images, np.dtype(np.uint8), IMAGE_SHAPE
        if images is not None and thorough:
            yield _check_count, path, "images", len(images), steps["read"]["images"]
            yield _check_channels, path, images, steps["channels"]["mean"]
        if labels is not None:
            yield _check_type, label_path, labels, np.dtype(np.int64), ()
            yield check_labels, labels, steps["read"]["images"], len(facts["classes"]), label_path
        if labels is not None and thorough:
            yield _check_classes, label_path, labels, steps["classes"]
    if thorough and "train_images" in arrays and "test_images" in arrays:
        yield _check_image_overlap, folder, arrays, facts["overlap"]


def _decoder(path: Path) -> tokenizers.Tokenizer | None:
    """Return the stored tokenizer, None if it is damaged; its hash reports the damage."""
    try:
        return tokenizers.Tokenizer.from_buffer(read_bounded(path, DataError, _REMEDY))
    except Exception:  # tokenizers raises plain Exception
        return None


def _check_type(path: Path, array: np.ndarray, dtype: np.dtype, row_shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape[1:] != row_shape:
        raise DataError(
            f"{path.name} is {array.dtype.str} {list(array.shape)}, expected {dtype.str} {['N', *row_shape]}",
            where=path,
            next_step=_REMEDY,
        )


def _check_token_type(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    _check_type(path, tokens, token_dtype(vocab_size, path), ())


def _check_text_overlap(folder: Path, arrays: dict[str, np.ndarray], expected: dict) -> None:
    tokens, samples = ({split: arrays[f"{split}{kind}"] for split in SPLITS} for kind in ("", SAMPLES))
    if any(array.ndim != 2 or array.shape[1] != 2 for array in samples.values()):
        return  # _check_samples reports it
    _check_overlap(folder, token_overlap(tokens, samples), expected, "long lines")


def _check_image_overlap(folder: Path, arrays: dict[str, np.ndarray], expected: dict) -> None:
    _check_overlap(folder, image_overlap(arrays["train_images"], arrays["test_images"]), expected, "images")


def _check_overlap(folder: Path, found: dict[str, Overlap], expected: dict, what: str) -> None:
    """Check that the splits overlap little, and as much as when the data were prepared."""
    require_little_overlap(found, what, folder / FILE_NAME)
    for split, overlap in found.items():
        if overlap.as_dict() != expected[split]:
            raise DataError(
                f"{overlap.repeated} of {overlap.records} {what} of the {split} split also occur in another "
                f"split; when the data were prepared, it was {expected[split]['repeated']} of {expected[split]['records']}",
                where=folder / FILE_NAME,
                next_step=_REMEDY,
            )


def _check_count(path: Path, what: str, found: int, expected: int) -> None:
    if found != expected:
        raise DataError(
            f"{path.name} has {found} {what}, but had {expected} when it was prepared: another split's file, or truncated",
            where=path,
            next_step=_REMEDY,
        )


def _check_opening(path: Path, tokens: np.ndarray, decoder: tokenizers.Tokenizer, opening: dict) -> None:
    count, text = opening["tokens"], opening["text"]
    found = decoder.decode(np.asarray(tokens[:count]).tolist(), skip_special_tokens=False)
    if found != text:
        raise DataError(
            f"tokens 0 to {count - 1} of {path.name} decode to {found[:40]!r}, but the split begins with {text[:40]!r}: "
            "tokens of another vocabulary, or another split's file",
            where=path,
            next_step=_REMEDY,
        )


def _check_samples(path: Path, samples: np.ndarray, tokens: int) -> None:
    _check_type(path, samples, np.dtype(np.int64), (2,))
    first, count = first_bad(samples, lambda part: (part[:, 0] < 0) | (part[:, 1] < 1) | (part[:, 1] > tokens - part[:, 0]))
    if first is not None:
        raise DataError(
            f"sample {first} of {path.name} lies outside the {tokens} tokens of its split ({count} such samples)",
            where=path,
            next_step=_REMEDY,
        )


def _check_channels(path: Path, images: np.ndarray, expected: list[float]) -> None:
    if images.dtype != np.uint8 or images.shape[1:] != IMAGE_SHAPE or not len(images):
        return  # check_images reports it
    means, _ = channel_statistics(images)
    if not np.allclose(means, expected, rtol=0, atol=1e-9):
        raise DataError(
            f"{path.name} has channel means {_listed(means)}, but had {_listed(expected)} when it was prepared: "
            "another split's file, or other pixels",
            where=path,
            next_step=_REMEDY,
        )


def _check_classes(path: Path, labels: np.ndarray, expected: dict[str, int]) -> None:
    names = list(expected)
    if labels.dtype.kind not in "iu" or np.any((np.asarray(labels) < 0) | (np.asarray(labels) >= len(names))):
        return  # check_labels reports it
    found = np.bincount(np.asarray(labels), minlength=len(names))
    for name, count in zip(names, found, strict=True):
        if count != expected[name]:
            raise DataError(
                f"{path.name} has {count} labels of class {name!r}, but had {expected[name]} when it was prepared: "
                "another split's file, or edited",
                where=path,
                next_step=_REMEDY,
            )


def _listed(means: Iterable[float]) -> str:
    return ", ".join(f"{mean:.4f}" for mean in means)
