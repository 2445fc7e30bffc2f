"""Run a job on ranks: torchrun as a subprocess, rank 0's output streamed, one log per rank, the root-cause rank in the error."""

import contextlib
import errno
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from hyperion.hardware.cpu import read_cpu
from hyperion.processes.job import INTERRUPTED, Job, JobError, OutputHandler, last_lines
from hyperion.processes.job_folder import rank_log, torchrun_log
from hyperion.processes.rank_errors import (
    RankError,
    collective_timed_out,
    collective_timeout_error,
    first_failure,
    job_timeout_error,
    rank_error,
)
from hyperion.processes.torchrun import Torchrun

_ENDED_BY_SIGTERM = 128 + signal.SIGTERM
_PROBE_S = 2.0


def run_ranks(
    job: Job,
    on_line: Callable[[str], object] = print,
    on_progress: Callable[[int, int, str], object] = lambda done, total, note: None,
    log_folder: Path | None = None,
) -> list[dict]:
    """Run a job on `job.ranks` ranks under torchrun and return what its function returned on each, in rank order.

    Each rank is in a process group (`process_group`) when the function is called. The environment is inherited, except for
    torchrun's own variables. With several nodes, each calls this with the same job and gets the results of all ranks.

    Args:
        on_line: called with each line that rank 0 prints, on either stream.
        on_progress: called with (done, total, note) for each `report_progress` of rank 0.
        log_folder: folder for rank-<n>.log of every rank and torchrun.log; by default a temporary folder.

    Raises:
        RankError: a rank raised or was killed, or the job exceeded its timeout. The error names the first rank to fail with
            its signal or traceback; after a timeout it has the stack of every rank. Within seconds of a rank's death no
            process of the job is left.
        HyperionError: the job cannot run: its module is not found, it has more ranks than devices, or a port is taken. No
            rank was started.
    """
    require_launchable(job)
    if job.ranks_per_node > (cores := read_cpu().cores):
        on_line(f"WARNING: {job.ranks_per_node} ranks share {cores} cores: they take turns, so measured times are meaningless")
    with tempfile.TemporaryDirectory(prefix="hyperion-ranks-") as temporary:
        folder = Path(temporary)
        logs = folder / "logs" if log_folder is None else log_folder.resolve()
        logs.mkdir(parents=True, exist_ok=True)
        for earlier in logs.glob("rank-*.log"):
            earlier.unlink()
        torchrun = Torchrun(job, folder, logs, OutputHandler(on_line, on_progress))
        stacks = None
        with _forward_sigterm(torchrun) as received:
            try:
                torchrun.start()
                if torchrun.follow(job.timeout_s):
                    torchrun.request_stacks()
                    stacks = torchrun.stacks()
            finally:
                torchrun.end()
            where = f"{job.entry}; the ranks' logs are in {logs}" if log_folder else job.entry
            if stacks is not None:
                raise job_timeout_error(job, stacks, where)
            answers = torchrun.answers()
            if torchrun.exit_code != 0 or answers is None:
                raise _sigterm_error(job) if received.is_set() and not _saved(torchrun) else _failure(job, torchrun, where)
        return answers


@contextlib.contextmanager
def _forward_sigterm(torchrun: Torchrun) -> Iterator[threading.Event]:
    """Forward a SIGTERM that would end this process to the ranks, so that they save their state. Yield an event that is set
    when one arrives. A handler that somebody else installed stays.
    """
    received = threading.Event()
    default = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def forward(number, frame) -> None:
        received.set()
        torchrun.terminate()

    if default:
        signal.signal(signal.SIGTERM, forward)
    try:
        yield received
    finally:
        if default:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if received.is_set():
        signal.raise_signal(signal.SIGTERM)  # the ranks have finished, and this process must still end


def _saved(torchrun: Torchrun) -> bool:
    return any(end.error and end.error["exit_code"] == INTERRUPTED for end in torchrun.exits())


def _sigterm_error(job: Job) -> RankError:
    return RankError(
        f"{job.entry} was stopped by SIGTERM",
        signal="SIGTERM",
        where=f"{job.ranks} ranks",
        next_step="start it again",
        exit_code=_ENDED_BY_SIGTERM,
    )


