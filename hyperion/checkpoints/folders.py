"""Folders step-00000100/ with a manifest: written whole or not at all, verified by size and sha256 before use.

Whoever saves writes any files into the folder that `saving` yields (one state, or the many files of a sharded
checkpoint); the hashes, the manifest and the rename that makes it a checkpoint happen here.

With a process group up, every rank calls these functions together: rank 0 makes, seals and verifies the folder, and an
error on any rank is raised on all.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from hyperion.checkpoints.ranks import agreed, on_rank_0, rank_and_size
from hyperion.checkpoints.states import EARLIER, CheckpointError
from hyperion.errors import refused_write, require_number
from hyperion.untrusted import inner_path, open_regular, printable, read_json

MANIFEST = "manifest.json"
FORMAT = "hyperion-checkpoint-2"
UNFINISHED = ".unfinished-"
REPLACED = ".replaced-"
HASHING_THREADS = 8
T = TypeVar("T")
_NAME = re.compile(r"step-([0-9]{8,})")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of that step: step-00000100, with more digits from step 10^8 on."""
    return Path(folder) / f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint folder's name; None for every name that `checkpoint_path` does not give."""
    found = _NAME.fullmatch(name)
    step = int(found[1]) if found else None
    # step-0000000001 would be a second name of step 1.
    return step if found and checkpoint_path(Path(), step).name == name else None


@contextmanager
def saving(folder: Path, step: int, keep: int = 2) -> Iterator[Path]:
    """A new folder to write a checkpoint's files into; it becomes folder/step-<step> when the block ends without an
    error on every rank.

    Until then, and after any error, the checkpoints that were there are untouched. Afterwards the new one and the newest
    `keep - 1` others remain. Only checkpoints are removed: folders of the exact name whose manifest names the same step.
    A folder of checkpoints belongs to one run at a time: what an earlier, killed save left unfinished is removed.

    Within the block each rank writes files of its own. What can fail on one rank while others go on to a collective
    belongs into `agreed` (write_sharded sees to that): the others would wait for the one that left.

    Raises:
        HyperionError: a step or `keep` out of range.
        CheckpointError: the folder cannot be written (full disk, no permission), or is not one folder for all ranks;
            names it, the cause and the failing rank.
    """
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        require_number(name, value, "saving a checkpoint", whole=True, at_least=least)
    folder, step, keep = Path(folder), int(step), int(keep)
    target = checkpoint_path(folder, step)
    new = folder / f"{UNFINISHED}{target.name}"
    try:
        on_rank_0(lambda: _begin(new, step))
        agreed(lambda: _require_shared(new))
        fault = None
        try:
            with _explained(folder, step):
                yield new
        except Exception as error:
            if getattr(error, "on_all_ranks", False):
                raise
            fault = error
        agreed(lambda: _raise(fault))
        on_rank_0(lambda: _finish(new, target, step, keep))
    except BaseException:
        if rank_and_size()[0] == 0:
            shutil.rmtree(new, ignore_errors=True)
        raise


def require_writable(folder: Path) -> None:
    """Make the folder if it is missing, and write a file into it: what a first checkpoint would find out hours later.

    Raises:
        CheckpointError: it cannot be made or written to, or is not one folder for all ranks.
    """
    folder = Path(folder)

    def attempt() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"checkpoint")
        except OSError as error:
            raise refused_write(
                error,
                CheckpointError,
                where=folder,
                elsewhere="name another checkpoint folder",
                action="no checkpoint could be written",
                kept="nothing was trained",
            ) from error

    on_rank_0(attempt)
    agreed(lambda: _require_shared(folder))


def newest_good(folder: Path, read: Callable[[Path], T]) -> T | None:
    """What `read` returns for the newest checkpoint it accepts; stderr names each newer one that it refused, and why.

    Args:
        read: on many ranks it returns on all or raises the same CheckpointError on all, as `verify` and `read_sharded`
            do.

    Returns:
        None when there is no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints, and `read` refused every one; or the folder cannot be listed.
    """
    refused = []
    for path in on_rank_0(lambda: _found(Path(folder))):
        try:
            on_rank_0(lambda path=path: _require_folder(path))
            return read(path)
        except CheckpointError as error:
            refused.append(error)
            if rank_and_size()[0] == 0:
                print(printable(f"WARNING: checkpoint refused: {path}. {error}"), file=sys.stderr)
    if refused:
        raise CheckpointError(
            f"none of {len(refused)} checkpoints can be used; the newest: {refused[0].what}",
            where=refused[0].where,
            next_step=f"restore {folder} from a copy, or remove it to start from the beginning",
        )
    return None


