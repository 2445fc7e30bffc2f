"""Checkpoint folders, such as step-00000100, with a manifest that contains the size and the sha256 of each file.

A checkpoint is written completely or not at all. Write its files into the folder that `saving` yields. `saving` then computes the
hashes, writes the manifest, and renames the folder. After the rename the folder is a checkpoint.

With a process group, all ranks must call these functions together. Rank 0 creates the folder, writes the manifest, and verifies
the files. An error on one rank is raised on all ranks.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hyperion import errors
from hyperion.checkpoints.sharded import agreed, on_rank_0, rank_and_size
from hyperion.checkpoints.states import EARLIER, CheckpointError
from hyperion.errors import refused_write, require_number
from hyperion.forms import FieldError, read_form
from hyperion.locks import folder_lock
from hyperion.paths import flush
from hyperion.untrusted import inner_path, open_regular, printable, read_json

MANIFEST = "manifest.json"
FORMAT = "hyperion-checkpoint-2"
UNFINISHED = ".unfinished-"
REPLACED = ".replaced-"
HASHING_THREADS = 8
T = TypeVar("T")
_NAME = re.compile(r"step-([0-9]{8,})")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class _FileEntry:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class _Manifest:
    format: str
    step: int
    files: dict[str, _FileEntry]


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step, such as folder/step-00000100. Steps of 10^8 or more have more digits."""
    return Path(folder) / f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint folder's name, or None if `checkpoint_path` never returns this name."""
    match = _NAME.fullmatch(name)
    # Reject a name such as step-0000000001, which would be a second name for step 1.
    return int(match[1]) if match and checkpoint_path(Path(), int(match[1])).name == name else None


@contextmanager
def saving(folder: Path, step: int, keep: int = 2) -> Iterator[Path]:
    """Context manager that yields a new folder for the files of a checkpoint.

    If the block succeeds on every rank, the folder is renamed to folder/step-<step>. Before the rename, and after an error,
    the existing checkpoints are unchanged. After the rename, the new checkpoint and the newest `keep - 1` other checkpoints
    remain. No other folders are removed: a folder is a checkpoint only if its name and its manifest contain the same step.

    Only one run at a time may use a folder of checkpoints (see `sole_use`), because `saving` removes unfinished folders, which
    remain when a process is killed while it saves.

    Inside the block each rank writes its own files. If code in the block can fail on one rank while other ranks enter a
    collective, call this code through `agreed`, as write_sharded does. Otherwise the other ranks would wait forever.

    Raises:
        HyperionError: `step` or `keep` is out of range.
        CheckpointError: the folder cannot be written (for example, the disk is full), or not all ranks see the same folder.
            The error names the folder, the cause and the failing rank.
    """
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        require_number(name, value, "saving a checkpoint", whole=True, at_least=least)
    folder, step, keep = Path(folder), int(step), int(keep)
    target = checkpoint_path(folder, step)
    new = folder / f"{UNFINISHED}{target.name}"
    error: Exception | None = None

    def raise_error() -> None:
        if error is not None:
            raise error

    try:
        on_rank_0(lambda: _begin(new, step))
        # Check that the ranks share the folder. A rank on another file system would write shards that no other rank can read.
        agreed(lambda: _require_shared(new))
        try:
            with _explain_os_errors(folder, step):
                yield new
        except Exception as raised:
            # Every rank has raised this error at the same place, so do not call `agreed`: no other rank waits there.
            if getattr(raised, "on_all_ranks", False):
                raise
            # The error may have occurred on this rank only. This rank still calls `agreed`, because the other ranks wait there.
            error = raised
        agreed(raise_error)  # raises the error of any rank on all ranks
        on_rank_0(lambda: _finish(new, target, step, keep))
    except BaseException:
        if rank_and_size()[0] == 0:
            # Remove the unfinished folder, also after KeyboardInterrupt. If the process is killed, the next `_begin` removes the
            # folder.
            shutil.rmtree(new, ignore_errors=True)
        raise


