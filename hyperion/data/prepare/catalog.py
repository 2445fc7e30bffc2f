"""Copy or download all data sets into the cache (`hyperion fetch`), and identify their files without loading them.

A data set is "staged" if its raw files are in the cache.
"""

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
# For each place that holds files: the values of `data_source` with which data are read from it. A download is stored in the
# cache, so 'download' reads from the cache.
_TAKEN_FROM = {"mirror": ("auto", "mirror"), "cache": ("auto", "cache", "download")}


class FetchReport(NamedTuple):
    """Result of copying or downloading one data set into the cache.

    `status` is 'ok' or 'failed'. `detail` is the origin of the data or the error.
    """

    name: str
    status: str
    detail: str


def fetch_all(cifar10_url: str = cifar10.URL, instructions_url: str = instructions.URL) -> list[FetchReport]:
    """Copy or download all data sets and the tokenizer into the cache. Afterwards, the source 'cache' needs no network.

    A data set that is already in the cache is verified. Any other data set is copied from the mirror, or downloaded if the mirror
    does not have it. If one data set fails, the function continues with the next one.
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
    # Continue after an error, because one unreachable data set must not prevent the preparation of the others.
    except DataError as error:
        return FetchReport(name, "failed", str(error))


def staged_sets() -> list[tuple[Path, Callable[[], Sourced]]]:
    """Return the cache folder of each data set, and the function that reads and checks the data set."""
    sets: list[PublishedSet[Any]] = [wikitext2.WIKITEXT2, tokenizer.GPT2, cifar10.published(), instructions.published()]
    places = [(cache_root() / published.folder, published.cached) for published in sets]
    return [(folder, read) for folder, read in places if folder.is_dir()]


def data_identity(names: Iterable[str], wanted: str) -> dict[str, dict | None]:
    """Return the identity of the files from which each data set is read.

    The result maps the name of a data set to a dict with the keys 'place' ('mirror' or 'cache'), 'sha256' and 'official', or to
    None if the data set has no files. 'official' is None if the publisher states no checksums. Synthetic data have no files;
    they are identified by their sizes and their seed.

    Args:
        names: names of data sets: 'wikitext-2', 'gpt2' (the tokenizer), 'cifar-10', 'instructions' or 'llama' (pretrained
            weights that the user provides). The folders in the cache have the same names.
        wanted: the requested source, such as 'auto'.

    Raises:
        DataError: `wanted` is 'auto' or 'mirror', and HYPERION_DATA_MIRROR names no folder.
    """
    places = [place for place in ("mirror", "cache") if wanted in _TAKEN_FROM[place]]
    return {name: next(filter(None, (_identity(name, place) for place in places)), None) for name in names}


def _identity(name: str, place: str) -> dict | None:
    try:
        root = mirror_root() if place == "mirror" else cache_root()
    except DataUnavailable:
        return None  # there is no mirror, because HYPERION_DATA_MIRROR is not set
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


def names_in_mirror(root: Path) -> list[str]:
    """Return the names of the data sets of which a mirror has files. The files are not read."""
    names = (wikitext2.FOLDER, tokenizer.FOLDER, cifar10.FOLDER, instructions.FOLDER)
    return [name for name in names if _files_of(name, root, "mirror") is not None]


def _files_of(name: str, root: Path, place: str) -> Path | None:
    """Return the folder or archive of a data set, or None if there is none."""
    if name == cifar10.FOLDER:
        # A mirror has the official folder or archive at its top level.
        return find_layout(root if place == "mirror" else root / cifar10.FOLDER)
    if name == instructions.FOLDER and place == "mirror":
        return file if (file := root / instructions.FILE).is_file() else None
    folder = root / name
    return folder if folder.is_dir() else None


def _hash_of(path: Path) -> str:
    """Return one hash of the names and contents of all files of a data set, except unfinished and quarantined files."""
    digest = hashlib.sha256()
    # Sort the files, because the order in which `rglob` yields them depends on the file system.
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        parts = file.relative_to(path.parent).parts
        # Only relative parts are tested, because a hidden folder above the data set must not exclude all of its files.
        if not file.is_file() or any(p.startswith(".") or p.endswith(_UNFINISHED) or p == QUARANTINE for p in parts):
            continue
        # Hash the contents and not the sizes, because all binary batch files of CIFAR-10 have the same size.
        digest.update(f"{'/'.join(parts)}\0{content_hash(file, 'sha256')}\n".encode())
    return digest.hexdigest()[:16]
