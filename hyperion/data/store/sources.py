"""Load data sets from a mirror, the cache, a download or a generator of synthetic data, tried in this order.

The source that was used is printed. The mirror is a folder of the user, and the cache is a folder of Hyperion. A download cannot
hang, because the host is tested first and a stalled download has a time limit. After a download, its checksum is verified.
"""

import errno
import functools
import hashlib
import http.client
import os
import textwrap
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
from hyperion.paths import expanded, frames_folder, silent_hosts_folder
from hyperion.terminal import progress_bar
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
DOWNLOAD_LIMIT_BYTES = 1 << 30  # limit on a download; the largest one, CIFAR-10, has 170 MB
COPY_LIMIT_BYTES = (
    1 << 28
)  # largest file copied from the mirror; an unpacked batch file of CIFAR-10 has 31 MB, the archive 170 MB
PROBE_MEMORY_S = 60.0
CHUNK_BYTES = 1 << 20
_FRAME_WIDTH = 100
OFFLINE_SWITCHES = ("HYPERION_OFFLINE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
NETWORK_FAULTS = (OSError, http.client.HTTPException)  # urllib's errors, timeouts and TLS errors are subclasses of OSError

# A dict that maps each host that did not answer to the time until which the host is treated as unreachable, and to the reason.
_silent_until: dict[str, tuple[float, str]] = {}


@dataclass(frozen=True)
class Checksums:
    """Number of files in a data set that have the checksum stated by their publisher.

    A data set is official if all of its files have the published checksum. Otherwise, nothing proves that the files are the
    publisher's, for example that each label belongs to its image. The `detail` of the data set then says what was checked
    instead.

    Attributes:
        matching: number of files with the published checksum.
        files: total number of files.
        algorithm: algorithm of the published checksums.
        note: what was checked instead if the data set is not official; may be "".
    """

    matching: int
    files: int
    algorithm: str
    note: str = ""

    @property
    def official(self) -> bool:
        """True if every file has the checksum that its publisher states."""
        return self.matching == self.files

    def __str__(self) -> str:
        note = f"; {self.note}" if self.note and not self.official else ""
        found = f"{self.matching} of {self.files} files have the published {self.algorithm}{note}"
        return f"{'official' if self.official else 'not official'} ({found})"


def compare_checksums(expected: Mapping[Path, str], algorithm: str, note: str = "") -> Checksums:
    """Compare files with the checksums (hexadecimal digits) stated by their publisher. A missing file does not match."""
    matching = sum(path.is_file() and content_hash(path, algorithm) == digest for path, digest in expected.items())
    return Checksums(matching, len(expected), algorithm, note)


class Sourced(Protocol):
    """A data set with its name and source. `checksums` is None if the data set has no publisher."""

    # Declared as properties, because the attributes of frozen dataclasses are read-only.
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
        DataError: the variable does not name a folder. No other source is tried in this case, because the user has requested a
            mirror.
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
    """Load a data set from a source, and print the source used. 'auto' uses the first source that has the data set.

    Args:
        name: name of the data set, for messages.
        wanted: one of SOURCES.
        suppliers: for each source, a function that loads the data set from it. The function raises DataUnavailable if the source
            does not have the data set, and DataError if the data are wrong.
        allow_synthetic: if True, 'auto' uses synthetic data if no other source has the data set. The source 'synthetic' is
            always allowed.

    Raises:
        DataError: the source is unknown, the data are wrong, or no source has the data set and synthetic data are not allowed.
    """
    require_known_source(wanted)
    if wanted != "auto":
        result = suppliers[wanted]()
        _announce(name, result, {})
        return result
    refused: dict[str, str] = {}
    for source in (source for source in ORDER if source in suppliers):
        # Do not fall back to synthetic data unless it is allowed, because their results would look like results on real data.
        if source == "synthetic" and not allow_synthetic:
            refused[source] = "not allowed in this profile unless data_source=synthetic is given"
            continue
        try:
            result = suppliers[source]()
        # Try the next source only if this one does not have the data set. Wrong data raise a DataError, which ends the search.
        except DataUnavailable as reason:
            refused[source] = reason.what
            continue
        _announce(name, result, refused)
        return result
    reasons = "; ".join(f"{source}: {reason}" for source, reason in refused.items())
    raise DataError(f"no source has {name} ({reasons})", where=cache_root(), next_step=FETCH_HINT)


def _announce(name: str, result: Sourced, refused: Mapping[str, str]) -> None:
    checksums = result.checksums
    publisher = "" if checksums is None else ", official" if checksums.official else ", NOT OFFICIAL"
    lines = [f"  DATA  {name}: source = {result.source.upper()}{publisher}, {result.name} ({result.detail})"]
    lines += [f"        not {source}: {reason}" for source, reason in refused.items()]
    _print_framed(tuple(lines))


@functools.cache
def _print_framed(lines: tuple[str, ...]) -> None:
    """Print lines in a frame, once in each process: most experiments of a chapter read the same data.

    In `make reproduce`, they are printed once in each notebook, also if its jobs read the same data.
    """
    if _is_recorded(lines):
        return
    rule = "=" * _FRAME_WIDTH
    # JupyterLab breaks longer lines, also within words.
    fit = textwrap.TextWrapper(_FRAME_WIDTH, subsequent_indent=" " * 8, break_on_hyphens=False, break_long_words=False)
    print("\n".join([rule, *map(fit.fill, lines), rule]), flush=True)


def _is_recorded(lines: tuple[str, ...]) -> bool:
    """Record that this notebook prints these lines. Return True if it or one of its jobs already did."""
    folder = frames_folder()
    # A notebook shows the output of rank 0 only.
    if folder is None or os.environ.get("RANK", "0") != "0":
        return False
    try:
        (folder / hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]).touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:  # the call of `make reproduce` has ended and removed the folder
        return False
    return False


