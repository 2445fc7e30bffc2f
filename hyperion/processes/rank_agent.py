"""The rank agent runs torchrun or mpirun on one node. It is a worker process of the kind "agent".

The agent calls torch.distributed.run, or starts mpirun. In addition, it does three things:

- When its launcher ends, the agent ends too, and no process of the job remains.
- If the module of the job cannot be found, the agent reports an error before it starts any rank.
- It records in a file how each rank ended.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from subprocess import Popen

import psutil

from hyperion.errors import HyperionError
from hyperion.garbage import imports_only
from hyperion.hardware.cpu import read_cpu
from hyperion.processes.child_process import (
    GRACE_S,
    child_environment,
    die_with,
    has_ended,
    is_alive,
    kill_session,
    pin_to_cores,
    start,
)
from hyperion.processes.fork_server import ForkedWorker, start_worker
from hyperion.processes.mpi import mpirun_settings, rank_exit_codes
from hyperion.processes.ranks import JobFolder, read_json, torchrun_log, write_json

_POLL_S = 0.1


def main(folder: str, parent: int) -> None:
    """Run the ranks of the job in this folder. The exit code is 0 if all ranks succeeded.

    Args:
        folder: folder for the files that the processes of the job exchange.
        parent: process ID of the parent, with which this process ends.
    """
    files = JobFolder(Path(folder))
    request = read_json(files.request)
    die_with(parent)
    pin_to_cores()
    try:
        require_module(request["entry"].partition(":")[0])
    except HyperionError as error:
        write_json(files.ends, {"error": error.as_dict()})
        sys.exit(error.exit_code)
    # Divide the cores among the ranks, unless the user has set OMP_NUM_THREADS. torchrun would set it to 1 for each rank.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, read_cpu().cores // (request["ranks"] // request["nodes"]))))
    ranks = _Ranks()
    try:
        if request["mpirun"]:
            _run_mpirun(request, files, ranks)
        else:
            _run(arguments(request, folder), files, ranks)
    finally:
        ranks.end()
        if has_ended(request["launcher"]):
            shutil.rmtree(folder, ignore_errors=True)  # remove the folder here, because the launcher has ended


def _run(command: list[str], files: JobFolder, ranks: "_Ranks") -> None:
    with imports_only():
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    # torchrun starts ranks with this method. Replace it, so that each rank has its own session and can be ended together with its
    # child processes.
    SubprocessHandler._popen = lambda handler, args, env: ranks.start(args, env)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        torchrun.main(command)
    except ChildFailedError as failed:
        # The times at which ranks failed are in whole seconds, because torchrun records no fractions.
        ends = {rank: {"code": end.exitcode, "time": end.timestamp} for rank, end in failed.failures.items()}
        write_json(files.ends, {"ends": ends})
        sys.exit(1)
    except SignalException:  # torchrun got SIGTERM and ended the ranks, some with SIGKILL; no rank failed
        raise
    except Exception:
        write_json(files.ends, {"ends": ranks.exit_codes()})
        raise


def _run_mpirun(request: dict, files: JobFolder, ranks: "_Ranks") -> None:
    """Start the ranks with mpirun, and wait until mpirun ends."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, but not in __all__

    # The ranks find each other through a store in this process, as under torchrun. With port 0, the system chooses a free port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    size = str(request["ranks"])
    environment = child_environment() | mpirun_settings(request["ranks"])
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    # SIGTERM must run the `finally` of `main`, which ends mpirun.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    worker = ["rank", str(files.folder), str(os.getpid())]
    before = [request["mpirun"], "-n", size]
    mpirun = start(
        sys.executable, "hyperion.processes.worker", worker, environment, stdout=sys.stdout, new_session=True, before=before
    )
    ranks.processes.append(psutil.Process(mpirun.pid))
    if mpirun.wait():
        log = torchrun_log(Path(request["logs"])).read_text(errors="replace")
        write_json(files.ends, {"ends": {rank: {"code": code} for rank, code in rank_exit_codes(log, files.pids()).items()}})
        sys.exit(1)


class _Ranks:
    """The processes that were started on this node: the ranks, or mpirun. Each process runs in its own session."""

    def __init__(self):
        self.processes: list[psutil.Process] = []
        self._handles: dict[int, Popen[str] | ForkedWorker] = {}

    def start(self, command: tuple[str, ...], environment: dict[str, str]) -> Popen[str] | ForkedWorker:
        """Start a rank with torchrun's command, `python -u -m hyperion.processes.worker arguments`."""
        arguments = list(command[command.index("-m") + 2 :])
        process = start_worker(command[0], arguments, environment, stdout=sys.stdout, new_session=True)
        self._handles[int(environment["RANK"])] = process
        with contextlib.suppress(psutil.NoSuchProcess):
            self.processes.append(psutil.Process(process.pid))
        return process

    def exit_codes(self) -> dict[int, dict]:
        """Return the exit codes of the ranks that ended by themselves, and not because torchrun sent SIGTERM.

        This method is used if torchrun raises an error before it reports the exit codes.
        """
        codes = {rank: handle.poll() for rank, handle in self._handles.items()}
        return {rank: {"code": code} for rank, code in codes.items() if code not in (None, -signal.SIGTERM)}

    def end(self) -> None:
        """End all ranks and their child processes.

        torchrun usually ends its ranks itself, but a second signal interrupts it. When a launcher with several threads is killed,
        Linux sends one SIGTERM per thread. The second SIGTERM ends torchrun while the ranks are still saving their state.
        """
        # Ignore further SIGTERMs, because they must not interrupt the clean-up.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        alive = [rank for rank in self.processes if is_alive(rank)]
        for rank in alive:
            rank.terminate()
        deadline = time.monotonic() + GRACE_S
        while any(map(is_alive, alive)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for rank in self.processes:
            # Child processes of a rank, such as loader workers, are in the session of the rank and end with it.
            kill_session(rank.pid, ours=rank.is_running())


def arguments(request: dict, folder: str) -> list[str]:
    """Return torchrun's command line for a job."""
    # On one host, torchrun chooses a free port itself.
    rendezvous = ["--standalone", "--nnodes=1"]
    if request["rendezvous"]:
        # The nodes of a job find each other by this ID. Different jobs that use the same address have different IDs.
        job = json.dumps([request[key] for key in ("entry", "params", "ranks", "nodes")], sort_keys=True)
        rendezvous = [
            f"--nnodes={request['nodes']}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={request['rendezvous']}",
            f"--rdzv-id={hashlib.sha256(job.encode()).hexdigest()[:16]}",
        ]
    return [
        *rendezvous,
        f"--nproc-per-node={request['ranks'] // request['nodes']}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--log-dir={folder}/torchrun",
        "-m",
        "hyperion.processes.worker",
        "rank",
        folder,
    ]


def require_module(module: str) -> None:
    """Raise a HyperionError if the module cannot be found, without importing it. The ranks import it."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # raised if the package that contains the module is missing
        found = False
    if not found:
        raise HyperionError(
            f"the module {module!r} cannot be found",
            where="function of a job",
            next_step=f"add its folder to PYTHONPATH, so that {sys.executable} finds it",
        )
