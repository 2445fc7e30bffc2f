"""How fast are collectives through MPI, and can the MPI library read and write device memory?

mpirun starts the ranks, which call the buffer functions of mpi4py. As in the experiment `collectives`, every rank verifies every
element of its output before and after the timing, and the time of a call is that of its slowest rank.
"""

import contextlib
import ctypes
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.efficiency import Expected
from hyperion.chapter.rows import all_samples, sample_frame, stream_ceiling
from hyperion.chapter.variants import merged, run_on_ranks
from hyperion.errors import HyperionError, not_none
from hyperion.experiments.interconnect.collectives import busbw_limit, timed_rows
from hyperion.hardware.cpu import read_cpu
from hyperion.measure import ALL_COLLECTIVES, Collective, collective_bytes, measure_collective
from hyperion.measure.collectives.collectives import root_of
from hyperion.processes import RankError, World, roll_call, wait_for_peers, world
from hyperion.processes.mpi import why_no_mpi

# Paths of the data. HOST: the tensors are in host memory. STAGED: a GPU tensor is copied to the host before the MPI call, and the
# result is copied back. AWARE: MPI gets the address of the tensor in device memory.
HOST, STAGED, AWARE = "host", "host-staged", "gpu-aware"
# For each kind of GPU: functions of Open MPI and MPICH that return 1 if the library accepts buffers in the memory of such a GPU.
_QUERIES = {"cuda": ("MPIX_Query_cuda_support",), "rocm": ("MPIX_Query_rocm_support", "MPIX_Query_hip_support")}
# Environment variables that enable GPU buffers in Cray MPICH, MPICH, MVAPICH and Intel MPI.
_CRAY = "MPICH_GPU_SUPPORT_ENABLED"
_ENABLING = (_CRAY, "MPIR_CVAR_ENABLE_GPU", "MV2_USE_CUDA", "MV2_USE_ROCM", "I_MPI_OFFLOAD")
_LIMITS = {
    HOST: "no limit: MPI's ranks share a host, and their messages are copies in memory",
    STAGED: "no limit: the bytes pass the link between device and host, whose rate no data sheet states",
}


class MpiCollectivesOptions(Options):
    """Options for the `mpi_collectives` experiment.

    Args:
        dtype: number format of the messages.
        bytes: message sizes in bytes.
        ranks: numbers of ranks to measure. Each number gets its own mpirun.
        time_limit_s: timing budget in seconds for each combination of collective, size and number of ranks.
        hang_timeout_s: if no rank makes progress for this many seconds, report the ranks that are behind.
    """

    dtype: str
    bytes: tuple[int, ...]
    ranks: tuple[int, ...]
    time_limit_s: float
    hang_timeout_s: float


def forecast(context: Context) -> list[Forecast]:
    """Predict the bus bandwidth of the largest messages on a CPU."""
    options, reason = MpiCollectivesOptions.of(context), why_no_mpi()
    dtype = options.dtype
    if reason:
        return [Forecast(*_STAND_IN, None, reason, dtype=dtype)]
    forecasts = []
    for ranks, collective in itertools.product(options.ranks, MPI_COLLECTIVES):
        params = {"bytes": collective_bytes(max(options.bytes), dtype, ranks), "ranks": ranks}
        expected = _expected_busbw(context, collective.name, ranks)
        forecasts.append(expected.forecast(collective.name, "busbw_gb_s", dtype, params))
    return forecasts


def run(context: Context, report: Report) -> Result:
    """Measure all collectives with each number of ranks and on each path.

    If a number of ranks or a path cannot be measured, a row states the reason.
    """
    options, on_cpu = MpiCollectivesOptions.of(context), context.device.kind == "cpu"
    if reason := why_no_mpi():
        return _absent(context, reason)
    results, devices = [], torch.cuda.device_count()
    for ranks in options.ranks:
        if not on_cpu and ranks > devices:
            results.append(_absent(context, f"{ranks} ranks need {ranks} devices, and this machine has {devices}", ranks=ranks))
            continue
        results.append(_run_ranks(context, report, HOST if on_cpu else STAGED, ranks))
        if not on_cpu:
            results.append(_run_aware(context, report, ranks, results[-1].rows[0].params["device_buffers"]))
    return merged(results)


# Variant and metric of the row that states why there is no measurement, for example on machines without MPI.
_STAND_IN = "all_reduce", "busbw_gb_s"
EXPERIMENT = Experiment(forecast, run, options=MpiCollectivesOptions, forecast_reads=("bandwidth",), stand_in=_STAND_IN)