@dataclass(frozen=True)
class PublishedSet(Generic[T]):
    """A published data set. It can be read from the mirror or from the cache, or be downloaded into the cache.

    Attributes:
        folder: name of the data set's folder in the cache.
        read: function (folder, source, label) that reads and checks the data set. `label` names the folder in error messages. The
            function raises DataUnavailable if the folder does not have the data set, and DataError if the data are wrong.
        files: function that returns the data files in a folder that `read` has accepted.
        fetch: function that downloads the data set into a new folder in the cache, completely or not at all (see
            `folders.staged`).
        at_top: True if the mirror has the files at its top level, and not in `folder`.
        manifest: whether to write a manifest when the files are copied from the mirror.
    """

    folder: str
    read: Callable[[Path, str, str], T]
    files: Callable[[Path], Iterable[Path]]
    fetch: Callable[[Path], None]
    at_top: bool = False
    manifest: bool = True

    def mirrored(self) -> T:
        """Load the data set from the mirror."""
        return self.read(self._in_mirror(), "mirror", "the mirror")

    def cached(self) -> T:
        """Load the data set from the cache."""
        return self.read(cache_root() / self.folder, "cache", "the cache")

    def downloaded(self) -> T:
        """Download the data set and load it. If the cache already has the data set, load it from the cache."""
        target = cache_root() / self.folder
        if target.is_dir():
            return self.cached()
        self.fetch(target)
        return self.read(target, "download", "the cache")

    def suppliers(self) -> dict[str, Callable[[], T]]:
        """Return the suppliers that `take` needs: a dict that maps each source to a function that loads the data set from it."""
        return {"mirror": self.mirrored, "cache": self.cached, "download": self.downloaded}

    def stage(self) -> str:
        """Copy the data set from the mirror into the cache. If the mirror does not have it, download it into the cache.

        Returns:
            'present' if the cache already had the data set, else a description of its origin.

        Raises:
            DataError: no source has the data set, or the data are wrong. The cache is unchanged.
        """
        target = cache_root() / self.folder
        if target.is_dir():
            self.cached()
            return "present"
        try:
            # Read the data set only to check its files, because damaged files must not enter the cache.
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
    """Return the address of the Hugging Face hub, or the value of the environment variable HF_ENDPOINT if it is set."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def require_network(url: str) -> None:
    """Check that the host of `url` answers within PROBE_LIMIT_S seconds. This time includes name resolution and TLS.

    The request runs in a thread, because it cannot be interrupted if name resolution hangs, or if the host accepts a connection
    and sends nothing. A failure is remembered, so that the wait is not repeated for each data set: by this process for
    PROBE_MEMORY_S seconds, and by all processes of one `make reproduce` until it ends.

    Raises:
        DataUnavailable: an environment variable disables downloads, or the host refuses the connection or does not answer.
    """
    for switch in OFFLINE_SWITCHES:
        if os.environ.get(switch, "").strip().lower() in ("1", "true", "yes", "on"):
            raise DataUnavailable(f"offline: {switch}={os.environ[switch]}", next_step=f"unset {switch} to allow downloads")
    host = _host(url)
    if known := _remembered(host):
        raise _unreachable(host, known)
    faults: list[str] = []
    # A daemon thread does not keep the process alive if the name resolution never returns.
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
        url: address of the file.
        path: a file in a working folder of `folders.staged`, which no other process reads yet.
        md5, sha256: checksums stated by the publisher.

    Raises:
        DataUnavailable: there is no network; the host sends nothing for STALL_LIMIT_S seconds; the download takes longer than
            DOWNLOAD_LIMIT_S seconds or is larger than DOWNLOAD_LIMIT_BYTES; fewer bytes are received than announced; or the
            checksum is wrong.
    """
    require_network(url)
    # Both hashes are updated while the file arrives, so it is not read a second time.
    digests = {"md5": (hashlib.md5(usedforsecurity=False), md5), "sha256": (hashlib.sha256(), sha256)}
    try:
        # This timeout applies to each read and not to the whole download, so that a slow network is not an error.
        with urllib.request.urlopen(url, timeout=STALL_LIMIT_S) as answer, open(path, "wb") as file:
            announced = answer.headers.get("Content-Length")
            announced = int(announced) if announced and announced.isdecimal() else None
            received = _copy(answer, file, [digest for digest, _ in digests.values()], path.name, announced)
    except NETWORK_FAULTS as error:
        # An error of the local disk, such as a full disk, is not a problem of the source. `staged` reports it.
        if _is_local(error):
            raise
        if isinstance(getattr(error, "reason", error), TimeoutError):  # the host answered the first request, but sends no data
            _remember(_host(url), str(error))
        raise DataUnavailable(f"download failed: {error}", where=url, next_step="try again, or set a mirror") from error
    if announced is not None and received != announced:
        raise DataUnavailable(f"the download ended after {received} of {announced} bytes", where=url, next_step="try again")
    for name, (digest, expected) in digests.items():
        if expected and digest.hexdigest() != expected:
            quarantined = _quarantine(path)
            raise DataUnavailable(
                f"{path.name} has {name} {digest.hexdigest()}, expected {expected}; moved to {QUARANTINE}/{quarantined.name}",
                where=url,
                next_step="look at the file in quarantine, which is often the login page of a proxy, then try again",
            )


