"""The command of test_nccl.py: check the results of every collective on every rank, and time the collectives.

The exit code is nonzero if a rank got a wrong value, died or made no progress. The command also prints the topology, the kernels,
the recommended message sizes, and the share of an all_reduce that overlaps with a computation.
"""

import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated

import pandas as pd
import torch
import torch.distributed as dist
import typer

from hyperion.errors import HyperionError
from hyperion.experiments.interconnect.collectives import devices_of, least_free_bytes, switch_can_add, switch_is_off
from hyperion.hardware import detect
from hyperion.hardware.topology import topology_lines
from hyperion.measure import Collective, CollectiveMeasurement, collective_bytes, fit_latency_bandwidth, measure_collective
from hyperion.measure.collectives.collectives import (
    ALL_COLLECTIVES,
    DTYPES,
    algorithm_of,
    kernels_of_collectives,
    measure_overlap,
    memory_needed,
)
from hyperion.measure.collectives.latency_bandwidth import DDP_DEFAULT_MIB, recommended_bucket, share_of_best
from hyperion.processes import Job, RankError, RollCall, World, process_group, roll_call, run_ranks, world
from hyperion.units import GIB, KIB, MIB

CPU_RANKS = 2
_CPU_SIZES, _GPU_SIZES, _GPU_LARGEST = "8,4K,256K,4M", "8,4K,256K,16M,128M,1G", "8G"
_UNITS = {"": 1, "K": KIB, "M": MIB, "G": GIB}
_FAILED = 1
# The timeout of the process group is this many seconds longer than that of the roll call, so that the roll call reports a hang
# first. Only its report names the missing rank.
_AFTER_ROLL_CALL_S = 60.0
# If another rank dies, this rank gets a connection error. It waits this many seconds before it exits, so that torchrun reports
# the dead rank first.
_DEATH_SEEN_S = 3.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Check:
    """The collectives, sizes and formats to check.

    Args:
        sizes: message sizes in bytes. As in nccl-tests, each collective defines which of its buffers has this size. Sizes that
            are too large for the memory of a rank are omitted, with a line in the output for each of them.
        dtypes: names from `DTYPES`.
        timeout_s: seconds without progress after which the missing ranks are reported.
        time_limit_s: time limit in seconds for timing one collective in one format and size. At least 30 calls are always timed.
        largest: size in bytes of one additional all_reduce in the first format. 0 means none.
        overlap: size in bytes of the all_reduce that is timed during a computation. 0 means none.
    """

    sizes: list[int]
    dtypes: list[str]
    timeout_s: float = 60.0
    time_limit_s: float = 0.1
    largest: int = 0
    overlap: int = 0


@app.command()
def command(
    sizes: Annotated[
        str, typer.Option(help="Message sizes in bytes, separated by commas, as 8,4K,16M,1G.", show_default=_GPU_SIZES)
    ] = "",
    dtypes: Annotated[str, typer.Option(help=f"Number formats, separated by commas: {', '.join(DTYPES)}.")] = "fp32,bf16",
    largest: Annotated[
        str,
        typer.Option(help="Size of one additional all_reduce; 0 for none.", show_default=f"{_GPU_LARGEST} on GPUs, 0 on a CPU"),
    ] = "",
    overlap: Annotated[str, typer.Option(help="Size of the all_reduce that is timed during a computation; 0 for none.")] = "4M",
    timeout: Annotated[float, typer.Option(help="Seconds without progress after which the missing ranks are reported.")] = 60.0,
    backend: Annotated[
        str, typer.Option(help="With torchrun: nccl on GPUs, or gloo on the CPU.", show_default="nccl on GPUs, gloo on a CPU")
    ] = "",
    ranks: Annotated[
        int, typer.Option(min=0, help="Without torchrun: number of ranks to start.", show_default="one per GPU, 2 on a CPU")
    ] = 0,
) -> None:
    """Check the results of all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, reduce and send_recv on every rank, and
    time them. Also print how the devices are connected, the algorithm of each collective if the name of its kernel shows it, the
    recommended message sizes, and the part of an all_reduce that overlaps with a computation.

    Start the program with torchrun --standalone --nproc_per_node=4, or with python. With python, it starts the ranks itself. The
    exit code is 0 if every value is right. It is 1 if a rank got a wrong value, died or made no progress; the error message then
    names the rank.
    """
    on_cpu = backend == "gloo" or detect().kind == "cpu"
    check = Check(
        _sizes(sizes or (_CPU_SIZES if on_cpu else _GPU_SIZES)),
        _dtypes(dtypes),
        timeout,
        largest=_size_or_none(largest or ("0" if on_cpu else _GPU_LARGEST)),
        overlap=_size_or_none(overlap),
    )
    try:
        # torchrun sets RANK for every process that it starts.
        if "RANK" in os.environ:
            check_under_torchrun(check, backend=backend or None)
        elif backend:
            raise typer.BadParameter(
                "--backend works only with torchrun: torchrun --standalone --nproc_per_node=2 … --backend gloo"
            )
        else:
            launch(check, ranks or _ranks_here())
    except HyperionError as error:
        print(f"test_nccl: {error}", file=sys.stderr)
        raise typer.Exit(_FAILED if isinstance(error, RankError) else error.exit_code) from error
    if "RANK" in os.environ:
        # On a busy machine, threads of a destroyed gloo group may still run when the interpreter ends, and then C++ aborts the
        # process ("terminate called without an active exception"). The check has ended, so this process ends without them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def launch(check: Check, ranks: int) -> None:
    """Start the ranks on this host and wait until they have ended.

    Raises:
        RankError: a rank failed. The message names the rank.
    """
    run_ranks(Job(on_rank, {"check": asdict(check)}, ranks=ranks))