def _failure(job: Job, torchrun: Torchrun, where: str) -> RankError:
    if refusal := torchrun.refusal():
        return RankError(**refusal)
    end = first_failure(torchrun.exits())
    if end is not None:
        log = rank_log(torchrun.logs, end.rank)
        # A rank that fails before it opens its log writes to torchrun's.
        log = (log if log.exists() else torchrun_log(torchrun.logs)).read_text(errors="replace")
        error = rank_error(job, end, log, where)
        return collective_timeout_error(job, error, torchrun.stacks()) if collective_timed_out(end, log) else error
    code = torchrun.exit_code or 0
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    lines = last_lines(torchrun_log(torchrun.logs).read_text(errors="replace"))
    return RankError(
        f"torchrun, the parent of the {job.ranks} ranks of {job.entry}, {cause}\n{lines}",
        where=where,
        next_step="find out what ended it; its ranks were ended with it",
        signal=signal.Signals(-code).name if code < 0 else "",
    )


def require_launchable(job: Job, devices: int | None = None) -> None:
    """Raise if the job's number of ranks, devices or port cannot work, before any process is started.

    Args:
        devices: number of GPUs that PyTorch sees on this node; None counts them. With 0 the ranks share the CPU.

    Raises:
        HyperionError: the message names the setting and what to change.
    """
    _require_numbers(job)
    import torch  # deferred: a job without ranks does not need it

    devices = torch.cuda.device_count() if devices is None else devices
    if devices and job.ranks_per_node > devices:
        from hyperion.processes.group import more_ranks_than_devices

        raise more_ranks_than_devices(job.ranks_per_node, devices)
    if job.rendezvous:
        _require_free_port(job)


def _require_numbers(job: Job) -> None:
    if job.ranks is None or job.ranks < 1:
        raise _job_error(job, f"run_ranks was called with ranks={job.ranks}", "set ranks to 1 or more")
    if job.nodes < 1 or job.ranks % job.nodes:
        raise _job_error(job, f"{job.nodes} nodes cannot share {job.ranks} ranks evenly", "set ranks to a multiple of the nodes")
    if job.nodes > 1 and not job.rendezvous:
        raise _job_error(job, f"{job.nodes} nodes need a rendezvous", 'set rendezvous="host:port", a host that all reach')
    if job.rendezvous and not job.rendezvous.rpartition(":")[2].isdigit():
        raise _job_error(job, f"{job.rendezvous!r} is no rendezvous", 'write it as "host:port"')
    if job.timeout_s <= 0:
        raise _job_error(job, f"the timeout is {job.timeout_s} s", "set timeout_s above 0")


def _require_free_port(job: Job) -> None:
    """Raise if the rendezvous port of this host is taken by something other than another node's torchrun."""
    host, _, port = job.rendezvous.rpartition(":")
    host = host.strip("[]")
    try:
        addresses = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, OverflowError) as error:
        raise _job_error(
            job, f"the rendezvous {job.rendezvous} has no address: {error}", "name a host that can be reached"
        ) from error
    if not all(_is_free(family, address) for family, _, _, _, address in addresses):
        if job.nodes > 1 and _is_torch_store(host, int(port)):
            return
        raise _job_error(job, f"port {port} is taken by another process", "choose another port, or omit rendezvous on one node")


def _is_free(family: int, address: tuple) -> bool:
    """Return True if the local port is free; remote addresses are not checked."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does: a port that was just closed is free
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _is_torch_store(host: str, port: int) -> bool:
    """Return True if torch's store listens there. A thread asks: torch never stops waiting for another server's answer."""
    import torch.distributed as dist

    from hyperion.processes.group import connect_store

    stores = []

    def connect() -> None:
        with contextlib.suppress(dist.DistError):
            stores.append(connect_store(host, port, _PROBE_S))

    probe = threading.Thread(target=connect, daemon=True, name="hyperion-probe")
    probe.start()
    probe.join(_PROBE_S)
    return bool(stores)


def _job_error(job: Job, what: str, next_step: str) -> JobError:
    return JobError(what, where=f"job {job.entry}", next_step=next_step)