def _host(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}/"


def _remembered(host: str) -> str:
    """Return the reason why a host did not answer when it was last tested, or "" if no failure is remembered."""
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
        return  # an HTTP error status is also an answer of the host
    except NETWORK_FAULTS as error:
        faults.append(str(getattr(error, "reason", error)))


def _copy(answer: http.client.HTTPResponse, file: BinaryIO, digests: list, name: str, announced: int | None) -> int:
    received, started = 0, time.monotonic()
    with progress_bar(total=announced, unit="B", unit_scale=True, desc=name) as bar:
        # `read1` returns what has arrived. `read` would wait for a full chunk and hide a slow connection from the limits.
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
    """Return True for an error of the local disk.

    If a file cannot be opened, the exception contains a file name. If the disk is full, the exception contains an errno.
    """
    if not isinstance(error, OSError) or isinstance(error, urllib.error.URLError):
        return False
    return error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT)


def _quarantine(path: Path) -> Path:
    quarantined = cache_root() / QUARANTINE / f"{path.name}.{uuid.uuid4().hex[:8]}"
    quarantined.parent.mkdir(parents=True, exist_ok=True)
    return path.rename(quarantined)


def _unreachable(host: str, fault: str) -> DataUnavailable:
    return DataUnavailable(
        f"no network: {host} {fault}", where=host, next_step="run `make fetch` on a machine with a network, or set a mirror"
    )
