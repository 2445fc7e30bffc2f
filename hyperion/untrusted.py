"""Safely read files from untrusted sources.

A run folder, a checkpoint, a passport or a data mirror may come from another machine or another person. All code that reads such
files uses this module. It ensures that a name in a file cannot lead outside of its folder, that reading does not block on a named
pipe or a device, that the size of a read is limited, and that text is safe to print.

This module uses only the standard library, because `hyperion.install` needs it before other packages are installed.
"""

import contextlib
import json
import math
import os
import re
import stat
import unicodedata
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from hyperion.errors import HyperionError
from hyperion.units import MIB

DEEPEST = 100  # maximum nesting depth of a JSON document; Hyperion's own documents have fewer than ten levels
DOCUMENT_BYTES = 64 * MIB  # maximum size of a JSON, CSV or TOML document; Hyperion's own documents have a few MiB
_PIECE_BYTES = MIB
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
Error = TypeVar("Error", bound=HyperionError)


def inner_path(folder: Path, name: object, error: type[Error], next_step: str, links: bool = False) -> Path:
    """Return `folder / name` for a name that was read from a file.

    Args:
        folder: the folder that must contain the file. The folder itself may be a link.
        name: a relative POSIX path such as "samples/03.gemm.parquet".
        error: class of the error to raise.
        next_step: what the user should do with a folder that contains a bad name.
        links: if True, allow symbolic links. A Hugging Face cache contains them.

    Raises:
        error: the name is not a string, is empty or absolute, has a component "", "." or "..", contains a control character, has
            a component that is a symbolic link (unless `links` is True), or is refused by the system, for example because it is
            too long.
    """
    where = Path(folder)
    if not isinstance(name, str):
        raise error(f"{name!r} names no file: a string is expected", where=where, next_step=next_step)
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") for part in parts) or printable(name) != name:
        raise error(f"the name {name!r} leaves its folder or is malformed", where=where, next_step=next_step)
    # Each read of a run calls this function for each name in its manifest. Operations of pathlib would take most of that time.
    path = os.fspath(where)
    for part in parts:
        path = os.path.join(path, part)
        try:
            linked = stat.S_ISLNK(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            linked = False
        except OSError as problem:  # too long, for example
            raise error(f"the name {name!r} cannot be used: {problem.strerror}", where=where, next_step=next_step) from problem
        if linked and not links:
            raise error(f"the name {name!r} passes through a symbolic link", where=Path(path), next_step=next_step)
    return where / name


def open_regular(path: Path, error: type[Error], next_step: str) -> BinaryIO:
    """Open a regular file for reading in binary mode, without blocking.

    Raises:
        error: the path is a named pipe, a device, a socket or a folder.
        OSError: the file is missing or may not be read.
    """
    # Without O_NONBLOCK, opening a named pipe blocks until a process writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # Examine the descriptor and not the path, because the path may be replaced between a check and the opening.
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise error(f"{_kind(mode)} where a regular file is expected", where=path, next_step=next_step)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bounded(path: Path, error: type[Error], next_step: str, limit_bytes: int = DOCUMENT_BYTES) -> bytes:
    """Return the content of a regular file of at most `limit_bytes`.

    Raises:
        error: the path is not a regular file, or the file is larger than `limit_bytes`.
        OSError: the file is missing or may not be read.
    """
    content = bytearray()
    with open_regular(path, error, next_step) as file:
        # The size of the file is not checked in advance, because files in /proc have size 0 and a file may grow. The file is read
        # in pieces, because `read(limit_bytes)` allocates that much memory even for a small file.
        while piece := file.read(_PIECE_BYTES):
            content += piece
            if len(content) > limit_bytes:
                raise error(f"the file is larger than {limit_bytes / MIB:g} MiB", where=path, next_step=next_step)
    return bytes(content)


def parse_json(content: bytes | str, error: type[Error], next_step: str, where: object = None) -> Any:
    """Parse a JSON document strictly.

    Args:
        content: the document.
        error: class of the error to raise.
        next_step: what the user should do if the document is refused.
        where: file of the document, for the error message.

    Raises:
        error: the content is not UTF-8 or not JSON, or contains a duplicate key in an object, a number that is not finite, an
            unpaired surrogate, or too many levels of nesting.
    """
    try:
        text = content.decode() if isinstance(content, bytes) else content
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
        _require_shallow(document)
        if _SURROGATE.search(text):
            # Text with an unpaired surrogate can be neither written nor printed. encode() raises a ValueError for it.
            json.dumps(document, ensure_ascii=False).encode()
        return document
    except RecursionError:
        raise error(
            f"the JSON is nested too deeply: it has more than {DEEPEST} levels", where=where, next_step=next_step
        ) from None
    except ValueError as fault:
        raise error(f"not a valid JSON document: {fault}", where=where, next_step=next_step) from fault


def read_json(path: Path, error: type[Error], next_step: str, limit_bytes: int = DOCUMENT_BYTES) -> Any:
    """Read a JSON file with `read_bounded`, and parse it with `parse_json`.

    Raises:
        error: see `read_bounded` and `parse_json`.
        OSError: the file is missing or may not be read.
    """
    return parse_json(read_bounded(path, error, next_step, limit_bytes), error, next_step, where=path)


def is_private(folder: Path) -> bool:
    """Create a folder with mode 0700 if it does not exist. Return True if only this user can write to the folder.

    A folder is not private if it is a link or a file, belongs to another user, or is writable by its group or by others.

    Raises:
        OSError: the folder cannot be created.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # `lstat`, because a link to a private folder could be redirected later by its owner.
    facts = folder.lstat()
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def printable(text: str) -> str:
    """Return `text` with control characters escaped (\\x1b, \\u202e), so that a terminal shows them instead of executing them.

    Newlines and tabs are kept. Characters that change the text direction, and bytes that are not UTF-8, are escaped too.
    """
    # `str.isprintable` is False for every character that must be escaped. Most texts contain no such character.
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    # Cc: control characters. Cf: invisible format characters, such as direction marks. Cs: surrogates.
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    return character.encode("unicode_escape", "surrogatepass").decode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        seen: set[str] = set()
        doubled = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"key {doubled!r} occurs twice in one object")
    return document


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is too large for a number")
    return number


def _require_shallow(document: Any) -> None:
    # Search the document level by level. A recursive search would itself fail if the nesting is too deep.
    level = [document]
    for _ in range(DEEPEST):
        containers = [node for node in level if isinstance(node, dict | list)]
        if not containers:
            return
        level = [child for node in containers for child in (node.values() if isinstance(node, dict) else node)]
    raise RecursionError


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFDIR: "a folder",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
    }
    return kinds.get(stat.S_IFMT(mode), "a special file")
