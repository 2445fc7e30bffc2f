"""Prepare text and images for training, in folders whose names contain the hash of all inputs.

Each preparation step is checked by its counts.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from hyperion.data.images.imageset import ImageSet, channel_statistics, check_split
from hyperion.data.packing import Padding, packed_windows
from hyperion.data.prepare.verify import ARRAYS_OF, FORMAT, SAMPLES, TOKENIZER_FILE, content_faults
from hyperion.data.store.arrays import ArrayWriter, open_array, open_shards, token_dtype, write_shards
from hyperion.data.store.folders import DataError, DataManifest, processed_root, staged, write_manifest
from hyperion.data.store.overlap import image_overlap, require_little_overlap, token_overlap
from hyperion.data.text.corpus import SPLITS, TextCorpus
from hyperion.data.text.encoding import EncoderPool, workers_for
from hyperion.data.text.tokenizer import Tokenizer

OPENING_TOKENS = 64


@dataclass(frozen=True)
class PreparedText:
    """A tokenized corpus on disk.

    Attributes:
        folder: folder with the files.
        tokens: a dict that maps the name of a split to its token ids, a memory-mapped array uint16 or uint32 [tokens].
        samples: a dict that maps the name of a split to a memory-mapped array int64 [samples, 2], which contains the start in
            the token stream and the number of tokens of each non-blank line.
        steps: counts of each preparation step, by the name of the split and the name of the step; see `prepare_text`.
        manifest: hashes of the files, source of the data, and settings.
        reused: True if an earlier call had already prepared these data.
    """

    folder: Path
    tokens: dict[str, np.ndarray] = field(repr=False)
    samples: dict[str, np.ndarray] = field(repr=False)
    steps: dict[str, dict[str, dict]]
    manifest: DataManifest
    reused: bool


@dataclass(frozen=True)
class PreparedImages:
    """An image set on disk.

    Attributes:
        folder: folder with the files.
        arrays: memory-mapped arrays with the names 'train_images', 'train_labels', 'test_images' and 'test_labels'.
        steps: counts of each preparation step, by the name of the split and the name of the step; see `prepare_images`.
        manifest: hashes of the files, source of the data, and settings.
        reused: True if an earlier call had already prepared these data.
    """

    folder: Path
    arrays: dict[str, np.ndarray] = field(repr=False)
    steps: dict[str, dict[str, dict]]
    manifest: DataManifest
    reused: bool


def prepare_text(
    corpus: TextCorpus, tokenizer: Tokenizer, sequence_length: int = 128, workers: int | None = None
) -> PreparedText:
    """Tokenize a corpus, check that decoding reproduces the text, and store the token streams in data/processed/.

    Each split has five steps, with these counts:

    - 'read': lines, words_with_eos.
    - 'filter': non_empty, the number of non-empty lines.
    - 'tokenize': tokens, tokens_per_word, and round_trip, which is True because decoding reproduces the text.
    - 'pack': windows, left_over, for the stream cut into windows of `sequence_length` inputs.
    - 'pad': samples, tokens, padding, padding_share, truncated, for non-empty lines padded or truncated to `sequence_length`
      positions.

    The packed and padded rows are only counted and not stored. The folder contains the token streams, the positions of their
    lines, and the tokenizer. The text is read once, a few chunks at a time, so a corpus of files (`corpus_of_files`) may be
    larger than the memory.

    Args:
        corpus: text to tokenize.
        tokenizer: tokenizer of the text.
        sequence_length: number of input tokens in a window, and number of positions in a padded row.
        workers: number of processes that tokenize. None chooses it from the length of the text. The files do not depend on it.

    Raises:
        DataError: decoding does not reproduce the text, long lines of one split also occur in another split, stored data are
            damaged, or the disk is full.
    """
    folder = _folder(
        f"{corpus.name}-{tokenizer.name}",
        {"corpus": corpus.sha256, "tokenizer": tokenizer.sha256, "sequence_length": sequence_length},
    )
    # The name of the folder contains the hash of all inputs. If it exists, the same data have been prepared before.
    reused = folder.is_dir()
    if not reused:
        workers = workers or workers_for(sum(map(corpus.characters, SPLITS)))
        write_text(folder, corpus, tokenizer, sequence_length, workers)
    # Read new data back and verify them in the same way as reused data, so that both cases give the same arrays.
    arrays, manifest = open_prepared(folder)
    tokens = {split: arrays[split] for split in SPLITS}
    samples = {split: arrays[f"{split}{SAMPLES}"] for split in SPLITS}
    return PreparedText(folder, tokens, samples, manifest.facts["steps"], manifest, reused)


def prepare_images(images: ImageSet) -> PreparedImages:
    """Check every record of an image set, and store the set in data/processed/.

    Each split has five steps, with these counts:

    - 'read': number of images.
    - 'verify': number of corrupt records. It is always 0, because a corrupt record is an error.
    - 'classes': number of images of each class.
    - 'channels': means and standard deviations of the channels, with pixels scaled to 0 .. 1.
    - 'augment': names of the augmentations that do not change the class.

    Raises:
        DataError: a record is corrupt, stored data are damaged, images of the test split also occur in the train split, or the
            disk is full.
    """
    folder = _folder(images.name, {"images": images.sha256})
    reused = folder.is_dir()
    if not reused:
        write_images(folder, images)
    arrays, manifest = open_prepared(folder)
    return PreparedImages(folder, arrays, manifest.facts["steps"], manifest, reused)


def write_text(folder: Path, corpus: TextCorpus, tokenizer: Tokenizer, sequence_length: int, workers: int) -> None:
    """Write the folder of a tokenized corpus (see `prepare_text`). The folder must not exist yet."""
    with staged(folder) as work, tokenizer.encoding(workers) as encoding:
        steps = {split: write_split(work, split, corpus.splits[split], tokenizer, encoding, sequence_length) for split in SPLITS}
        (work / TOKENIZER_FILE).write_text(tokenizer.definition(), encoding="utf-8")
        facts = {
            "kind": "text",
            "format": FORMAT,
            "corpus_sha256": corpus.sha256,
            "tokenizer": {"name": tokenizer.name, "source": tokenizer.source, "sha256": tokenizer.sha256},
            "vocab_size": tokenizer.vocab_size,
            "sequence_length": sequence_length,
            "steps": steps,
            "overlap": _text_overlap(work, corpus.name),
            "official": None if corpus.checksums is None else corpus.checksums.official,
        }
        write_manifest(work, name=corpus.name, source=corpus.source, detail=corpus.detail, facts=facts)


def _text_overlap(work: Path, name: str) -> dict[str, dict]:
    """Count the records that occur in more than one split, and return the counts as JSON values.

    Raises:
        DataError: too many records are repeated.
    """
    tokens = {split: open_array(work / f"{split}.npy") for split in SPLITS}
    samples = {split: open_array(work / f"{split}{SAMPLES}.npy") for split in SPLITS}
    found = token_overlap(tokens, samples)
    require_little_overlap(found, "long lines", name)
    return {split: overlap.as_dict() for split, overlap in found.items()}


def write_images(folder: Path, images: ImageSet) -> None:
    """Write the folder of an image set (see `prepare_images`). The folder must not exist yet."""
    overlap = image_overlap(images.train_images, images.test_images)
    require_little_overlap(overlap, "images", images.name)
    facts = {
        "kind": "images",
        "format": FORMAT,
        "images_sha256": images.sha256,
        "classes": list(images.classes),
        "bayes_accuracy": images.bayes_accuracy,
        "steps": {
            "train": _image_steps("train", images.train_images, images.train_labels, images),
            "test": _image_steps("test", images.test_images, images.test_labels, images),
        },
        "overlap": {split: found.as_dict() for split, found in overlap.items()},
        "official": None if images.checksums is None else images.checksums.official,
    }
    arrays = {
        "train_images": images.train_images,
        "train_labels": images.train_labels,
        "test_images": images.test_images,
        "test_labels": images.test_labels,
    }
    write_shards(folder, arrays, name=images.name, source=images.source, detail=images.detail, facts=facts)


def open_prepared(folder: Path) -> tuple[dict[str, np.ndarray], DataManifest]:
    """Check the hashes, token ids, labels and pixels of a prepared folder, and return its arrays and its manifest.

    Raises:
        DataError: a file or a record is wrong. The message names the first one.
    """
    arrays, manifest = open_shards(folder)
    kind = manifest.facts.get("kind")
    if not isinstance(kind, str) or kind not in ARRAYS_OF:
        raise DataError(f"unknown kind of data {kind!r}", where=folder, next_step="remove the folder and prepare the data again")
    for name in ARRAYS_OF[kind]:
        if name not in arrays:
            raise DataError(f"{name}.npy is missing", where=folder, next_step="remove the folder and prepare the data again")
    for fault in content_faults(folder, arrays, manifest):
        raise fault
    return arrays, manifest


def _folder(name: str, parts: dict) -> Path:
    key = hashlib.sha256(json.dumps({"format": FORMAT, **parts}, sort_keys=True).encode()).hexdigest()
    return processed_root() / f"{name}-{key[:12]}"


def write_split(work: Path, split: str, lines: Iterable[str], tokenizer: Tokenizer, encoding: EncoderPool, length: int) -> dict:
    """Write the token stream of a split and the positions of its lines, one chunk at a time. Return the counts of each step."""
    read = words = 0
    padded, opening = Padding(), []
    with (
        ArrayWriter(work, split, token_dtype(tokenizer.vocab_size)) as tokens,
        ArrayWriter(work, f"{split}{SAMPLES}", np.int64, (2,)) as samples,
    ):
        for encoded in encoding.encode(lines):
            if encoded.lost:
                raise DataError(
                    f"decoding the {split} split does not reproduce its text: {encoded.lost[:60]!r}",
                    where=tokenizer.name,
                    next_step="use a byte-level tokenizer without normalisation",
                )
            # Index of the first token of each line in the stream: the exclusive cumulative sum of the sizes.
            starts = tokens.rows + np.cumsum(encoded.sizes) - encoded.sizes
            non_blank = ~encoded.blank
            # Blank lines are in the token stream, but they are not samples.
            samples.append(np.stack([starts, encoded.sizes], axis=1)[non_blank])
            tokens.append(encoded.ids)
            padded += Padding.of(encoded.sizes[non_blank], length)
            # Keep the token ids of the first lines, from the first chunk only. `verify` decodes them to detect a file of another
            # split or vocabulary.
            opening = opening or encoded.ids[: _opening_tokens(encoded.sizes)].tolist()
            read, words = read + len(encoded.sizes), words + encoded.words_with_eos
        windows, left_over = packed_windows(tokens.rows, length)
        # `close` writes the final header, so it is called only after all chunks were encoded.
        samples.close()
        tokens.close()
    return {
        "read": {"lines": read, "words_with_eos": words},
        "filter": {"non_empty": samples.rows},
        "tokenize": {
            "tokens": tokens.rows,
            "tokens_per_word": tokens.rows / words,
            "round_trip": True,
            "opening": {"tokens": len(opening), "text": tokenizer.decode(opening)},
        },
        "pack": {"windows": windows, "left_over": left_over},
        "pad": {**asdict(padded), "padding_share": padded.share},
    }


def _opening_tokens(sizes: np.ndarray) -> int:
    """Return the number of tokens in the opening of a split: its first lines, as many as are needed for OPENING_TOKENS tokens."""
    ends = np.cumsum(sizes)
    return int(ends[min(np.searchsorted(ends, OPENING_TOKENS), len(ends) - 1)])


def _image_steps(split: str, images: np.ndarray, labels: np.ndarray, source: ImageSet) -> dict[str, dict]:
    check_split(images, labels, len(source.classes), f"{source.name}, {split} split")
    mean, deviation = channel_statistics(images)
    return {
        "read": {"images": len(images)},
        "verify": {"corrupt": 0},
        "classes": dict(zip(source.classes, source.class_counts()[split], strict=True)),
        "channels": {"mean": list(mean), "standard_deviation": list(deviation)},
        "augment": {"keeps_label": list(source.augmentations)},
    }