def verify(path: Path) -> dict:
    """Check one checkpoint folder against its manifest: every file, no other file, sizes, sha256.

    On many ranks rank 0 reads the files, once; every rank gets its answer.

    Returns:
        The manifest.

    Raises:
        CheckpointError: names the file and what is wrong with it.
    """
    return on_rank_0(lambda: _verified(Path(path)))


def _verified(path: Path) -> dict:
    try:
        manifest = _manifest(path)
        entries, present = manifest["files"], _files(path)
        for name in sorted(present | entries.keys()):
            if name not in entries:
                raise CheckpointError("a file that the manifest does not list", where=path / name, next_step=EARLIER)
            if name not in present:
                raise CheckpointError("a file that the manifest lists is missing", where=path / name, next_step=EARLIER)
            size = entries[name]["bytes"]
            if (found := (path / name).lstat().st_size) != size:
                raise CheckpointError(f"{found} bytes instead of {size}: cut off or edited", where=path / name, next_step=EARLIER)
        for name, digest in _digests(path, sorted(entries)).items():
            if digest != entries[name]["sha256"]:
                raise CheckpointError(
                    "the sha256 differs from the manifest's: edited or damaged", where=path / name, next_step=EARLIER
                )
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {error}", where=path, next_step=EARLIER) from error
    return manifest


def _manifest(path: Path) -> dict:
    """The manifest of one checkpoint folder, with every field of its type and the step that the folder's name says.

    Raises:
        CheckpointError: it is missing, or is not a manifest of this folder.
    """
    place = inner_path(path, MANIFEST, CheckpointError, EARLIER)

    def refused(what: str) -> CheckpointError:
        return CheckpointError(what, where=place, next_step=EARLIER)

    try:
        manifest = read_json(place, CheckpointError, EARLIER)
    except (OSError, CheckpointError) as error:
        told = error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        raise refused(f"the manifest cannot be read ({told})") from error
    if not isinstance(manifest, dict):
        raise refused("the manifest cannot be read (it is no JSON object)")
    if (found := manifest.get("format")) != FORMAT:
        raise refused(f"format {found!r} is not {FORMAT}")
    if manifest.keys() != {"format", "step", "files"}:
        raise refused(f"the manifest has the fields {sorted(manifest)} instead of files, format and step")
    step, files = manifest["step"], manifest["files"]
    if not _is_count(step):
        raise refused(f"the manifest's step is {step!r}, not a whole number from 0")
    if (named := step_of(path.name)) is not None and named != step:
        raise refused(f"the folder is named {path.name}, and its manifest is of step {step}")
    if not isinstance(files, dict):
        raise refused("the manifest's files are no JSON object")
    for name, entry in files.items():
        inner_path(path, name, CheckpointError, EARLIER)
        if not isinstance(entry, dict) or entry.keys() != {"bytes", "sha256"}:
            raise refused(f"the manifest's entry of {name!r} is not an object of bytes and sha256")
        if not _is_count(entry["bytes"]):
            raise refused(f"the manifest's entry of {name!r} has bytes {entry['bytes']!r}")
        if not isinstance(entry["sha256"], str) or not _SHA256.fullmatch(entry["sha256"]):
            raise refused(f"the manifest's entry of {name!r} has no sha256 of 64 hexadecimal digits")
    return manifest


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _begin(new: Path, step: int) -> None:
    """An empty folder to write into; what a killed save left is gone."""
    with _explained(new.parent, step):
        _put_back(new.parent)
        for left_over in _ours(new.parent, UNFINISHED):
            shutil.rmtree(left_over)
        new.mkdir(parents=True)


def _put_back(folder: Path) -> None:
    """A checkpoint that was being replaced by one of the same step when the process was killed gets its name again."""
    for replaced in _ours(folder, REPLACED):
        target = folder / replaced.name.removeprefix(REPLACED)
        if _is_checkpoint(target):
            shutil.rmtree(replaced)
        elif not os.path.lexists(target):
            replaced.rename(target)


def _require_shared(new: Path) -> None:
    if not new.is_dir():
        raise CheckpointError(
            "this rank does not see the folder that rank 0 made",
            where=new,
            next_step="name a checkpoint folder on a file system that all ranks share",
        )