def on_rank(check: dict) -> dict:
    """Run the check on one of the ranks that `launch` started."""
    return {"checked": check_collectives(Check(**check))}


def check_under_torchrun(
    check: Check, collectives: Mapping[str, Collective] = ALL_COLLECTIVES, backend: str | None = None
) -> int:
    """Join the process group that torchrun's environment variables describe, and run the check.

    Returns:
        The number of measurements; see `check_collectives`.
    """
    with process_group(check.timeout_s + _AFTER_ROLL_CALL_S, backend):
        try:
            return check_collectives(check, collectives)
        except RuntimeError:
            time.sleep(_DEATH_SEEN_S)
            raise


def check_collectives(check: Check, collectives: Mapping[str, Collective] = ALL_COLLECTIVES) -> int:
    """Check and time every collective in every format and size. Rank 0 prints the results.

    Returns:
        The number of measurements. One measurement is one collective in one format and size.

    Raises:
        WrongValueError: this rank got a wrong value. In this case, the other ranks wait until the launcher ends them.
    """
    here, measured, left_out, overlap = world(), [], [], None
    with roll_call(check.timeout_s) as roll:
        roll.step("the exchange of the sizes of free memory")
        free = least_free_bytes(here)
        for collective, dtype, size in _cells(check, collectives, here.size):
            if (needed := memory_needed(size)) > free:
                what = f"{collective.name}, {dtype}, {size:,} bytes"
                # `free` is the same on every rank, so all ranks omit the same collectives, and none waits for a missing rank.
                left_out.append(f"left out: {what} need {_gib(needed)} on every rank, but only {_gib(free)} are free")
                continue
            measured.append(measure_collective(collective, size, dtype, here, roll, time_limit_s=check.time_limit_s))
        if check.overlap and memory_needed(check.overlap) <= free:
            overlap = measure_overlap(check.overlap, check.dtypes[0], here, roll, time_limit_s=3 * check.time_limit_s)
        # Called after all timings, because the profiler slows down calls.
        kernels = _kernels(measured, here, roll)
        # Without this barrier, rank 0 could report success before another rank has found a wrong value.
        roll.step("the barrier after all checks")
        dist.barrier()
    if here.rank == 0:
        _print_results(here, measured)
        for line in (*kernels, *([overlap] if overlap else []), *left_out, _verdict(here, measured, left_out)):
            print(line)
    return len(measured)


def _cells(check: Check, collectives: Mapping[str, Collective], ranks: int) -> list[tuple[Collective, str, int]]:
    """Return all combinations (collective, dtype, bytes) without duplicates. The additional all-reduce comes last."""
    cells = [
        (collective, dtype, collective_bytes(size, dtype, ranks))
        for dtype in check.dtypes
        for size in check.sizes
        for collective in collectives.values()
    ]
    if check.largest and "all_reduce" in collectives:
        dtype = check.dtypes[0]
        cells.append((collectives["all_reduce"], dtype, collective_bytes(check.largest, dtype, ranks)))
    return list(dict.fromkeys(cells))


