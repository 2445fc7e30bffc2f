"""Exercise for the data chapter: write a check that accepts intact folders of prepared data and rejects broken ones."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hyperion.chapter.exercises import Question, mutation_score
from hyperion.data.images.imageset import synthetic_images
from hyperion.data.prepare.prepare import write_images, write_text
from hyperion.data.prepare.verify import examine
from hyperion.data.store.folders import FILE_NAME, read_manifest, write_manifest
from hyperion.data.text.tokenizer import train_tokenizer
from hyperion.data.text.wikitext2 import synthetic_corpus
from hyperion.errors import not_none

PERPLEXITY_PER_WORD = Question(math.exp(1_300_000 / 217_646), "exp of the nats per word: the number of tokens does not matter")

_LINES, _IMAGES = {"train": 300, "valid": 40, "test": 40}, {"train": 60, "test": 60}
SOUND = ("sound text", "sound images")


def broken_folders(place: Path) -> dict[str, Path]:
    """Write small folders of prepared data under `place`. Return a dict that maps each folder's name to its path.

    The first two folders are intact; their names are in SOUND. The name of each other folder is its fault. If it ends with
    "manifest renewed", the manifest was written after the fault, so it contains the hashes of the broken files.
    """
    shutil.rmtree(place, ignore_errors=True)
    corpus = synthetic_corpus(_LINES)
    folders = {name: place / name.replace(" ", "-") for name in SOUND}
    write_text(folders[SOUND[0]], corpus, train_tokenizer(corpus), sequence_length=64, workers=1)
    write_images(folders[SOUND[1]], synthetic_images(_IMAGES))
    for fault, (kind, inject) in _FAULTS.items():
        folders[fault] = place / f"broken-{len(folders)}"
        shutil.copytree(folders[kind], folders[fault])
        inject(folders[fault])
    return folders


def judge_folder_check(my_check: Callable[[Any], bool], folders: dict[str, Path]) -> pd.DataFrame:
    """Test a function that checks folders of prepared data.

    Args:
        my_check: function that takes a folder and returns True if its files are unchanged since the pipeline wrote them.
        folders: folders to check, as returned by `broken_folders`.
    """
    broken = {fault: folder for fault, folder in folders.items() if fault not in SOUND}
    scores = [mutation_score(my_check, folders[SOUND[0]], {}), mutation_score(my_check, folders[SOUND[1]], broken)]
    return pd.concat(scores, ignore_index=True)


def library_findings(folders: dict[str, Path]) -> pd.DataFrame:
    """Return a table of the problems that `hyperion data verify` finds in each folder. Broken folders are not moved."""
    lines = []
    for fault, folder in folders.items():
        findings = examine(folder)
        lines += [{"what was done": fault, "file": finding.file, "found": finding.fault} for finding in findings]
        lines += [] if findings else [{"what was done": fault, "file": "", "found": "nothing"}]
    return pd.DataFrame(lines)


def _edit(file: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    """Return a function that damages a folder of prepared data.

    It applies `change` to the array in `file`, then writes a new manifest with the hash of the changed file.
    """

    def inject(folder: Path) -> None:
        np.save(folder / file, change(np.load(folder / file)))
        _renew(folder)

    return inject


def _renew(folder: Path) -> None:
    known = not_none(read_manifest(folder))
    (folder / FILE_NAME).unlink()
    write_manifest(folder, name=known.name, source=known.source, detail=known.detail, facts=known.facts)


def _flip_a_bit(folder: Path) -> None:
    path = folder / "train_images.npy"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def _cut(folder: Path) -> None:
    path = folder / "train.npy"
    path.write_bytes(path.read_bytes()[:-100])


def _swap(folder: Path) -> None:
    one, other = folder / "valid.npy", folder / "test.npy"
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    _renew(folder)


def _with_nan(images: np.ndarray) -> np.ndarray:
    images = images.astype(np.float32)
    images[7, 0, 16, 16] = np.nan
    return images


def _with_a_strange_label(labels: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(labels)) == 11, 10, labels)


_TEXT, _PICTURES = SOUND
_FAULTS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a bit of an image flipped": (_PICTURES, _flip_a_bit),
    "the token file cut off": (_TEXT, _cut),
    "a file missing": (_TEXT, lambda folder: (folder / "valid.npy").unlink()),
    "ids of another vocabulary, manifest renewed": (_TEXT, _edit("test.npy", lambda tokens: (tokens + 3) % 500)),
    "a NaN in an image, manifest renewed": (_PICTURES, _edit("test_images.npy", _with_nan)),
    "a label out of range, manifest renewed": (_PICTURES, _edit("train_labels.npy", _with_a_strange_label)),
    "two splits swapped, manifest renewed": (_TEXT, _swap),
}
