"""Which run folder does this call work in? Its own, whole, and no other live call's."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.locks import FileLock
from hyperion.reproduce.ledger import LEDGER, Ledger, peek
from hyperion.results import Run, StoreError, new_run_folder
from hyperion.results.files import make_folder
from hyperion.results.folders import checked_name

NEW = "new"
_DRIVER_LOCK = ".driver.lock"


@contextlib.contextmanager
def claimed_run(results: Path, name: str | None, setting: dict, information: dict) -> Iterator[tuple[Ledger, bool]]:
    """Continue a run or start one, and keep every other call out of it until the end.

    Args:
        results: folder of all runs.
        name: None continues the newest run of the same setting; `new` starts one; anything else names the run.
        setting: profile, data source, seed, device and versions; runs of another setting are not continued.
        information: run.json of a new run.

    Yields:
        The run's ledger, and whether the run was there before.

    Raises:
        HyperionError: the named run is in use or has another setting.
        StoreError: the folder cannot be written, or a file of the run to be continued was edited.
    """
    make_folder(results)
    if name and name != NEW:
        folder, lock = _claim_named(results / checked_name(name))
    else:
        folder, lock = _claim_newest(results, setting) if name is None else (None, None)
        if folder is None:
            folder = new_run_folder(setting["profile"], results)
            lock = _try_lock(folder)
    try:
        existed = (folder / "run.json").is_file()
        yield (_continued(folder, setting) if existed else _started(folder, setting, information)), existed
    finally:
        lock.release()


def earlier_seconds(results: Path, setting: dict, stem: str) -> float | None:
    """What a notebook took in the newest run of this setting in which one go measured all of it; None without one."""
    for path in _newest_first(results):
        try:
            ledger = peek(path.parent)
        except StoreError:
            continue  # another run's damage: it is refused where that run is to be continued, not where time is guessed
        entry = ledger["notebooks"].get(stem)
        if ledger["setting"] == setting and entry is not None and entry.get("whole_s") is not None:
            return entry["whole_s"]
    return None


def in_use(folder: Path) -> bool:
    """Whether a live call works in this run folder."""
    if not (folder / _DRIVER_LOCK).exists():
        return False
    lock = _try_lock(folder)
    if lock is None:
        return True
    lock.release()
    return False


def _claim_named(folder: Path) -> tuple[Path, FileLock]:
    make_folder(folder)
    lock = _try_lock(folder)
    if lock is None:
        remedy = "wait for it, or choose another name: RUN=<name>, RUN=new"
        raise HyperionError("another call is working in this run", where=folder, next_step=remedy)
    return folder, lock


def _claim_newest(results: Path, setting: dict) -> tuple[Path | None, FileLock | None]:
    """The newest run of this setting that no live call works in."""
    for path in _newest_first(results):
        if peek(path.parent)["setting"] == setting:
            lock = _try_lock(path.parent)
            if lock is not None:
                return path.parent, lock
    return None, None


def _newest_first(results: Path) -> list[Path]:
    """Ledgers of whole runs: a folder that lost its run.json is none."""
    runs = [path for path in results.glob("*/run.json") if not path.parent.is_symlink()]
    newest_first = sorted(runs, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return [path.with_name(LEDGER) for path in newest_first if path.with_name(LEDGER).is_file()]


def _try_lock(folder: Path) -> FileLock | None:
    """A lock that is free again when this process ends, however it ends. None when another call holds it.

    Raises:
        StoreError: the lock file is a link or no regular file, or it cannot be created.
    """
    lock = FileLock(folder / _DRIVER_LOCK)
    try:
        return lock if lock.acquire(wait=False) else None
    except OSError as error:
        remedy = f"remove {_DRIVER_LOCK} if it is no regular file, make the folder writable, or start with RUN=new"
        raise StoreError(f"cannot lock the run: {error.strerror}", where=lock.path, next_step=remedy) from error


def _started(folder: Path, setting: dict, information: dict) -> Ledger:
    try:
        return Ledger.new(Run.create(folder, information), setting)
    except BaseException:
        # A folder without a run in it would only puzzle; what else is in it is not ours.
        with contextlib.suppress(OSError):
            for name in (_DRIVER_LOCK, ".lock"):
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()
        raise


def _continued(folder: Path, setting: dict) -> Ledger:
    run = Run.open(folder)
    try:
        run.verify()
    except HyperionError as error:
        remedy = "start afresh with RUN=new (an edited result is never built upon), or restore the file"
        raise StoreError(f"this run cannot be continued: {error.what}", where=error.where, next_step=remedy) from error
    if not (folder / LEDGER).is_file():
        return Ledger.new(run, setting)
    ledger = Ledger.of(run)
    differing = [key for key in setting if ledger.setting.get(key) != setting[key]]
    if differing:
        told = ", ".join(f"{key} {ledger.setting.get(key)!r} there, {setting[key]!r} now" for key in differing)
        raise HyperionError(f"the run has another setting: {told}", where=folder, next_step="name another run, or RUN=new")
    return ledger
