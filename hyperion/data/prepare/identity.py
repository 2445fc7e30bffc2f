"""Which files would a data set be taken from, and what do they hold? Told without loading anything."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from hyperion.data.images import cifar10
from hyperion.data.images.cifar10_formats import find_layout
from hyperion.data.instructions import instructions
from hyperion.data.store.faults import DataUnavailable
from hyperion.data.store.sources import mirror_root
from hyperion.data.store.staging import QUARANTINE, cache_root, content_hash
from hyperion.data.text import tokenizer, wikitext2

_UNFINISHED = ".part"


def data_identity(names: Iterable[str], wanted: str) -> dict[str, dict | None]:
    """By name of a set: the place that `wanted` takes it from, a hash over its files, and whether they are its publisher's
    (None where no checksums are known); None where there is none yet.

    What was downloaded lies in the cache from then on, so the two count as one place. Synthetic data have no files:
    what they are is decided by sizes and seed.

    Args:
        names: of 'wikitext-2', 'gpt2' (the tokenizer), 'cifar-10', 'instructions' and 'llama' (real weights, where
            somebody put them), as their folders in the cache are called.
        wanted: the source asked for, `auto` included.

    Raises:
        DataError: HYPERION_DATA_MIRROR names no folder, and the mirror was asked for.
    """
    places = [place for place in ("mirror", "cache") if wanted in _TAKEN_FROM[place]]
    return {name: next(filter(None, (_identity(name, place) for place in places)), None) for name in names}


_TAKEN_FROM = {"mirror": ("auto", "mirror"), "cache": ("auto", "cache", "download")}


def _identity(name: str, place: str) -> dict | None:
    try:
        root = mirror_root() if place == "mirror" else cache_root()
    except DataUnavailable:
        return None  # no mirror is named: nothing lies there
    found = _files_of(name, root, place)
    if found is None:
        return None
    checksums = _CHECKSUMS[name](found) if name in _CHECKSUMS else None
    official = None if checksums is None else checksums.official
    return {"place": place, "sha256": _hash_of(found), "official": official}


_CHECKSUMS = {
    cifar10.FOLDER: cifar10.checksums,
    wikitext2.FOLDER: wikitext2.checksums,
    tokenizer.FOLDER: tokenizer.checksums,
    instructions.FOLDER: lambda found: instructions.checksums(found / instructions.FILE if found.is_dir() else found),
}


def _files_of(name: str, root: Path, place: str) -> Path | None:
    """The set's folder or archive."""
    if name == cifar10.FOLDER:
        # A mirror holds the official names at its top.
        return find_layout(root if place == "mirror" else root / cifar10.FOLDER)
    if name == instructions.FOLDER and place == "mirror":
        return file if (file := root / instructions.FILE).is_file() else None
    folder = root / name
    return folder if folder.is_dir() else None


def _hash_of(found: Path) -> str:
    """Over names and contents, whatever is half-staged or quarantined left out."""
    digest = hashlib.sha256()
    for file in [found] if found.is_file() else sorted(found.rglob("*")):
        parts = file.relative_to(found.parent).parts
        if not file.is_file() or any(p.startswith(".") or p.endswith(_UNFINISHED) or p == QUARANTINE for p in parts):
            continue
        # Whole contents: the batches of CIFAR-10 have one size whatever they hold.
        digest.update(f"{'/'.join(parts)}\0{content_hash(file, 'sha256')}\n".encode())
    return digest.hexdigest()[:16]
