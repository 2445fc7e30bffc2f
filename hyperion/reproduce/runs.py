"""What a call was asked for, and the run folder that it works in: no other live call works in the same folder."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.locks import FileLock
from hyperion.paths import expanded
from hyperion.reproduce.ledger import LEDGER, Ledger, peek
from hyperion.reproduce.machine import MachineProfile
from hyperion.results import Run, StoreError, new_run_folder
from hyperion.results.files import make_folder
from hyperion.results.store import checked_name

NEW = "new"
REPLAY = "replay"
_DRIVER_LOCK = ".driver.lock"
_MIRROR = "HYPERION_DATA_MIRROR"


@dataclass(frozen=True)
class Request:
    """What the caller asked for.

    Args:
        profile: auto, smoke, full, study or replay.
        data_source: auto, mirror, cache, download or synthetic.
        only: one chapter, run with all it needs; None runs the book.
        run: None continues the newest run of this setting, `new` starts one, another name continues or starts that run.
        time_budget_s: stop cleanly after this time; None has no limit.
        cell_timeout_s, notebook_timeout_s: seconds after which a cell or a notebook fails; None takes the profile's.
        seed: seed of all random numbers.
        replay_of: the reference machine to replay; None takes the first that holds the notebook.
    """

    profile: str = "auto"
    data_source: str = "auto"
    only: str | None = None
    run: str | None = None
    time_budget_s: float | None = None
    seed: int = 0
    replay_of: str | None = None
    cell_timeout_s: float | None = None
    notebook_timeout_s: float | None = None


def require_mirror(request: Request) -> None:
    """Check, before anything runs, that the data mirror named by HYPERION_DATA_MIRROR exists if the request uses it.

    Raises:
        HyperionError: it is no folder.
    """
    named = os.environ.get(_MIRROR)
    if request.data_source not in ("auto", "mirror") or request.profile == REPLAY or not named:
        return
    if not expanded(named).is_dir():
        remedy = f"correct {_MIRROR}, or unset it to use the cache, a download or synthetic data"
        raise HyperionError(f"{_MIRROR} names no folder", where=named, next_step=remedy)


def setting_of(request: Request, machine: MachineProfile) -> dict:
    """Return what all notebooks of a run share; a run with another setting is not continued."""
    # `auto` means other data with a mirror than without one.
    mirror = request.data_source in ("auto", "mirror") and bool(os.environ.get(_MIRROR))
    requested = {"profile": machine.profile, "data_source": request.data_source, "mirror": mirror, "seed": request.seed}
    return requested | {"replay_of": request.replay_of} | machine.setting


@contextlib.contextmanager
def claimed_run(results: Path, name: str | None, setting: dict, information: dict) -> Iterator[tuple[Ledger, bool]]:
    """Continue a run or start one, and lock it for the duration of the block.

    Args:
        results: folder of all runs.
        name: None continues the newest run of the same setting; `new` starts one; anything else names the run.
        setting: profile, data source, seed, device and versions; runs of another setting are not continued.
        information: run.json of a new run.

    Yields:
        The run's ledger, and whether the run existed before.

    Raises:
        HyperionError: the named run is in use or has another setting.
        StoreError: the folder cannot be written, or a file of the run to be continued was edited.
    """
    make_folder(results)
    if name and name != NEW:
        folder, lock = _claim_named(results / checked_name(name))
    else:
        newest = _claim_newest(results, setting) if name is None else None
        folder, lock = newest or _claim_named(new_run_folder(setting["profile"], results))
    try:
        existed = (folder / "run.json").is_file()
        yield (_continue_run(folder, setting) if existed else _start_run(folder, setting, information)), existed
    finally:
        lock.release()


def earlier_seconds(results: Path, setting: dict, stem: str) -> float | None:
    """Return a notebook's seconds in the newest run of this setting that measured all of it at once; None without one."""
    for path in _newest_first(results):
        try:
            ledger = peek(path.parent)
        except StoreError:
            continue  # a damaged run is refused where it would be continued, not where a duration is estimated
        entry = ledger["notebooks"].get(stem)
        if ledger["setting"] == setting and entry is not None and entry.get("whole_s") is not None:
            return entry["whole_s"]
    return None


def in_use(folder: Path) -> bool:
    """Return True if a live call works in this run folder."""
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


def _claim_newest(results: Path, setting: dict) -> tuple[Path, FileLock] | None:
    """Return the newest run of this setting that no live call works in."""
    for path in _newest_first(results):
        if peek(path.parent)["setting"] == setting and (lock := _try_lock(path.parent)):
            return path.parent, lock
    return None


def _newest_first(results: Path) -> list[Path]:
    """Return the ledgers of all runs; a folder without run.json is no run."""
    runs = [path for path in results.glob("*/run.json") if not path.parent.is_symlink()]
    newest_first = sorted(runs, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return [path.with_name(LEDGER) for path in newest_first if path.with_name(LEDGER).is_file()]


def _try_lock(folder: Path) -> FileLock | None:
    """Lock a run; None when another call holds the lock. The system frees the lock when this process ends.

    Raises:
        StoreError: the lock file is a link or no regular file, or it cannot be created.
    """
    lock = FileLock(folder / _DRIVER_LOCK)
    try:
        return lock if lock.acquire(wait=False) else None
    except OSError as error:
        remedy = f"remove {_DRIVER_LOCK} if it is no regular file, make the folder writable, or start with RUN=new"
        raise StoreError(f"cannot lock the run: {error.strerror}", where=lock.path, next_step=remedy) from error


def _start_run(folder: Path, setting: dict, information: dict) -> Ledger:
    try:
        return Ledger.new(Run.create(folder, information), setting)
    except BaseException:
        # Leave no folder without a run. rmdir fails, as it should, if the folder holds other files.
        with contextlib.suppress(OSError):
            for name in (_DRIVER_LOCK, ".lock"):
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()
        raise


def _continue_run(folder: Path, setting: dict) -> Ledger:
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
        values = ", ".join(f"{key} {ledger.setting.get(key)!r} there, {setting[key]!r} now" for key in differing)
        raise HyperionError(f"the run has another setting: {values}", where=folder, next_step="name another run, or RUN=new")
    return ledger