def _expected_busbw(context: Context, name: str, ranks: int) -> Expected:
    """Predict the bus bandwidth on a CPU. All ranks copy at the same time and share the measured memory bandwidth."""
    if context.device.kind != "cpu":
        return Expected(None, None, None, None, "no estimate: no chapter before this one measures copies to the host")
    stream = stream_ceiling(context.upstream)
    if stream is None:
        return Expected(None, None, None, None, "no measured memory bandwidth in this run: run 01_hardware_exploration first")
    at_once = {"all_reduce": ranks, "broadcast": ranks - 1, "reduce": ranks - 1}.get(name, 1)
    low, high = (not_none(stream.value) / traffic / at_once for traffic in (4, 2))
    basis = f"memory moves {stream.value:.3g} GB/s (measured in 1.1), and {at_once} ranks copy at once. A byte is copied once "
    basis += "(2 bytes of traffic) or twice (4 bytes); the estimate is the geometric mean, without the latency and without caches"
    return Expected(None, (low * high) ** 0.5, low, high, basis)


def _absent(context: Context, reason: str, **params) -> Result:
    dtype = MpiCollectivesOptions.of(context).dtype
    return Result([context.absent_row(*_STAND_IN, reason, dtype=dtype, params=params)], pd.DataFrame())


def _run_ranks(context: Context, report: Report, path: str, ranks: int) -> Result:
    """Measure one path with its own mpirun. If a rank fails, the error states the operation during which it failed."""
    operation = "the start of the ranks"

    def progress(done: int, total: int, note: str = "") -> None:
        nonlocal operation
        operation = note
        report(done, total, note)

    # Computed here, because Open MPI binds each rank to one core, so a rank cannot count the cores of the machine.
    params = {"path": path, "oversubscribed": ranks > read_cpu().cores, "enabled": _enabled(os.environ)}
    mpirun = not_none(shutil.which("mpirun"))
    try:
        with contextlib.nullcontext() if path == AWARE else _without_gpu_buffers():
            return run_on_ranks(context, progress, measure_on_rank, params, ranks=ranks, mpirun=mpirun)[0]
    except RankError as error:
        error.where = f"{operation}; {error.where}"
        raise


@contextlib.contextmanager
def _without_gpu_buffers() -> Iterator[None]:
    """Start ranks without support for buffers on GPUs.

    Cray MPICH ends in MPI_Init if this variable asks for GPU support and mpi4py was not linked with its library for GPUs.
    """
    before = os.environ.get(_CRAY)
    if before is not None:
        os.environ[_CRAY] = "0"
    try:
        yield
    finally:
        if before is not None:
            os.environ[_CRAY] = before


def _enabled(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in _ENABLING if environment.get(name, "0") != "0"}


def _run_aware(context: Context, report: Report, ranks: int, stated: str) -> Result:
    """Measure collectives on buffers in device memory, if the MPI library states that it accepts such buffers.

    If a rank fails, a row states the reason. The experiment continues, because the host-staged path does not need this support.
    """
    if not stated:
        reason = f"host-staged only: neither {' nor '.join(_QUERIES[context.device.kind])} nor a variable states GPU support"
        return _absent(context, reason, ranks=ranks, path=AWARE)
    try:
        return _run_ranks(context, report, AWARE, ranks)
    except RankError as error:
        # If a library states GPU support that it does not have, a rank ends with a segmentation fault.
        reason = f"refused: the library states {stated}, but {error.what.splitlines()[0]} ({str(error.where).partition(';')[0]})"
        return _absent(context, reason, ranks=ranks, path=AWARE)


def measure_on_rank(context: Context, report: Report, path: str, oversubscribed: bool, enabled: dict[str, str]) -> Result:
    """Take part in all measurements of one path as one rank. Only rank 0 returns rows.

    `enabled` contains the variables that enable GPU buffers in the environment of the experiment.
    """
    options, here, rows, frames = MpiCollectivesOptions.of(context), world(), [], []
    params = {"backend": library_of(here), "path": path, "oversubscribed": oversubscribed}
    if path != HOST:
        params["device_buffers"] = stated_support(here.device.kind, enabled, _call_library)
    calls = list(itertools.product(MPI_COLLECTIVES, options.bytes))
    with roll_call(options.hang_timeout_s) as roll:
        for done, (collective, size) in enumerate(calls):
            report(done, len(calls), f"{collective.name} {size:,} B, {here.size} ranks, {path}")
            collective = staged(collective) if path == STAGED else collective
            measured = measure_collective(collective, size, options.dtype, here, roll, time_limit_s=options.time_limit_s)
            limit = busbw_limit(here.device, collective, here.size) if path == AWARE else (None, _LIMITS[path])
            rows += timed_rows(context, measured, limit, params)
            identity = {"bytes": measured.bytes, "ranks": here.size} | params
            frames.append(sample_frame(measured.timing, collective.name, options.dtype, identity))
        roll.step("the end of the measurement")
        dist.barrier()
    return Result([], pd.DataFrame()) if here.rank else Result(rows, all_samples(frames))


