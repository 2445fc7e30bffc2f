"""Where data comes from: mirror, cache, download, synthetic, in that order, and never in silence."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from hyperion.data.store.faults import DataError, DataUnavailable
from hyperion.data.store.staging import cache_root, content_hash
from hyperion.paths import expanded

ORDER = ("mirror", "cache", "download", "synthetic")
SOURCES = ("auto", *ORDER)
FETCH_HINT = (
    "run `make fetch` on a machine with a network, set HYPERION_DATA_MIRROR=/folder/of/data, or ask for made-up data "
    "with data_source=synthetic"
)


@dataclass(frozen=True)
class Checksums:
    """How many files of a set have the checksum that their publisher states.

    A set is official if all of them have it. Of any other set nothing proves that its content is the publisher's: that
    each label belongs to its image, for example. What is checked there is named in the set's detail.

    Attributes:
        matching, files: number of files with the published checksum, and of all files.
        algorithm: of the published checksums.
        note: what is known of files without it, "" where nothing is; not shown of an official set.
    """

    matching: int
    files: int
    algorithm: str
    note: str = ""

    @property
    def official(self) -> bool:
        """Whether every file is the publisher's."""
        return self.matching == self.files

    def __str__(self) -> str:
        note = f"; {self.note}" if self.note and not self.official else ""
        found = f"{self.matching} of {self.files} files have the published {self.algorithm}{note}"
        return f"{'official' if self.official else 'not official'} ({found})"


def compare_checksums(expected: Mapping[Path, str], algorithm: str, note: str = "") -> Checksums:
    """Compare files with the hex checksums that their publisher states; a file that is missing has none."""
    matching = sum(path.is_file() and content_hash(path, algorithm) == digest for path, digest in expected.items())
    return Checksums(matching, len(expected), algorithm, note)


class Sourced(Protocol):
    """Anything that knows what it is and where it came from; `checksums` is None where there is no publisher."""

    name: str
    source: str
    detail: str
    checksums: Checksums | None


T = TypeVar("T", bound=Sourced)


def mirror_root() -> Path:
    """The folder named by HYPERION_DATA_MIRROR.

    Raises:
        DataUnavailable: the variable is not set.
        DataError: it names something that is no folder; a mirror somebody asked for is never skipped.
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
    """Refuse a data source that there is not.

    Raises:
        DataError: names it and those there are.
    """
    if wanted not in SOURCES:
        raise DataError(f"unknown data source {wanted!r}", next_step=f"choose one of {', '.join(SOURCES)}")


def take(name: str, wanted: str, suppliers: Mapping[str, Callable[[], T]], allow_synthetic: bool = True) -> T:
    """Get `name` from the wanted source, or for 'auto' from the first that has it, and print which one it was.

    Args:
        name: what is loaded, for messages.
        wanted: one of SOURCES.
        suppliers: a function for every source of ORDER that can supply `name`; it raises DataUnavailable when its
            source has nothing, and DataError when what it has is wrong.
        allow_synthetic: whether 'auto' may end at synthetic data. Asking for 'synthetic' by name is always allowed.

    Raises:
        DataError: unknown source, wrong data, or nothing found where synthetic data are not allowed.
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
