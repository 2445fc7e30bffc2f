"""The request of a call, the run folder that the call locks, and the run's ledger.

The ledger is a file in the run folder that records which notebooks earlier calls have finished.
"""

import contextlib
import errno
import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from hyperion.errors import HyperionError
from hyperion.forms import read_form
from hyperion.locks import FileLock
from hyperion.paths import expanded, reference_folder
from hyperion.reproduce.machine import MachineProfile
from hyperion.results import Run, StoreError, is_run, new_run_folder
from hyperion.results.execution import LEDGER
from hyperion.results.files import DRIVER_LOCK, LOCK, make_folder
from hyperion.results.places import checked_name
from hyperion.untrusted import inner_path, read_json

NEW = "new"
REPLAY = "replay"
OF_EARLIER_VERSION = "all inputs"
_MIRROR = "HYPERION_DATA_MIRROR"


@dataclass(frozen=True)
class Request:
    """The options of one call of `reproduce`.

    Args:
        profile: auto, smoke, full, study or replay.
        data_source: auto, mirror, cache, download or synthetic.
        only: names of chapters. These chapters and the chapters that they need are run. None runs all chapters.
        run: None continues the newest run with the same setting, or starts a run if there is none. "new" always starts a run. Any
            other value is the name of a run to continue or to start.
        time_budget_s: seconds after which the call stops cleanly. None means no limit.
        seed: seed of all random numbers.
        replay_of: name of the reference machine to replay. None means the first machine that has results of the notebook.
        cell_timeout_s: seconds after which a cell fails. None means the limit of the profile.
        notebook_timeout_s: seconds after which a notebook fails. None means the limit of the profile.
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

    @property
    def command_line(self) -> str:
        """The command that makes this request. It contains only the options that differ from the defaults."""
        words = ["hyperion", "reproduce"]
        for option in fields(self):
            value = getattr(self, option.name)
            if value != option.default:
                words += [f"--{option.name.removesuffix('_s').replace('_', '-')}", str(value)]
        return shlex.join(words)


def require_mirror(request: Request) -> None:
    """If the request uses the mirror, check that the folder named by HYPERION_DATA_MIRROR exists. Called before anything runs.

    Raises:
        HyperionError: the variable does not name a folder.
    """
    named = os.environ.get(_MIRROR)
    if request.data_source not in ("auto", "mirror") or request.profile == REPLAY or not named:
        return
    if not expanded(named).is_dir():
        remedy = f"correct {_MIRROR}, or unset it to use the cache, a download or synthetic data"
        raise HyperionError(f"{_MIRROR} names no folder", where=named, next_step=remedy)


def require_reference(request: Request) -> None:
    """If the request names a reference machine, check that it replays and that the machine exists. Called before anything runs.

    Raises:
        HyperionError: the request does not replay, or there is no such reference.
    """
    if request.replay_of is None:
        return
    if request.profile != REPLAY:
        raise HyperionError(
            f"the profile {request.profile} measures, so it replays no reference",
            where=f"replay_of={request.replay_of}",
            next_step=f"use PROFILE={REPLAY}, or leave REPLAY_OF out",
        )
    known = sorted(path.parent.name for path in reference_folder().glob("*/run.json"))
    if request.replay_of not in known:
        raise HyperionError(
            f"there is no reference run of {request.replay_of!r}",
            where=reference_folder(),
            next_step=f"use REPLAY_OF= with one of: {', '.join(known) or 'there is none yet'}",
        )


def setting_of(request: Request, machine: MachineProfile) -> dict:
    """Return the setting that all notebooks of a run share. A run with another setting is not continued."""
    requested = {"profile": machine.profile, "data_source": request.data_source, "seed": request.seed}
    return requested | {"replay_of": request.replay_of} | machine.setting


@dataclass(frozen=True)
class Entry:
    """The ledger's entry about the latest execution of a notebook.

    Args:
        status: done, unexpected, failed, interrupted or unfinished.
        inputs: hashes of everything on which the result depends, from `freshness.hashed_inputs`.
        seconds: wall time of this execution.
        rows: number of the notebook's rows in the run.
        note: one line about a failure; "" if the notebook did not fail.
        remeasure: whether the next execution must measure all experiments again because a result was unexpected.
        unexpected: one sentence for each unexpected result.
        whole_s: wall time of the latest execution that measured all experiments, which may be an earlier execution.
    """

    status: str
    inputs: dict[str, str]
    seconds: float
    rows: int
    note: str = ""
    remeasure: bool = False
    unexpected: tuple[str, ...] = ()
    whole_s: float | None = None


@dataclass(frozen=True)
class LedgerContent:
    """The content of the ledger file.

    Args:
        setting: the setting that all notebooks of the run share.
        notebooks: a dict that maps the stem (file name without .ipynb) of each notebook to its entry.
        exported: digest of the rows and of the code from which tables and pictures were last exported.
    """

    setting: dict
    notebooks: dict[str, Entry]
    exported: str = ""


class Ledger:
    """The entries of a run's notebooks, and their common setting.

    An entry and the files of its notebook are written in one transaction.
    """

    def __init__(self, run: Run, setting: dict, entries: dict[str, Entry], exported: str = ""):
        self.run, self.setting, self.entries, self.exported = run, setting, entries, exported

    @classmethod
    def new(cls, run: Run, setting: dict) -> "Ledger":
        """Create and store the ledger of a new run."""
        ledger = cls(run, setting, {})
        ledger._write()
        return ledger

    @classmethod
    def of(cls, run: Run) -> "Ledger":
        """Read the ledger of an existing run.

        Raises:
            HyperionError: the ledger was edited or is malformed.
        """
        content = _read_content(run.document(LEDGER))
        return cls(run, content.setting, content.notebooks, content.exported)

    def keep(self, stem: str, entry: Entry, files: dict[str, bytes] | None = None) -> None:
        """Store the entry of a notebook together with its files.

        Args:
            stem: stem of the notebook.
            entry: the new entry.
            files: the executed copy and its HTML page, as a dict that maps a path in the run to the content of the file.
        """
        self.entries[stem] = entry
        self._write(files)

    def keep_exported(self, digest: str) -> None:
        """Store the digest of the rows and the code from which tables and pictures were exported."""
        self.exported = digest
        self._write()

    def is_done(self, stem: str, inputs: dict[str, str]) -> bool:
        """Return True if the notebook finished in this run with these hashes of everything on which its result depends."""
        entry = self.entries.get(stem)
        return entry is not None and (entry.status, entry.inputs) == ("done", inputs)

    def _write(self, files: dict[str, bytes] | None = None) -> None:
        content = asdict(LedgerContent(self.setting, self.entries, self.exported))
        self.run.write({**(files or {}), LEDGER: (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()})


@contextlib.contextmanager
def claimed_run(results: Path, name: str | None, setting: dict, information: dict) -> Iterator[tuple[Ledger, bool]]:
    """Continue an existing run or start a new one, and lock the run until the block ends.

    Args:
        results: folder of all runs.
        name: None continues the newest run with the same setting. "new" starts a run. Any other value is the name of the run.
        setting: profile, data source, seed, device and versions. Runs with another setting are not continued.
        information: content of run.json for a new run.

    Yields:
        The ledger of the run, and whether the run existed before.

    Raises:
        HyperionError: the named run is in use, or it has another setting.
        StoreError: the folder cannot be written, or a file of the existing run was edited.
    """
    make_folder(results)
    if name and name != NEW:
        folder, lock = _claim_named(results / checked_name(name))
    else:
        newest = _claim_newest(results, setting) if name is None else None
        folder, lock = newest or _claim_named(new_run_folder(setting["profile"], results))
    try:
        existed = is_run(folder)
        yield (_continue_run(folder, setting) if existed else _start_run(folder, setting, information)), existed
    finally:
        lock.release()


@contextlib.contextmanager
def claimed_launch(folder: Path) -> Iterator[None]:
    """Lock the run folder of a launch until the block ends. The folder is created if it does not exist.

    If the folder contains no run when the block ends, the folder is removed, unless it contains other files.

    Raises:
        HyperionError: another call measures this launch.
        StoreError: the folder cannot be written.
    """
    make_folder(folder)
    lock = _try_lock(folder)
    if lock is None:
        remedy = "wait until the other call has ended, or choose another name for the launches"
        raise HyperionError("another call measures this launch", where=folder, next_step=remedy)
    try:
        yield
    finally:
        if not is_run(folder):
            _remove_unstarted(folder)
        lock.release()


def why_not_continued(results: Path, setting: dict) -> str:
    """Describe how this setting differs from that of the newest run. Return "" if there is no difference or no run."""
    for path in _newest_first(results):
        with contextlib.suppress(StoreError):  # a damaged run is reported when it would be continued
            return _differences(peek(path.parent).setting, setting)
    return ""


def _differences(before: dict, now: dict) -> str:
    differing = [key for key in now if before.get(key) != now[key]]
    return ", ".join(f"{key} is {before.get(key)!r} there and {now[key]!r} now" for key in differing)


def earlier_seconds(results: Path, setting: dict, stem: str) -> float | None:
    """Return the seconds that a notebook took in an earlier run, or None if they are unknown.

    This is the newest run with this setting in which one execution measured all experiments of the notebook.
    """
    for path in _newest_first(results):
        try:
            ledger = peek(path.parent)
        except StoreError:
            continue  # ignore damaged runs here; only a call that would continue such a run raises an error
        entry = ledger.notebooks.get(stem)
        if ledger.setting == setting and entry is not None and entry.whole_s is not None:
            return entry.whole_s
    return None


def in_use(folder: Path) -> bool:
    """Return True if a running call uses this run folder. On a read-only file system, no call can use it.

    Raises:
        StoreError: the lock file cannot be opened, or it is not a regular file.
    """
    lock = FileLock(folder / DRIVER_LOCK)
    # Without this check, `acquire` would create a lock file in a folder that is only examined.
    if not lock.path.exists():
        return False
    try:
        acquired = lock.acquire(wait=False)
    except OSError as error:
        if error.errno == errno.EROFS:
            return False
        remedy = f"make {DRIVER_LOCK} a regular file that you may write, or use a copy of the run"
        fault = f"cannot find out whether a running call uses this run: {error.strerror}"
        raise StoreError(fault, where=lock.path, next_step=remedy) from error
    lock.release()
    return not acquired


def peek(folder: Path) -> LedgerContent:
    """Read the ledger of a run without verifying the files of the run.

    Raises:
        StoreError: the file is not a valid ledger.
    """
    remedy = "start a new run with RUN=new, or delete that run"
    path = inner_path(folder, LEDGER, StoreError, remedy)
    try:
        return _read_content(read_json(path, StoreError, remedy))
    except (HyperionError, OSError) as error:
        raise StoreError(f"the ledger of the run was edited or is damaged: {error}", where=path, next_step=remedy) from error


def _read_content(document: Any) -> LedgerContent:
    notebooks, setting = (document.get(name) if isinstance(document, dict) else None for name in ("notebooks", "setting"))
    if isinstance(setting, dict):  # version 0.1 did not continue a run without a mirror on a machine with one
        setting.pop("mirror", None)
    for entry in notebooks.values() if isinstance(notebooks, dict) else ():
        if isinstance(entry, dict) and "hash" in entry:  # version 0.1 stored one hash of all inputs
            entry["inputs"] = {OF_EARLIER_VERSION: entry.pop("hash")}
    return cast(LedgerContent, read_form(LedgerContent, document, LEDGER))


def _claim_named(folder: Path) -> tuple[Path, FileLock]:
    make_folder(folder)
    lock = _try_lock(folder)
    if lock is None:
        remedy = "wait until the other call has ended, or use another run: RUN=<name> or RUN=new"
        raise HyperionError("another call is working in this run", where=folder, next_step=remedy)
    return folder, lock


def _claim_newest(results: Path, setting: dict) -> tuple[Path, FileLock] | None:
    """Lock the newest run with this setting that no other call uses, and return its folder and its lock.

    Return None if there is no such run.
    """
    for path in _newest_first(results):
        # Compare the setting before trying the lock, so that runs with another setting are never locked.
        if peek(path.parent).setting == setting and (lock := _try_lock(path.parent)):
            return path.parent, lock
    return None


def _newest_first(results: Path) -> list[Path]:
    """Return the ledger files of all runs, from the newest to the oldest run. A folder without run.json is not a run."""
    runs = [path for path in results.glob("*/run.json") if not path.parent.is_symlink()]
    # run.json is written once, so its time is the start of the run and not its last change.
    newest_first = sorted(runs, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return [path.with_name(LEDGER) for path in newest_first if path.with_name(LEDGER).is_file()]


def _try_lock(folder: Path) -> FileLock | None:
    """Lock a run, or return None if another call holds the lock. The operating system frees the lock when this process ends.

    Raises:
        StoreError: the lock file cannot be created, or it is not a regular file.
    """
    lock = FileLock(folder / DRIVER_LOCK)
    try:
        return lock if lock.acquire(wait=False) else None
    except OSError as error:
        remedy = f"remove {DRIVER_LOCK} if it is not a regular file, make the folder writable, or start a run with RUN=new"
        raise StoreError(f"cannot lock the run: {error.strerror}", where=lock.path, next_step=remedy) from error


def _start_run(folder: Path, setting: dict, information: dict) -> Ledger:
    try:
        return Ledger.new(Run.create(folder, information), setting)
    except BaseException:
        _remove_unstarted(folder)
        raise


def _remove_unstarted(folder: Path) -> None:
    """Remove a folder that contains no run. It is kept if it contains other files than locks, which must not be removed."""
    with contextlib.suppress(OSError):
        for name in (DRIVER_LOCK, LOCK):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _continue_run(folder: Path, setting: dict) -> Ledger:
    run = Run.open(folder)
    try:
        run.verify()
    except HyperionError as error:
        remedy = "start a new run with RUN=new, or restore the file; edited results are never used"
        raise StoreError(f"this run cannot be continued: {error.what}", where=error.where, next_step=remedy) from error
    if not (folder / LEDGER).is_file():
        return Ledger.new(run, setting)
    ledger = Ledger.of(run)
    if values := _differences(ledger.setting, setting):
        raise HyperionError(f"the run has another setting: {values}", where=folder, next_step="name another run, or RUN=new")
    return ledger
