"""Ranks of a Job: torchrun as a subprocess, rank 0 streamed, every rank logged, the first failure named."""

import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hyperion.hardware.cpu import read_cpu
from hyperion.processes.job import INTERRUPTED, Job
from hyperion.processes.notes import log_of, log_of_torchrun
from hyperion.processes.output import Listener, last_lines
from hyperion.processes.refusals import require_launchable
from hyperion.processes.torchrun import Torchrun
from hyperion.processes.verdict import RankError, first_failure, rank_error, timeout_error, waited, waited_in_vain

_STOPPED = 128 + signal.SIGTERM


def run_ranks(
    job: Job,
    on_line: Callable[[str], object] = print,
    on_progress: Callable[[int, int, str], object] = lambda done, total, note: None,
    log_folder: Path | None = None,
) -> list[dict]:
    """Run a job on `job.ranks` ranks under torchrun and return what its entry returned on each, in rank order.

    Each rank is in a process group (`process_group`) when the entry is called. The environment is inherited, except for
    torchrun's own variables. On several nodes each calls this with the same job and gets all answers.

    Args:
        on_line: called with each line that rank 0 prints, on either stream.
        on_progress: called with (done, total, note) for each report_progress of rank 0.
        log_folder: where to keep rank-<n>.log of every rank and torchrun.log; a temporary folder when left out.

    Raises:
        RankError: a rank raised or was killed (the first to fail is named, with its signal or traceback), or the job ran
            past its timeout (where every rank stood). Within seconds of a rank's death no process of the job is left.
        HyperionError: the job cannot work: no such entry, more ranks than devices, a port that is taken. Nothing was
            started.
    """
    require_launchable(job)
    if job.ranks_per_node > (cores := read_cpu().cores):
        on_line(f"WARNING: {job.ranks_per_node} ranks share {cores} cores: they take turns, and their times mean nothing")
    with tempfile.TemporaryDirectory(prefix="hyperion-ranks-") as made:
        folder = Path(made)
        logs = folder / "logs" if log_folder is None else log_folder.resolve()
        logs.mkdir(parents=True, exist_ok=True)
        for earlier in logs.glob("rank-*.log"):
            earlier.unlink()
        torchrun = Torchrun(job, folder, logs, Listener(on_line, on_progress))
        standings = None
        with _sigterm_passed_on(torchrun) as asked:
            try:
                torchrun.start()
                if torchrun.follow(job.timeout_s):
                    torchrun.ask_where_they_stand()
                    standings = torchrun.standings()
            finally:
                torchrun.end()
            place = f"{job.entry}; the ranks' logs are in {logs}" if log_folder else job.entry
            if standings is not None:
                raise timeout_error(job, standings, place)
            answers = torchrun.answers()
            if torchrun.agent.returncode != 0 or answers is None:
                raise _stopped(job) if asked.is_set() and not _saved(torchrun) else _failure(job, torchrun, place)
        return answers


@contextmanager
def _sigterm_passed_on(torchrun: Torchrun) -> Iterator[threading.Event]:
    """A SIGTERM that would end this process at once ends the ranks first: they save. Others' handlers are kept.

    Yields an event that says whether it came.
    """
    asked = threading.Event()
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def pass_on(number, frame) -> None:
        asked.set()
        torchrun.ask_to_end()

    if ours:
        signal.signal(signal.SIGTERM, pass_on)
    try:
        yield asked
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if asked.is_set():
        signal.raise_signal(signal.SIGTERM)  # the ranks were done by then; this process is still asked to end


def _saved(torchrun: Torchrun) -> bool:
    return any(end.raised and end.record["exit_code"] == INTERRUPTED for end in torchrun.ends())


def _stopped(job: Job) -> RankError:
    return RankError(
        f"{job.entry} was stopped by SIGTERM",
        signal="SIGTERM",
        where=f"{job.ranks} ranks",
        next_step="start it again",
        exit_code=_STOPPED,
    )


def _failure(job: Job, torchrun: Torchrun, place: str) -> RankError:
    if refusal := torchrun.refusal():
        return RankError(**refusal)
    end = first_failure(torchrun.ends())
    if end is not None:
        log = log_of(torchrun.logs, end.rank)
        # A rank that fails before it has a log writes into torchrun's.
        log = (log if log.exists() else log_of_torchrun(torchrun.logs)).read_text(errors="replace")
        error = rank_error(job, end, log, place)
        return waited_in_vain(job, error, torchrun.standings()) if waited(end, log) else error
    code = torchrun.agent.returncode
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    tail = last_lines(log_of_torchrun(torchrun.logs).read_text(errors="replace"))
    return RankError(
        f"torchrun, which kept the {job.ranks} ranks of {job.entry}, {cause}\n{tail}",
        where=place,
        next_step="see who ended it; its ranks were ended with it",
        signal=signal.Signals(-code).name if code < 0 else "",
    )
