"""Folders step-00000100/ with a manifest: written whole or not at all, verified by size and sha256 before use.

Whoever saves writes any files into the folder that `saving` yields (one state, or the many files of a sharded
checkpoint); the hashes, the manifest and the rename that makes it a checkpoint happen here.

With a process group up, every rank calls these functions together: rank 0 makes, seals and verifies the folder, and an
error on any rank is raised on all.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from hyperion.checkpoints.ranks import agreed, on_rank_0, rank_and_size
from hyperion.checkpoints.states import EARLIER, CheckpointError
from hyperion.errors import refused_write

MANIFEST = "manifest.json"
FORMAT = "hyperion-checkpoint-2"
UNFINISHED = ".unfinished-"
REPLACED = ".replaced-"
HASHING_THREADS = 8
T = TypeVar("T")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of that step stands."""
    return Path(folder) / f"step-{step:08d}"


@contextmanager
def saving(folder: Path, step: int, keep: int = 2) -> Iterator[Path]:
    """A new folder to write a checkpoint's files into; it becomes folder/step-<step> when the block ends without an
    error on every rank.

    Until then, and after any error, the checkpoints that were there are untouched. Afterwards the newest `keep` remain.
    A folder of checkpoints belongs to one run at a time: what an earlier, killed save left unfinished is removed.

    Within the block each rank writes files of its own. What can fail on one rank while others go on to a collective
    belongs into `agreed` (write_sharded sees to that): the others would wait for the one that left.

    Raises:
        CheckpointError: the folder cannot be written (full disk, no permission), or is not one folder for all ranks;
            names it, the cause and the failing rank.
    """
    if keep < 1 or step < 0:
        raise CheckpointError(
            f"step {step}, keep {keep}", where=folder, next_step="give a step of 0 or more and keep 1 or more"
        )
    folder = Path(folder)
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


def newest_good(folder: Path, read: Callable[[Path], T]) -> T | None:
    """What `read` returns for the newest checkpoint it accepts; stderr names each newer one that it refused, and why.

    Args:
        read: on many ranks it returns on all or raises the same CheckpointError on all, as `verify` and `read_sharded`
            do.

    Returns:
        None when there is no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints, and `read` refused every one.
    """
    refused = []
    for path in on_rank_0(lambda: _found(Path(folder))):
        try:
            return read(path)
        except CheckpointError as error:
            refused.append(error)
            if rank_and_size()[0] == 0:
                print(f"WARNING: checkpoint refused. {error}", file=sys.stderr)
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
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        entries = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        int(manifest["step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the manifest cannot be read ({type(error).__name__}: {error})", where=path / MANIFEST, next_step=EARLIER
        ) from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"format {manifest.get('format')!r} is not {FORMAT}", where=path / MANIFEST, next_step=EARLIER
        )
    present = set(_files(path))
    for name in sorted(present | set(entries)):
        if name not in entries:
            raise CheckpointError("a file that the manifest does not list", where=path / name, next_step=EARLIER)
        if name not in present:
            raise CheckpointError("a file that the manifest lists is missing", where=path / name, next_step=EARLIER)
        size = entries[name][0]
        if (found := (path / name).stat().st_size) != size:
            raise CheckpointError(
                f"{found} bytes instead of {size}: cut off or edited", where=path / name, next_step=EARLIER
            )
    for name, digest in _digests(path, sorted(entries)).items():
        if digest != entries[name][1]:
            raise CheckpointError(
                "the sha256 differs from the manifest's: edited or damaged", where=path / name, next_step=EARLIER
            )
    return manifest


def _begin(new: Path, step: int) -> None:
    """An empty folder to write into; what a killed save left is gone."""
    with _explained(new.parent, step):
        _put_back(new.parent)
        for left_over in new.parent.glob(f"{UNFINISHED}*"):
            shutil.rmtree(left_over)
        new.mkdir(parents=True)


def _put_back(folder: Path) -> None:
    """A checkpoint that was being replaced by one of the same step when the process was killed gets its name again."""
    for replaced in folder.glob(f"{REPLACED}*"):
        target = folder / replaced.name.removeprefix(REPLACED)
        if target.exists():
            shutil.rmtree(replaced)
        else:
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
            error, CheckpointError, where=folder, elsewhere="name another checkpoint folder",
            action=f"the checkpoint of step {step} could not be written",
            kept=f"the checkpoint of step {step} was not written, those before it are untouched",
        ) from error  # fmt: skip


def _finish(new: Path, target: Path, step: int, keep: int) -> None:
    """Vouch for the files, give the folder its name, and remove what it replaces."""
    folder = target.parent
    with _explained(folder, step):
        _seal(new, step)
        replaced = None
        if target.exists():  # the same step again, after a resume: a folder cannot be renamed over another
            replaced = target.rename(folder / f"{REPLACED}{target.name}")
        new.rename(target)
        for place in (folder, folder.parent):  # the folder itself may be new
            _flush(place)
        for old in ([replaced] if replaced else []) + _newest_first(folder)[keep:]:
            shutil.rmtree(old)


def _seal(new: Path, step: int) -> None:
    """Write the manifest of all files below, and force everything to the disk."""
    digests = _digests(new, _files(new))
    files = {name: {"bytes": (new / name).stat().st_size, "sha256": digest} for name, digest in digests.items()}
    manifest = {"format": FORMAT, "step": step, "files": files}
    (new / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in [*new.rglob("*"), new]:
        _flush(path)


def _files(path: Path) -> list[str]:
    """Relative names of all files of a checkpoint but its manifest."""
    names = (file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir())
    return sorted(name for name in names if name != MANIFEST)


def _found(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):  # a folder that may only be read
        _put_back(folder)
    return _newest_first(folder)


def _newest_first(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("step-*") if path.is_dir()), reverse=True)


def _digests(path: Path, names: list[str]) -> dict[str, str]:
    """sha256 by name; several files at once, because one core hashes slower than a disk array reads."""
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: _sha256(path / name), names), strict=True))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """fsync a file, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