@contextmanager
def sole_use(folder: Path) -> Iterator[None]:
    """Context manager that locks a folder of checkpoints, which exists, for this run. All ranks must enter it.

    Raises:
        CheckpointError: another run uses the folder.
    """
    held = contextlib.ExitStack()

    def attempt() -> None:
        if not held.enter_context(folder_lock(folder)):
            next_step = "wait until it has ended, or choose another folder"
            raise CheckpointError("another training uses this folder", where=folder, next_step=next_step)

    with held:
        on_rank_0(attempt)
        yield


def require_writable(folder: Path) -> None:
    """Create the folder if it does not exist, and check that files can be written to it.

    Call this function before training, so that a problem is found immediately and not only at the first checkpoint.

    Raises:
        CheckpointError: the folder cannot be created, files cannot be written to it, or not all ranks see the same folder.
    """
    folder = Path(folder)

    def attempt() -> None:
        errors.require_writable(
            folder,
            CheckpointError,
            action="cannot write checkpoints",
            unchanged="training has not started",
            elsewhere="choose another checkpoint folder",
        )

    on_rank_0(attempt)
    agreed(lambda: _require_shared(folder))


def newest_good(folder: Path, read: Callable[[Path], T]) -> T | None:
    """Call `read(path)` for the checkpoints of a folder, newest first, until a call raises no CheckpointError.

    For each checkpoint that cannot be used, a warning with the reason is printed to stderr.

    Args:
        folder: folder that contains the checkpoints of the run.
        read: function that reads a checkpoint. It must return on all ranks, or raise the same CheckpointError on all ranks,
            as `verify` and `read_sharded` do.

    Returns:
        The result of `read`, or None if there is no checkpoint.

    Raises:
        CheckpointError: no checkpoint can be used, or the folder cannot be listed.
    """
    refused = []
    for path in on_rank_0(lambda: _checkpoint_paths(Path(folder))):
        try:
            on_rank_0(lambda path=path: _require_folder(path))
            return read(path)
        except CheckpointError as error:
            refused.append(error)
            if rank_and_size()[0] == 0:
                print(printable(f"WARNING: this checkpoint cannot be used: {path}. {error}"), file=sys.stderr)
    if refused:
        # A checkpoint that is not damaged belongs to another configuration. The advice must not be to remove it.
        damaged = refused[0].next_step in (None, EARLIER)
        restore = f"restore {folder} from a copy, or remove this folder to train from the beginning"
        raise CheckpointError(
            f"none of the {len(refused)} checkpoints can be used; the problem of the newest one: {refused[0].what}",
            where=refused[0].where,
            next_step=restore if damaged else refused[0].next_step,
        )
    return None


def verify(path: Path) -> dict:
    """Check that a checkpoint folder contains exactly the files of its manifest, with the listed sizes and sha256 hashes.

    With several ranks only rank 0 reads the files. All ranks get the result.

    Returns:
        The manifest.

    Raises:
        CheckpointError: the folder does not match its manifest. The error names the file and the problem.
    """
    return on_rank_0(lambda: _verified(Path(path)))


def _verified(path: Path) -> dict:
    try:
        manifest = _manifest(path)
        # Check names and sizes first, because these checks are cheap. Hashing reads every byte.
        entries, present = manifest["files"], _files(path)
        for name in sorted(present | entries.keys()):
            if name not in entries:
                raise CheckpointError("the manifest does not list this file", where=path / name, next_step=EARLIER)
            if name not in present:
                raise CheckpointError("a file listed in the manifest is missing", where=path / name, next_step=EARLIER)
            size = entries[name]["bytes"]
            if (present_size := (path / name).lstat().st_size) != size:
                raise CheckpointError(
                    f"the file has {present_size} bytes instead of {size}: truncated or modified",
                    where=path / name,
                    next_step=EARLIER,
                )
        for name, digest in _digests(path, sorted(entries)).items():
            if digest != entries[name]["sha256"]:
                raise CheckpointError(
                    "the sha256 differs from the manifest: modified or damaged", where=path / name, next_step=EARLIER
                )
    except OSError as error:
        raise CheckpointError(f"the checkpoint cannot be read: {error}", where=path, next_step=EARLIER) from error
    return manifest