def library_of(here: World) -> str:
    """Return the name of the backend with the version of the MPI library.

    Raises:
        HyperionError: MPI does not see the ranks that mpirun has started.
    """
    from mpi4py import MPI  # pyright: ignore[reportMissingImports]

    name = " ".join(MPI.Get_library_version().strip("\0").split(",")[0].splitlines()[0].split())
    if (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) != (here.rank, here.size):
        raise HyperionError(
            f"mpirun started {here.size} ranks, but mpi4py is rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}",
            where=f"rank {here.rank}: mpi4py uses {name}, mpirun is {shutil.which('mpirun')}",
            next_step="install mpi4py for this MPI: pip install --no-binary mpi4py mpi4py",
        )
    return f"mpi ({name})"


def stated_support(kind: str, environment: Mapping[str, str], query: Callable[[str], int]) -> str:
    """Return the evidence that the MPI library accepts buffers on this kind of GPU, or "" if there is none.

    The evidence consists of query functions of the library that return 1, and of environment variables that are set. `query`
    takes the name of a function, calls it without arguments, and returns its result, or 0 if the library has no such function.
    """
    found = [f"{name}() = 1" for name in _QUERIES[kind] if query(name)]
    found += [f"{name}={value}" for name, value in _enabled(environment).items()]
    return ", ".join(found)


def _call_library(name: str) -> int:
    # The library is already loaded, but mpi4py may load it without global symbols. So look up its file and open it by path.
    files = sorted(set(re.findall(r"/\S*/libmpi\S*\.so\S*", Path("/proc/self/maps").read_text())))
    return max((getattr(ctypes.CDLL(file), name, int)() for file in files), default=0)


def _call_of(name: str) -> Callable[[Tensor, Tensor], None]:
    """Return a function that runs a collective and passes the memory of the tensors directly to MPI."""

    def call(output: Tensor, given: Tensor) -> None:
        from mpi4py import MPI  # pyright: ignore[reportMissingImports]

        comm, root = MPI.COMM_WORLD, root_of(MPI.COMM_WORLD.size)
        on_root = comm.rank == root
        if output.is_cuda:
            torch.cuda.synchronize()  # MPI does not wait for the kernels that write its buffers
        out, sent = (tensor if tensor.is_cuda else tensor.numpy() for tensor in (output, given))
        calls = {
            "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, out),
            "broadcast": lambda: comm.Bcast(out, root),
            "reduce": lambda: comm.Reduce(MPI.IN_PLACE if on_root else out, out if on_root else None, root=root),
            "scatter": lambda: comm.Scatter(sent if on_root else None, out, root),
            "gather": lambda: comm.Gather(sent, out if on_root else None, root),
        }
        wait_for_peers(calls[name])

    return call


_SCATTER = Collective(
    "scatter",
    "the root's input, of which each rank receives one part",
    lambda n: (n - 1) / n,
    _call_of("scatter"),
    lambda value, rank, ranks, block, index: value(root_of(ranks), rank * block + index),
    whole_output=False,
)
_GATHER = replace(
    ALL_COLLECTIVES["all_gather"], name="gather", size="the root's output", call=_call_of("gather"), only_on_root=True
)
MPI_COLLECTIVES = [replace(ALL_COLLECTIVES[name], call=_call_of(name)) for name in ("all_reduce", "broadcast", "reduce")]
MPI_COLLECTIVES += [_SCATTER, _GATHER]


def staged(collective: Collective) -> Collective:
    """Return a collective that copies its input to the host, runs there, and copies its output back to the device."""

    def call(output: Tensor, given: Tensor) -> None:
        on_root = dist.get_rank() == root_of(dist.get_world_size())
        host_output = output.cpu() if collective.in_place else torch.empty_like(output, device="cpu")
        reads = not collective.in_place and (on_root or collective.name != "scatter")
        collective.call(host_output, given.cpu() if reads else host_output)
        if on_root or not collective.only_on_root:
            output.copy_(host_output)

    return replace(collective, call=call)
