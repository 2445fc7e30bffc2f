"""Two ranks that stay for many tests, for tests of what ranks compute.

Two ranks that train take 15 s of processor time to start, nearly all of it for imports. These start once, and run one function
after the other, each in a process group of its own. They are processes as real as any, but torchrun does not start them and no
launcher watches them: tests/processes is about that, and any test that ends a rank launches its own.
"""

import os
import socket
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from hyperion.processes import Job
from hyperion.processes.child_process import child_environment
from hyperion.processes.job import load_entry
from hyperion.processes.request_worker import RequestWorker, serve_requests

RANKS = 2
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


class StandingRanks:
    """Runs jobs of up to two ranks on the CPU. The processes start with the first job of two ranks."""

    def __init__(self):
        self._workers: list[RequestWorker] = []

    def run(
        self, job: Job, on_line: Callable | None = None, on_progress: Callable | None = None, log_folder: Path | None = None
    ) -> list[dict]:
        """The results of a job in rank order, as `run_ranks` returns them. Lines and progress are not passed on.

        Raises:
            ExceptionGroup: the JobErrors of ranks that raised, ended or were late. The next job gets new processes.
        """
        assert job.ranks in (1, RANKS) and job.nodes == 1
        if job.ranks == 1:
            from hyperion.processes import process_group

            with process_group(backend="gloo"):
                return [load_entry(job.entry)(**job.params)]
        if not self._workers:
            arguments, environment = ["-W", "ignore", "-m", "tests.standing_ranks"], child_environment() | NO_GPU
            self._workers = [RequestWorker(f"rank {rank} of {RANKS}", arguments, environment) for rank in range(RANKS)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # A port for each job, so that no job sees the keys of an earlier one in its store.
        common = child_environment() | NO_GPU | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
        with ThreadPoolExecutor(RANKS) as pool:
            calls = [
                pool.submit(
                    worker.call,
                    "run",
                    job.timeout_s,
                    entry=job.entry,
                    params=job.params,
                    environment=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)},
                )
                for rank, worker in enumerate(self._workers)
            ]
            if any(call.exception() for call in wait(calls, return_when=FIRST_EXCEPTION).done):
                # The first to raise may be the one that lost its peer.
                errors = [call.exception() for call in wait(calls, timeout=2).done]
                self.close()  # the other rank may wait for this one, and so would the end of the block
                raise ExceptionGroup(f"{job.entry} failed", [error for error in errors if error])
        return [call.result()["answer"] for call in calls]

    def close(self) -> None:
        """End the processes."""
        while self._workers:
            self._workers.pop().close()


def run(entry: str, params: dict, environment: dict[str, str]) -> dict:
    """Call the function of a job in a process group of all ranks, with the environment that its test has set."""
    os.environ.clear()
    os.environ.update(environment)
    function = load_entry(entry)  # first, since it imports torch without the garbage collector
    from hyperion.processes import process_group

    with process_group(backend="gloo"):
        return {"answer": function(**params)}


if __name__ == "__main__":
    serve_requests({"run": run})