def _manifest(path: Path) -> dict:
    """Return the manifest of a checkpoint folder. The types of all fields and the step are checked.

    Raises:
        CheckpointError: the manifest is missing or malformed, or it belongs to another folder.
    """
    place = inner_path(path, MANIFEST, CheckpointError, EARLIER)

    def refusal(what: str) -> CheckpointError:
        return CheckpointError(what, where=place, next_step=EARLIER)

    try:
        manifest = read_json(place, CheckpointError, EARLIER)
    except (OSError, CheckpointError) as error:
        reason = error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        raise refusal(f"the manifest cannot be read ({reason})") from error
    if isinstance(manifest, dict) and manifest.get("format") != FORMAT:
        raise refusal(f"the format is {manifest.get('format')!r}, not {FORMAT!r}")
    try:
        content = read_form(_Manifest, manifest, "the manifest")
    except FieldError as error:
        raise refusal(error.what) from error
    if content.step < 0:
        raise refusal(f"the manifest's step is {content.step}")
    if (named := step_of(path.name)) is not None and named != content.step:
        raise refusal(f"the folder is named {path.name}, but its manifest is of step {content.step}")
    for name, entry in content.files.items():
        inner_path(path, name, CheckpointError, EARLIER)
        if entry.bytes < 0 or not _SHA256.fullmatch(entry.sha256):
            raise refusal(f"the manifest's entry for {name!r} has {entry.bytes} bytes and the sha256 {entry.sha256[:80]!r}")
    return manifest


def _begin(new: Path, step: int) -> None:
    """Create an empty folder for a new checkpoint, after cleaning up the folders of a process that was killed during a save."""
    with _explain_os_errors(new.parent, step):
        _put_back(new.parent)
        for left_over in _ours(new.parent, UNFINISHED):
            shutil.rmtree(left_over)
        new.mkdir(parents=True)


def _put_back(folder: Path) -> None:
    """Clean up after a save that was interrupted while it replaced a checkpoint of the same step.

    A save renames the old checkpoint before it writes the new one. If the new one is missing, restore the old one. If the new
    one exists, remove the old one.
    """
    for replaced in _ours(folder, REPLACED):
        target = folder / replaced.name.removeprefix(REPLACED)
        if _is_checkpoint(target):
            shutil.rmtree(replaced)
        elif not os.path.lexists(target):
            replaced.rename(target)


def _require_shared(new: Path) -> None:
    if not new.is_dir():
        raise CheckpointError(
            "this rank does not see the folder that rank 0 created",
            where=new,
            next_step="choose a checkpoint folder on a file system that all ranks share",
        )


