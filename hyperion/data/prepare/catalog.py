"""The data sets by name: stage all of them (`hyperion fetch`), and identify their files without loading them."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hyperion.data.images import cifar10
from hyperion.data.images.cifar10 import find_layout
from hyperion.data.store.folders import QUARANTINE, DataError, DataUnavailable, cache_root, content_hash
from hyperion.data.store.sources import Checksums, PublishedSet, Sourced, mirror_root
from hyperion.data.text import instructions, tokenizer, wikitext2

_UNFINISHED = ".part"
# Sources that read from each place. A download is stored in the cache, so both count as the same place.
_TAKEN_FROM = {"mirror": ("auto", "mirror"), "cache": ("auto", "cache", "download")}


class FetchReport(NamedTuple):
    """Result of staging one data set: `status` is 'ok' or 'failed', `detail` says where it came from or what failed."""

    name: str
    status: str
    detail: str


def fetch_all(cifar10_url: str = cifar10.URL, instructions_url: str = instructions.URL) -> list[FetchReport]:
    """Stage all data and the tokenizer in the cache; afterwards the source 'cache' provides them without a network.

    Sets that are in the cache are verified. The others are copied from the mirror if it has them, and else downloaded. A
    failure does not stop the others.
    """
    return [
        _report("wikitext-2", wikitext2.WIKITEXT2.stage),
        _report("gpt2 tokenizer", tokenizer.GPT2.stage),
        _report("cifar-10", cifar10.published(cifar10_url).stage),
        _report("instructions", instructions.published(instructions_url).stage),
    ]


def _report(name: str, action: Callable[[], str]) -> FetchReport:
    try:
        return FetchReport(name, "ok", action())
    except DataError as error:
        return FetchReport(name, "failed", str(error))


def staged_sets() -> list[tuple[Path, Callable[[], Sourced]]]:
    """Return the folder of each set in the cache, with the function that reads and checks it."""
    sets: list[PublishedSet[Any]] = [wikitext2.WIKITEXT2, tokenizer.GPT2, cifar10.published(), instructions.published()]
    places = [(cache_root() / published.folder, published.cached) for published in sets]
    return [(folder, read) for folder, read in places if folder.is_dir()]


def data_identity(names: Iterable[str], wanted: str) -> dict[str, dict | None]:
    """Return which files each set is taken from: by name, the keys 'place', 'sha256' and 'official'; None if there are none.

    'official' is None where the publisher states no checksums. Synthetic data have no files; their sizes and seed identify
    them.

    Args:
        names: of 'wikitext-2', 'gpt2' (the tokenizer), 'cifar-10', 'instructions' and 'llama' (real weights that the user put
            there); these are also the names of their folders in the cache.
        wanted: the requested source, 'auto' included.

    Raises:
        DataError: `wanted` includes the mirror, and HYPERION_DATA_MIRROR names no folder.
    """
    places = [place for place in ("mirror", "cache") if wanted in _TAKEN_FROM[place]]
    return {name: next(filter(None, (_identity(name, place) for place in places)), None) for name in names}


def _identity(name: str, place: str) -> dict | None:
    try:
        root = mirror_root() if place == "mirror" else cache_root()
    except DataUnavailable:
        return None  # HYPERION_DATA_MIRROR is not set
    path = _files_of(name, root, place)
    if path is None:
        return None
    checksums = _CHECKSUMS[name](path) if name in _CHECKSUMS else None
    official = None if checksums is None else checksums.official
    return {"place": place, "sha256": _hash_of(path), "official": official}


_CHECKSUMS: dict[str, Callable[[Path], Checksums]] = {
    cifar10.FOLDER: cifar10.checksums,
    wikitext2.FOLDER: wikitext2.checksums,
    tokenizer.FOLDER: tokenizer.checksums,
    instructions.FOLDER: lambda path: instructions.checksums(path / instructions.FILE if path.is_dir() else path),
}


def _files_of(name: str, root: Path, place: str) -> Path | None:
    """Return the folder or archive of a set, or None."""
    if name == cifar10.FOLDER:
        # A mirror has the official folder or archive at its top level.
        return find_layout(root if place == "mirror" else root / cifar10.FOLDER)
    if name == instructions.FOLDER and place == "mirror":
        return file if (file := root / instructions.FILE).is_file() else None
    folder = root / name
    return folder if folder.is_dir() else None


def _hash_of(path: Path) -> str:
    """Hash names and contents, without half-staged and quarantined files."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        parts = file.relative_to(path.parent).parts
        if not file.is_file() or any(p.startswith(".") or p.endswith(_UNFINISHED) or p == QUARANTINE for p in parts):
            continue
        # The contents, not the sizes: CIFAR-10's binary batches have the same size whatever they contain.
        digest.update(f"{'/'.join(parts)}\0{content_hash(file, 'sha256')}\n".encode())
    return digest.hexdigest()[:16]
