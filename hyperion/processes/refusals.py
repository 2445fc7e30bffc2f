"""Jobs on ranks that cannot work, refused before a single process is started."""

import contextlib
import errno
import socket
import threading
from datetime import timedelta

from hyperion.processes.job import Job, JobError

_PROBE_S = 2.0


def require_launchable(job: Job, devices: int | None = None) -> None:
    """Refuse a job whose numbers, devices or port cannot work.

    Args:
        devices: GPUs that PyTorch sees on this node; None counts them. On a CPU (0) any number of ranks may take turns.

    Raises:
        HyperionError: says which, and what to ask for instead.
    """
    _require_numbers(job)
    import torch  # this room is used without it, too

    devices = torch.cuda.device_count() if devices is None else devices
    if devices and job.ranks_per_node > devices:
        from hyperion.processes.group import more_ranks_than_devices

        raise more_ranks_than_devices(job.ranks_per_node, devices)
    if job.rendezvous:
        _require_free_port(job)


def _require_numbers(job: Job) -> None:
    if job.ranks is None or job.ranks < 1:
        raise _refused(job, f"run_ranks was asked for {job.ranks} ranks", "set ranks to 1 or more")
    if job.nodes < 1 or job.ranks % job.nodes:
        raise _refused(job, f"{job.nodes} nodes cannot share {job.ranks} ranks evenly", "set ranks to a multiple of the nodes")
    if job.nodes > 1 and not job.rendezvous:
        raise _refused(job, f"{job.nodes} nodes have no place to meet", 'set rendezvous="host:port", a host all reach')
    if job.rendezvous and not job.rendezvous.rpartition(":")[2].isdigit():
        raise _refused(job, f"{job.rendezvous!r} is no rendezvous", 'write it as "host:port"')
    if job.timeout_s <= 0:
        raise _refused(job, f"a timeout of {job.timeout_s} s", "allow it some seconds")


def _require_free_port(job: Job) -> None:
    """On the host of the rendezvous its port must be free, unless another node's torchrun already waits there."""
    host, _, port = job.rendezvous.rpartition(":")
    host = host.strip("[]")
    try:
        addresses = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, OverflowError) as error:
        raise _refused(job, f"the rendezvous {job.rendezvous} has no address: {error}", "name a host that is reached") from error
    if not all(_can_listen(family, address) for family, _, _, _, address in addresses):
        if job.nodes > 1 and _is_meeting_place(host, int(port)):
            return
        raise _refused(
            job, f"port {port} is taken by another process", "choose another port, or leave the rendezvous out on one node"
        )


def _can_listen(family: int, address: tuple) -> bool:
    """Whether nobody listens there. An address of another host is none of our business."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does: a port just left is free
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _is_meeting_place(host: str, port: int) -> bool:
    """Whether who listens there is torch's store. Asked in a thread: torch waits for ever for an answer of another."""
    import torch.distributed as dist

    met = []

    def meet() -> None:
        with contextlib.suppress(dist.DistError):
            patience = timedelta(seconds=_PROBE_S)
            met.append(dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience))

    meeting = threading.Thread(target=meet, daemon=True, name="hyperion-probe")
    meeting.start()
    meeting.join(_PROBE_S)
    return bool(met)


def _refused(job: Job, what: str, next_step: str) -> JobError:
    return JobError(what, where=f"job {job.entry}", next_step=next_step)
