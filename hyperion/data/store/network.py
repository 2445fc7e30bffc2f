"""Downloads that cannot hang: a probe of the host first, a time limit on stalls, and a checksum at the end."""

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
from pathlib import Path
from typing import BinaryIO

from hyperion.data.errors import DataUnavailable
from hyperion.data.store.staging import QUARANTINE, cache_root
from hyperion.paths import silent_hosts_folder

PROBE_LIMIT_S = 3.0
STALL_LIMIT_S = 10.0
DOWNLOAD_LIMIT_S = 1800.0
DOWNLOAD_LIMIT_BYTES = 1 << 30  # CIFAR-10, the largest of the downloads, has 170 MB
PROBE_MEMORY_S = 60.0
CHUNK_BYTES = 1 << 20
OFFLINE_SWITCHES = ("HYPERION_OFFLINE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
NETWORK_FAULTS = (OSError, http.client.HTTPException)  # errors of urllib, timeouts and TLS errors are OSErrors

_silent_until: dict[str, tuple[float, str]] = {}


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
        path: a file in a working folder that readers do not see yet (see `staging.staged`).
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
