"""Sources of data: mirror, cache, download, synthetic, tried in this order, and announced."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from hyperion.data.errors import DataError, DataUnavailable
from hyperion.data.store.staging import cache_root, content_hash
from hyperion.paths import expanded

ORDER = ("mirror", "cache", "download", "synthetic")
SOURCES = ("auto", *ORDER)
FETCH_HINT = (
    "run `make fetch` on a machine with a network, set HYPERION_DATA_MIRROR=/folder/of/data, or use synthetic data "
    "with data_source=synthetic"
)


@dataclass(frozen=True)
class Checksums:
    """Number of files of a set that have the checksum stated by their publisher.

    A set is official if all files have it. Otherwise nothing proves that the content is the publisher's, for example that each
    label belongs to its image; the set's `detail` says what was checked instead.

    Attributes:
        matching, files: number of files with the published checksum, and of all files.
        algorithm: algorithm of the published checksums.
        note: what was checked on a set that is not official; may be "".
    """

    matching: int
    files: int
    algorithm: str
    note: str = ""

    @property
    def official(self) -> bool:
        """True if every file has its published checksum."""
        return self.matching == self.files

    def __str__(self) -> str:
        note = f"; {self.note}" if self.note and not self.official else ""
        found = f"{self.matching} of {self.files} files have the published {self.algorithm}{note}"
        return f"{'official' if self.official else 'not official'} ({found})"


def compare_checksums(expected: Mapping[Path, str], algorithm: str, note: str = "") -> Checksums:
    """Compare files with the hex checksums stated by their publisher; a missing file does not match."""
    matching = sum(path.is_file() and content_hash(path, algorithm) == digest for path, digest in expected.items())
    return Checksums(matching, len(expected), algorithm, note)


class Sourced(Protocol):
    """A data set with its name and source; `checksums` is None if it has no publisher."""

    # Properties, because the attributes of frozen dataclasses are read-only.
    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def checksums(self) -> Checksums | None: ...


T = TypeVar("T", bound=Sourced)


def mirror_root() -> Path:
    """Return the folder named by HYPERION_DATA_MIRROR.

    Raises:
        DataUnavailable: the variable is not set.
        DataError: it does not name a folder. A mirror that the user asked for is never skipped.
    """
    named = os.environ.get("HYPERION_DATA_MIRROR")
    if not named:
        raise DataUnavailable("no mirror: HYPERION_DATA_MIRROR is not set", next_step="set HYPERION_DATA_MIRROR=/folder/of/data")
    root = expanded(named)
    if not root.is_dir():
        raise DataError(
            f"HYPERION_DATA_MIRROR names {named}, which is not a folder",
            where=root,
            next_step="correct HYPERION_DATA_MIRROR, or unset it to use the cache, a download or synthetic data",
        )
    return root


def require_known_source(wanted: str) -> None:
    """Check the name of a data source.

    Raises:
        DataError: `wanted` is not one of SOURCES.
    """
    if wanted not in SOURCES:
        raise DataError(f"unknown data source {wanted!r}", next_step=f"choose one of {', '.join(SOURCES)}")


def take(name: str, wanted: str, suppliers: Mapping[str, Callable[[], T]], allow_synthetic: bool = True) -> T:
    """Load `name` from the wanted source, for 'auto' from the first source that has it, and print which one it was.

    Args:
        name: name of the data set, for messages.
        wanted: one of SOURCES.
        suppliers: by source, the function that loads `name` from it. It raises DataUnavailable if the source has no such
            data, and DataError if the data are wrong.
        allow_synthetic: let 'auto' fall back to synthetic data. The source 'synthetic' is always allowed.

    Raises:
        DataError: the source is unknown, the data are wrong, or no source has them and synthetic data are not allowed.
    """
    require_known_source(wanted)
    if wanted != "auto":
        result = suppliers[wanted]()
        _announce(name, result, {})
        return result
    refused: dict[str, str] = {}
    for source in (source for source in ORDER if source in suppliers):
        if source == "synthetic" and not allow_synthetic:
            refused[source] = "not allowed in this profile unless asked for by name"
            continue
        try:
            result = suppliers[source]()
        except DataUnavailable as reason:
            refused[source] = reason.what
            continue
        _announce(name, result, refused)
        return result
    reasons = "; ".join(f"{source}: {reason}" for source, reason in refused.items())
    raise DataError(f"no source has {name} ({reasons})", where=cache_root(), next_step=FETCH_HINT)


def _announce(name: str, result: Sourced, refused: Mapping[str, str]) -> None:
    rule = "=" * 100
    checksums = result.checksums
    publisher = "" if checksums is None else ", official" if checksums.official else ", NOT OFFICIAL"
    lines = [rule, f"  DATA  {name}: source = {result.source.upper()}{publisher}, {result.name} ({result.detail})"]
    lines += [f"        not {source}: {reason}" for source, reason in refused.items()]
    print("\n".join([*lines, rule]), flush=True)
