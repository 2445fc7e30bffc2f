"""The two pipelines, step by step: each step returns the counts that prove it, and the product is stored by hash."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hyperion.data.corpus import SPLITS, TextCorpus, count_non_empty, count_words_with_eos
from hyperion.data.faults import DataError
from hyperion.data.imageset import ImageSet, channel_statistics, check_split
from hyperion.data.manifest import DataManifest
from hyperion.data.packing import pack, pad
from hyperion.data.shards import check_tokens, open_shards, token_dtype, write_shards
from hyperion.data.staging import processed_root
from hyperion.data.tokenizer import Tokenizer

FORMAT = 1  # part of every product's hash: a change of layout makes new folders


@dataclass(frozen=True)
class PreparedText:
    """A tokenized corpus on disk.

    Attributes:
        folder: where it lies.
        tokens: split to token ids, uint16 or uint32 [tokens], memory mapped.
        steps: split to step to counts: see `prepare_text`.
        manifest: hashes, source and settings.
        reused: whether an earlier call had made it.
    """

    folder: Path
    tokens: dict[str, np.ndarray] = field(repr=False)
    steps: dict[str, dict[str, dict]]
    manifest: DataManifest
    reused: bool


@dataclass(frozen=True)
class PreparedImages:
    """An image set on disk.

    Attributes:
        folder: where it lies.
        arrays: 'train_images', 'train_labels', 'test_images', 'test_labels', memory mapped.
        steps: split to step to counts: see `prepare_images`.
        manifest: hashes, source and settings.
        reused: whether an earlier call had made it.
    """

    folder: Path
    arrays: dict[str, np.ndarray] = field(repr=False)
    steps: dict[str, dict[str, dict]]
    manifest: DataManifest
    reused: bool


def prepare_text(corpus: TextCorpus, tokenizer: Tokenizer, sequence_length: int = 128) -> PreparedText:
    """Tokenize a corpus, prove that nothing is lost, and store the token streams in data/processed/.

    Steps of a split: 'read' (lines, words_with_eos), 'filter' (non_empty), 'tokenize' (tokens, tokens_per_word,
    round_trip: decoding gives the text back), 'pack' (windows, left_over), 'pad' (samples, tokens, padding,
    padding_share, truncated: one non-empty line a row). Padding and packing are counted at `sequence_length`; only the
    streams are stored.

    Raises:
        DataError: decoding does not give the text back, a stored product is damaged (named), or the disk is full.
    """
    folder = _folder(
        f"{corpus.name}-{tokenizer.name}",
        {"corpus": corpus.sha256, "tokenizer": tokenizer.sha256, "sequence_length": sequence_length},
    )
    reused = folder.is_dir()
    if not reused:
        streams, steps = {}, {}
        for split in SPLITS:
            streams[split], steps[split] = _text_steps(split, corpus.splits[split], tokenizer, sequence_length)
        facts = {
            "kind": "text",
            "corpus_sha256": corpus.sha256,
            "tokenizer": {"name": tokenizer.name, "source": tokenizer.source, "sha256": tokenizer.sha256},
            "vocab_size": tokenizer.vocab_size,
            "sequence_length": sequence_length,
            "steps": steps,
        }
        write_shards(folder, streams, name=corpus.name, source=corpus.source, detail=corpus.detail, facts=facts)
    tokens, manifest = open_prepared(folder)
    return PreparedText(folder, tokens, manifest.facts["steps"], manifest, reused)


def prepare_images(images: ImageSet) -> PreparedImages:
    """Check an image set record by record and store it in data/processed/.

    Steps of a split: 'read' (images), 'verify' (corrupt: always 0, a corrupt record is an error), 'classes' (images by
    class), 'channels' (mean and standard deviation in units of full scale), 'augment' (what keeps the labels).

    Raises:
        DataError: a bad record or a damaged stored product (named), or the disk is full.
    """
    folder = _folder(images.name, {"images": images.sha256})
    reused = folder.is_dir()
    if not reused:
        facts = {
            "kind": "images",
            "images_sha256": images.sha256,
            "classes": list(images.classes),
            "bayes_accuracy": images.bayes_accuracy,
            "steps": {
                "train": _image_steps("train", images.train_images, images.train_labels, images),
                "test": _image_steps("test", images.test_images, images.test_labels, images),
            },
        }
        arrays = {
            "train_images": images.train_images,
            "train_labels": images.train_labels,
            "test_images": images.test_images,
            "test_labels": images.test_labels,
        }
        write_shards(folder, arrays, name=images.name, source=images.source, detail=images.detail, facts=facts)
    arrays, manifest = open_prepared(folder)
    return PreparedImages(folder, arrays, manifest.facts["steps"], manifest, reused)


def open_prepared(folder: Path) -> tuple[dict[str, np.ndarray], DataManifest]:
    """Arrays and manifest of a stored product, after hashes, token ids, labels and pixels have been checked.

    Raises:
        DataError: names the file and the first bad record.
    """
    arrays, manifest = open_shards(folder)
    kind = manifest.facts.get("kind")
    if kind == "text":
        for split, tokens in arrays.items():
            check_tokens(tokens, manifest.facts["vocab_size"], folder / f"{split}.npy")
    elif kind == "images":
        for split in ("train", "test"):
            images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
            check_split(images, labels, len(manifest.facts["classes"]), folder / f"{split}_images.npy")
    else:
        raise DataError(
            f"unknown kind of product {kind!r}", where=folder, next_step="remove it and prepare the data again"
        )
    return arrays, manifest


def _folder(name: str, parts: dict) -> Path:
    key = hashlib.sha256(json.dumps({"format": FORMAT, **parts}, sort_keys=True).encode()).hexdigest()
    return processed_root() / f"{name}-{key[:12]}"


def _text_steps(split: str, lines: list[str], tokenizer: Tokenizer, length: int) -> tuple[np.ndarray, dict[str, dict]]:
    words = count_words_with_eos(lines)
    encoded = tokenizer.encode(lines)
    stream = np.concatenate(encoded)
    if tokenizer.decode(stream) != "".join(lines):
        raise DataError(
            f"decoding the {split} split does not give its text back",
            where=tokenizer.name,
            next_step="use a byte-level tokenizer without normalisation",
        )
    packed = pack(stream, length)
    padded = pad([ids for ids, line in zip(encoded, lines, strict=True) if line.strip()], length, tokenizer.eos_id)
    return stream.astype(token_dtype(tokenizer.vocab_size)), {
        "read": {"lines": len(lines), "words_with_eos": words},
        "filter": {"non_empty": count_non_empty(lines)},
        "tokenize": {"tokens": len(stream), "tokens_per_word": len(stream) / words, "round_trip": True},
        "pack": {"windows": len(packed.inputs), "left_over": packed.left_over},
        "pad": {
            "samples": len(padded.inputs),
            "tokens": padded.tokens,
            "padding": padded.padding,
            "padding_share": padded.padding_share,
            "truncated": padded.truncated,
        },
    }


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