def _raise(fault: Exception | None) -> None:
    if fault is not None:
        raise fault


@contextmanager
def _explained(folder: Path, step: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise refused_write(
            error,
            CheckpointError,
            where=folder,
            elsewhere="name another checkpoint folder",
            action=f"the checkpoint of step {step} could not be written",
            kept=f"the checkpoint of step {step} was not written, those before it are untouched",
        ) from error


def _finish(new: Path, target: Path, step: int, keep: int) -> None:
    """Vouch for the files, give the folder its name, and remove what it replaces."""
    folder = target.parent
    with _explained(folder, step):
        _seal(new, step)
        replaced = None
        if _is_checkpoint(target):  # the same step again, after a resume: a folder cannot be renamed over another
            replaced = target.rename(folder / f"{REPLACED}{target.name}")
        elif os.path.lexists(target):
            _set_aside(target)
        new.rename(target)
        for place in (folder, folder.parent):  # the folder itself may be new
            _flush(place)
        others = [path for path in _newest_first(folder) if path != target and _is_checkpoint(path)]
        for old in ([replaced] if replaced else []) + others[keep - 1 :]:
            shutil.rmtree(old)


def _set_aside(path: Path) -> None:
    """Rename what has a checkpoint's name and is none, or none any more: it may be somebody's, and is not removed."""
    aside = next(name for number in itertools.count(1) if not os.path.lexists(name := Path(f"{path}.aside-{number}")))
    path.rename(aside)
    print(printable(f"WARNING: {path} is no checkpoint that can be read; it is {aside.name} now"), file=sys.stderr)


def _seal(new: Path, step: int) -> None:
    """Write the manifest of all files below, and force everything to the disk."""
    digests = _digests(new, sorted(_files(new)))
    files = {name: {"bytes": (new / name).stat().st_size, "sha256": digest} for name, digest in digests.items()}
    manifest = {"format": FORMAT, "step": step, "files": files}
    (new / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in [*new.rglob("*"), new]:
        _flush(path)


def _files(path: Path) -> set[str]:
    """Relative names of all files of a checkpoint but its manifest.

    Raises:
        CheckpointError: something is there that is neither a regular file nor a folder: a link, a named pipe.
        OSError: a folder cannot be listed.
    """
    names, folders = set(), [path]
    while folders:
        for entry in sorted(os.scandir(folders.pop()), key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                names.add(Path(entry.path).relative_to(path).as_posix())
            else:
                raise CheckpointError("neither a regular file nor a folder", where=entry.path, next_step=EARLIER)
    return names - {MANIFEST}


def _found(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):  # a folder that may only be read
        _put_back(folder)
    try:
        return _newest_first(folder)
    except OSError as error:
        raise CheckpointError(
            f"the folder of checkpoints cannot be listed: {error}",
            where=folder,
            next_step="make it readable, or name another checkpoint folder",
        ) from error


def _newest_first(folder: Path) -> list[Path]:
    """Everything that has a checkpoint's name, whatever it is."""
    return sorted(_named(folder, ""), key=lambda path: step_of(path.name), reverse=True)


def _ours(folder: Path, prefix: str) -> list[Path]:
    """Folders (links to folders are not) whose name is `prefix` and a checkpoint's name."""
    return [path for path in _named(folder, prefix) if stat.S_ISDIR(path.lstat().st_mode)]


def _named(folder: Path, prefix: str) -> list[Path]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [folder / name for name in names if name.startswith(prefix) and step_of(name.removeprefix(prefix)) is not None]


def _is_checkpoint(path: Path) -> bool:
    """Whether this library wrote it: a folder, not a link to one, with a manifest of the step that its name says."""
    try:
        _require_folder(path)
        _manifest(path)
    except CheckpointError:
        return False
    return True


def _require_folder(path: Path) -> None:
    if os.path.islink(path) or not os.path.isdir(path):
        what = "a symbolic link" if os.path.islink(path) else "a file"
        raise CheckpointError(f"{what} where the folder of a checkpoint is expected", where=path, next_step="move it elsewhere")


def _digests(path: Path, names: list[str]) -> dict[str, str]:
    """sha256 by name; several files at once, because one core hashes slower than a disk array reads."""
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: _sha256(path / name), names), strict=True))


def _sha256(path: Path) -> str:
    with open_regular(path, CheckpointError, EARLIER) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """fsync a file, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