def _kernels(measured: list[CollectiveMeasurement], here: World, roll: RollCall) -> list[str]:
    """Return one line of text per collective: the kernel that it launches for the largest size, and its algorithm if known."""
    if here.device.kind == "cpu":
        return [f"algorithm: unknown, because {here.backend} does not report it"]
    largest = {m.collective: m for m in sorted(measured, key=lambda m: m.bytes)}
    names = kernels_of_collectives([(c, m.dtype, m.bytes) for c, m in largest.items()], here, roll)
    if names is None:
        return ["algorithm: unknown, because the profiler did not record a kernel for every call"]
    may_add = switch_can_add(here.device) and not switch_is_off()
    return [
        f"{collective.name}, {m.bytes:,} bytes: {name}, {algorithm_of(name, switch_may_add=may_add)}"
        for (collective, m), name in zip(largest.items(), names, strict=True)
    ]


def bucket_lines(measured: Iterable[CollectiveMeasurement]) -> list[str]:
    """Return one line of text per collective with the recommended message size.

    Collectives that were measured with fewer than three sizes are left out.
    """
    sweeps: dict[tuple[str, str], list[CollectiveMeasurement]] = {}
    for one in measured:
        sweeps.setdefault((one.collective.name, one.dtype), []).append(one)
    lines = []
    for (name, dtype), sweep in sweeps.items():
        if len(sweep) < 3:
            continue
        factor = sweep[0].collective.bus_factor(sweep[0].ranks)
        fit = fit_latency_bandwidth([factor * m.bytes / 1e9 for m in sweep], [m.timing.samples_s.tolist() for m in sweep])
        bucket = recommended_bucket(fit, name, factor, [m.bytes for m in sweep])
        lines.append(f"{dtype} {bucket.words(DTYPES[dtype].itemsize)}")
        if name == "all_reduce" and max(m.bytes for m in sweep) >= DDP_DEFAULT_MIB * MIB:
            rates = [m.busbw_gb_s(m.timing.estimate.value) for m in sweep]
            share = share_of_best(DDP_DEFAULT_MIB * MIB, [m.bytes for m in sweep], rates)
            lines[-1] += f"; measured, {DDP_DEFAULT_MIB} MiB reach {share:.0%} of the highest bandwidth"
    return lines


def busbw_table(measured: Iterable[CollectiveMeasurement]) -> pd.DataFrame:
    """Return a table of the bus bandwidths in GB/s, with one row per size and one column per collective."""
    cells = [(m.bytes, m.collective.name, m.busbw_gb_s(m.timing.estimate.value)) for m in measured]
    table = pd.DataFrame(cells, columns=["bytes", "collective", "busbw"])
    pivoted = table.pivot(index="bytes", columns="collective", values="busbw")
    return pivoted.reindex(columns=list(dict.fromkeys(table["collective"])))


def _print_results(here: World, measured: list[CollectiveMeasurement]) -> None:
    print(f"{here.size} ranks, {here.backend}, {here.device.name}, torch {torch.__version__}")
    for line in topology_lines(devices_of(here)):
        print(line)
    for dtype in dict.fromkeys(m.dtype for m in measured):
        table = busbw_table(m for m in measured if m.dtype == dtype)
        table.columns.name = f"{dtype}, busbw GB/s"
        print(table.to_string(float_format=lambda rate: f"{rate:.4g}", na_rep=""))
    for collective in {m.collective.name: m.collective for m in measured}.values():
        print(f"{collective.name}: bytes = {collective.size}; busbw = {collective.bus_factor(here.size):g} x bytes / time")
    for line in bucket_lines(measured):
        print(line)


def _verdict(here: World, measured: list[CollectiveMeasurement], left_out: list[str]) -> str:
    verdict = f"ok: {len(measured)} collectives, every value right on each of {here.size} ranks, before and after the timed calls"
    return verdict + (f"; {len(left_out)} left out, because they are too large for the memory" if left_out else "")


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _ranks_here() -> int:
    ranks = CPU_RANKS if detect().kind == "cpu" else torch.cuda.device_count()
    if ranks < 2:
        raise HyperionError(
            "this machine has one device, and a collective needs two ranks",
            where="test_nccl",
            next_step="use a machine with several devices, or run on the CPU: torchrun --nproc_per_node=2 … --backend gloo",
        )
    return ranks


def _sizes(text: str) -> list[int]:
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)([KMG]?)(iB|B)?", part.strip())
        if match is None or int(match[1]) == 0:
            raise typer.BadParameter(f"{text!r} is not a list of sizes in bytes, such as 8,4K,16M,1G")
        sizes.append(int(match[1]) * _UNITS[match[2]])
    return sizes


def _size_or_none(text: str) -> int:
    return 0 if text.strip() == "0" else _sizes(text)[0]


def _dtypes(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    if unknown := [name for name in names if name not in DTYPES]:
        raise typer.BadParameter(f"unknown dtype {', '.join(unknown)}: use {', '.join(DTYPES)}")
    return names