@contextmanager
def _explain_os_errors(folder: Path, step: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise refused_write(
            error,
            CheckpointError,
            where=folder,
            elsewhere="choose another checkpoint folder",
            action=f"cannot write the checkpoint of step {step}",
            unchanged=f"the checkpoint of step {step} was not written; earlier ones are unchanged",
        ) from error


def _finish(new: Path, target: Path, step: int, keep: int) -> None:
    """Write the manifest, rename the folder to its final name, and remove old checkpoints."""
    folder = target.parent
    with _explain_os_errors(folder, step):
        # The order of these calls makes the save atomic. The data are on the disk before the rename turns the folder into a
        # checkpoint. The rename is on the disk before older checkpoints are removed. So after a crash at any line there is a
        # complete checkpoint.
        _seal(new, step)
        replaced = None
        if _is_checkpoint(
            target
        ):  # this step was already saved before a resume, and a rename onto an existing folder with files fails
            replaced = target.rename(folder / f"{REPLACED}{target.name}")
        elif os.path.lexists(target):
            _set_aside(target)
        new.rename(target)
        for place in (folder, folder.parent):  # flush folder.parent too, because the folder may be new
            flush(place)
        others = [path for path in _newest_first(folder) if path != target and _is_checkpoint(path)]
        for old in ([replaced] if replaced else []) + others[keep - 1 :]:
            shutil.rmtree(old)


def _set_aside(path: Path) -> None:
    """Move aside a file or folder that has the name of a checkpoint but is not a valid checkpoint, by renaming it.

    It is not removed, because the user may need it.
    """
    aside = next(name for number in itertools.count(1) if not os.path.lexists(name := Path(f"{path}.aside-{number}")))
    path.rename(aside)
    print(printable(f"WARNING: {path} is not a readable checkpoint; it was renamed to {aside.name}"), file=sys.stderr)


def _seal(new: Path, step: int) -> None:
    """Write a manifest with all files of the folder, and flush the files and folders to the disk."""
    digests = _digests(new, sorted(_files(new)))
    files = {name: {"bytes": (new / name).stat().st_size, "sha256": digest} for name, digest in digests.items()}
    manifest = {"format": FORMAT, "step": step, "files": files}
    (new / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    # fsync of a file does not flush its entry in the folder, so the folders are flushed too.
    for path in [*new.rglob("*"), new]:
        flush(path)


def _files(path: Path) -> set[str]:
    """Return the relative names of all files of a checkpoint except its manifest.

    Raises:
        CheckpointError: an entry is neither a regular file nor a folder, for example a link or a named pipe.
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
                raise CheckpointError("this is neither a regular file nor a folder", where=entry.path, next_step=EARLIER)
    return names - {MANIFEST}


def _checkpoint_paths(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):  # the folder may be read-only
        _put_back(folder)
    try:
        return _newest_first(folder)
    except OSError as error:
        raise CheckpointError(
            f"the folder of checkpoints cannot be listed: {error}",
            where=folder,
            next_step="make the folder readable, or choose another checkpoint folder",
        ) from error


def _newest_first(folder: Path) -> list[Path]:
    """Return all entries with a checkpoint's name, highest step first. They may be invalid checkpoints."""
    return sorted(_named(folder, ""), key=lambda path: step_of(path.name) or 0, reverse=True)


def _ours(folder: Path, prefix: str) -> list[Path]:
    """Return the folders whose name is `prefix` followed by the name of a checkpoint. Links to folders are not returned."""
    return [path for path in _named(folder, prefix) if stat.S_ISDIR(path.lstat().st_mode)]


def _named(folder: Path, prefix: str) -> list[Path]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [folder / name for name in names if name.startswith(prefix) and step_of(name.removeprefix(prefix)) is not None]


def _is_checkpoint(path: Path) -> bool:
    """Return True if the path is a folder (not a link), and the step in its manifest is the step in its name."""
    try:
        _require_folder(path)
        _manifest(path)
    except CheckpointError:
        return False
    return True


def _require_folder(path: Path) -> None:
    if os.path.islink(path) or not os.path.isdir(path):
        kind = "a symbolic link" if os.path.islink(path) else "a file"
        raise CheckpointError(
            f"this is {kind}, not the folder of a checkpoint", where=path, next_step="move this file or link elsewhere"
        )


def _digests(path: Path, names: list[str]) -> dict[str, str]:
    """Return a dict that maps each file name to its sha256.

    Several threads hash files, because one CPU core hashes more slowly than disks read.
    """
    # hashlib releases the interpreter's lock for large buffers, so threads hash in parallel.
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: sha256_of(path / name, EARLIER), names), strict=True))


def sha256_of(path: Path, next_step: str) -> str:
    """Return the sha256 of a regular file.

    Args:
        path: path of the file.
        next_step: value for the field `next_step` of an error.
    """
    with open_regular(path, CheckpointError, next_step) as file:
        # The annotation in typeshed does not allow BinaryIO.
        return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
