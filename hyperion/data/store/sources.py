"""Sources of data: mirror, cache, download, synthetic, tried in this order, and announced.

Downloads cannot hang: the host is probed first, a stall has a time limit, and the checksum is compared at the end.
"""

import errno
import hashlib
import http.client
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, Protocol, TypeVar

from hyperion.data.store.folders import QUARANTINE, DataError, DataUnavailable, cache_root, content_hash, staged, write_manifest
from hyperion.paths import expanded, silent_hosts_folder
from hyperion.untrusted import read_bounded

ORDER = ("mirror", "cache", "download", "synthetic")
SOURCES = ("auto", *ORDER)
FETCH_HINT = (
    "run `make fetch` on a machine with a network, set HYPERION_DATA_MIRROR=/folder/of/data, or use synthetic data "
    "with data_source=synthetic"
)
PROBE_LIMIT_S = 3.0
STALL_LIMIT_S = 10.0
DOWNLOAD_LIMIT_S = 1800.0
DOWNLOAD_LIMIT_BYTES = 1 << 30  # CIFAR-10, the largest of the downloads, has 170 MB
COPY_LIMIT_BYTES = 1 << 28  # of a file of the mirror; an unpacked CIFAR-10 batch has 31 MB, its archive 170 MB
PROBE_MEMORY_S = 60.0
CHUNK_BYTES = 1 << 20
OFFLINE_SWITCHES = ("HYPERION_OFFLINE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
NETWORK_FAULTS = (OSError, http.client.HTTPException)  # errors of urllib, timeouts and TLS errors are OSErrors

_silent_until: dict[str, tuple[float, str]] = {}


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


@dataclass(frozen=True)
class PublishedSet(Generic[T]):
    """A published data set: in the mirror, in its folder of the cache, or downloaded into that folder.

    Attributes:
        folder: its folder in the cache.
        read: reads and checks the set in a folder, given the name of the source and how messages call the place. It raises
            DataUnavailable if the folder lacks the set, and DataError if the data are wrong.
        files: the data files of a set that `read` has accepted.
        fetch: downloads the set into its new folder in the cache, which appears complete or not at all (see `folders.staged`).
        at_top: the mirror has the files at its top level, not in `folder`.
        manifest: write a manifest when the files are copied from the mirror.
    """

    folder: str
    read: Callable[[Path, str, str], T]
    files: Callable[[Path], Iterable[Path]]
    fetch: Callable[[Path], None]
    at_top: bool = False
    manifest: bool = True

    def mirrored(self) -> T:
        """Load the set from the mirror."""
        return self.read(self._in_mirror(), "mirror", "the mirror")

    def cached(self) -> T:
        """Load the set from the cache."""
        return self.read(cache_root() / self.folder, "cache", "the cache")

    def downloaded(self) -> T:
        """Load the set after a download. If the cache has it already, it is not downloaded again, and its source is the cache."""
        target = cache_root() / self.folder
        if target.is_dir():
            return self.cached()
        self.fetch(target)
        return self.read(target, "download", "the cache")

    def suppliers(self) -> dict[str, Callable[[], T]]:
        """Return the functions that load the set, by source, for `take`."""
        return {"mirror": self.mirrored, "cache": self.cached, "download": self.downloaded}

    def stage(self) -> str:
        """Stage the set in the cache, from the mirror if it has it, else from its publisher.

        Returns:
            'present' if the cache already has it, else its origin.

        Raises:
            DataError: no source has the data, or they are wrong; the cache is unchanged.
        """
        target = cache_root() / self.folder
        if target.is_dir():
            self.cached()
            return "present"
        try:
            self.mirrored()
        except DataUnavailable:
            self.fetch(target)
            return "downloaded"
        place, origin = self._in_mirror(), "copied from the mirror"
        with staged(target) as work:
            for file in self.files(place):
                copy = work / file.relative_to(place)
                copy.parent.mkdir(exist_ok=True)
                copy.write_bytes(read_bounded(file, DataError, "copy it into the mirror again", COPY_LIMIT_BYTES))
            if self.manifest:
                write_manifest(work, name=self.folder, source="mirror", detail=origin)
        return origin

    def _in_mirror(self) -> Path:
        return mirror_root() if self.at_top else mirror_root() / self.folder


def hub_endpoint() -> str:
    """Return the address of the Hugging Face hub, or of its replacement in HF_ENDPOINT."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def require_network(url: str) -> None:
    """Check that the host of `url` answers within PROBE_LIMIT_S, name resolution and TLS included.

    The probe runs in a thread, because neither a hanging name resolution nor a host that accepts and sends nothing can be
    interrupted. A failure is remembered, so that several data sets wait only once: by this process for PROBE_MEMORY_S, and by
    all processes of a `make reproduce` until it ends.

    Raises:
        DataUnavailable: downloads are switched off, or the host refuses or does not answer.
    """
    for switch in OFFLINE_SWITCHES:
        if os.environ.get(switch, "").strip().lower() in ("1", "true", "yes", "on"):
            raise DataUnavailable(f"offline: {switch}={os.environ[switch]}", next_step=f"unset {switch} to allow downloads")
    host = _host(url)
    if known := _remembered(host):
        raise _unreachable(host, known)
    faults: list[str] = []
    thread = threading.Thread(target=_ask, args=(host, faults), daemon=True)
    thread.start()
    thread.join(PROBE_LIMIT_S)
    if thread.is_alive():
        faults = [f"no answer within {PROBE_LIMIT_S:g} s"]
    if faults:
        _remember(host, faults[0])
        raise _unreachable(host, faults[0])


def download(url: str, path: Path, md5: str | None = None, sha256: str | None = None) -> None:
    """Download `url` to the new file `path`. A file with a wrong checksum is moved to the quarantine folder.

    Args:
        path: a file in a working folder that readers do not see yet (see `folders.staged`).
        md5, sha256: checksums stated by the publisher.

    Raises:
        DataUnavailable: no network, a stall of STALL_LIMIT_S, more than DOWNLOAD_LIMIT_S or DOWNLOAD_LIMIT_BYTES in total,
            fewer bytes than announced, or a wrong checksum.
    """
    require_network(url)
    digests = {"md5": (hashlib.md5(usedforsecurity=False), md5), "sha256": (hashlib.sha256(), sha256)}
    try:
        with urllib.request.urlopen(url, timeout=STALL_LIMIT_S) as answer, open(path, "wb") as file:
            announced = answer.headers.get("Content-Length")
            announced = int(announced) if announced and announced.isdecimal() else None
            received = _copy(answer, file, [digest for digest, _ in digests.values()], path.name, announced)
    except NETWORK_FAULTS as error:
        if _is_local(error):
            raise
        if isinstance(getattr(error, "reason", error), TimeoutError):  # it answered the probe but sends no data
            _remember(_host(url), str(error))
        raise DataUnavailable(f"download failed: {error}", where=url, next_step="try again, or set a mirror") from error
    if announced is not None and received != announced:
        raise DataUnavailable(f"the download ended after {received} of {announced} bytes", where=url, next_step="try again")
    for name, (digest, expected) in digests.items():
        if expected and digest.hexdigest() != expected:
            kept = _quarantine(path)
            raise DataUnavailable(
                f"{path.name} has {name} {digest.hexdigest()}, expected {expected}; moved to {QUARANTINE}/{kept.name}",
                where=url,
                next_step="look at the file in quarantine (often it is a proxy's login page), then try again",
            )


def _host(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}/"


def _remembered(host: str) -> str:
    """Return the fault of a host that was probed recently, "" if none is known."""
    until, fault = _silent_until.get(host, (0.0, ""))
    if time.monotonic() < until:
        return fault
    note = _note(host)
    return note.read_text(encoding="utf-8") if note is not None and note.is_file() else ""


def _remember(host: str, fault: str) -> None:
    _silent_until[host] = (time.monotonic() + PROBE_MEMORY_S, fault)
    if (note := _note(host)) is not None:
        note.write_text(fault, encoding="utf-8")


def _note(host: str) -> Path | None:
    folder = silent_hosts_folder()
    return None if folder is None else folder / hashlib.sha256(host.encode()).hexdigest()[:16]


def _ask(host: str, faults: list[str]) -> None:
    try:
        request = urllib.request.Request(host, method="HEAD")
        urllib.request.urlopen(request, timeout=PROBE_LIMIT_S).close()
    except urllib.error.HTTPError:
        return  # any HTTP status shows that the host answers
    except NETWORK_FAULTS as error:
        faults.append(str(getattr(error, "reason", error)))


def _copy(answer: http.client.HTTPResponse, file: BinaryIO, digests: list, name: str, announced: int | None) -> int:
    from tqdm.auto import tqdm

    received, started = 0, time.monotonic()
    with tqdm(total=announced, unit="B", unit_scale=True, desc=name) as bar:
        while piece := answer.read1(CHUNK_BYTES):
            file.write(piece)
            for digest in digests:
                digest.update(piece)
            received += len(piece)
            bar.update(len(piece))
            if received > DOWNLOAD_LIMIT_BYTES:
                raise http.client.HTTPException(f"more than {DOWNLOAD_LIMIT_BYTES >> 20} MiB")
            if time.monotonic() - started > DOWNLOAD_LIMIT_S:
                raise TimeoutError(f"only {received} bytes in {DOWNLOAD_LIMIT_S:g} s")
    return received


def _is_local(error: Exception) -> bool:
    """Return True for an error of the local disk: a failed open has a file name, a full disk its own errno."""
    if not isinstance(error, OSError) or isinstance(error, urllib.error.URLError):
        return False
    return error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT)


def _quarantine(path: Path) -> Path:
    kept = cache_root() / QUARANTINE / f"{path.name}.{uuid.uuid4().hex[:8]}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    return path.rename(kept)


def _unreachable(host: str, fault: str) -> DataUnavailable:
    return DataUnavailable(
        f"no network: {host} {fault}", where=host, next_step="run `make fetch` on a machine with a network, or set a mirror"
    )
