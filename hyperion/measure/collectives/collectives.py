"""Measure collectives and ring messages, verify every value of their outputs, and measure their overlap with a computation.

Inputs are integers that differ by rank and element, and whose sums are exact in the dtype. Outputs are therefore compared for
equality, which detects a rank that is missing, counted twice or swapped, and data shifted by one element.

Source of the factors and of what S counts: NVIDIA nccl-tests, doc/PERFORMANCE.md.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.clock.clocks import RanksClock
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, Timing, time_function, time_interleaved
from hyperion.measure.clock.verify import Verification
from hyperion.measure.products.gemm import Gemm
from hyperion.processes import RollCall, World, wait_for_peers
from hyperion.results import Estimate
from hyperion.results.statistics import estimates_of_medians

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int64": torch.int64}
CHECK = "equal to the expected values on every rank"
_POISON = -1
_MOST_VALUES = 1 << 11
_CHUNK = 1 << 24
# Memory for verification: the limit for large messages, and the factor for messages shorter than a chunk (8-byte indices and
# a few temporaries per 2-byte element).
_CHECKING_BYTES, _CHECKING_FACTOR = 2 << 30, 64
# The default computation repeats a product of this many rows and columns.
_PRODUCT = {"cpu": 256, "cuda": 4096, "rocm": 4096}
_MOST_PRODUCTS = 1000


class WrongValueError(HyperionError):
    """Raised when a rank has a wrong output value."""

    exit_code = 1


# Newer versions of torch renamed these functions and warn about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Collective:
    """One collective operation on `ranks` ranks.

    Args:
        name: common name.
        size: what S counts, as in nccl-tests.
        bus_factor: busbw / algbw as a function of the number of ranks: the share of S that crosses a rank's link in one
            direction.
        call: runs the collective, (output, input).
        expected: (value, rank, ranks, block, index) -> int64 values expected at `index` of this rank's output, where
            value(rank, index) is the input of a rank and `block` is S / ranks in elements.
        sums: whether values of all ranks are summed.
        in_place: whether the output is also the input and is overwritten by each call.
        whole_input, whole_output: whether this buffer has S bytes; otherwise S / ranks.
        only_on_root: whether only the root's output is defined and compared.
    """

    name: str
    size: str
    bus_factor: Callable[[int], float]
    call: Callable[[torch.Tensor, torch.Tensor], object]
    expected: Callable
    sums: bool = False
    in_place: bool = False
    whole_input: bool = True
    whole_output: bool = True
    only_on_root: bool = False


def root_of(ranks: int) -> int:
    """Return the root of broadcast and reduce: the last rank, because 0 is the default and would hide a wrong root."""
    return ranks - 1


def _around_the_ring(output: torch.Tensor, given: torch.Tensor) -> None:
    """Send to the next rank and receive from the previous one at the same time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    messages = [dist.P2POp(dist.isend, given, (rank + 1) % ranks), dist.P2POp(dist.irecv, output, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(messages):
        wait_for_peers(work)


def _all_to_all_expected(value, rank, ranks, block, index):
    return value(index // block, rank * block + index % block)


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective(
            "all_reduce",
            "the buffer that each rank gives and gets",
            lambda n: 2 * (n - 1) / n,
            lambda output, _: dist.all_reduce(output),
            lambda value, rank, ranks, block, index: sum(value(peer, index) for peer in range(ranks)),
            sums=True,
            in_place=True,
        ),
        Collective(
            "broadcast",
            "the root's buffer",
            lambda n: 1.0,
            lambda output, _: dist.broadcast(output, root_of(dist.get_world_size())),
            lambda value, rank, ranks, block, index: value(root_of(ranks), index),
            in_place=True,
        ),
        Collective(
            "all_gather",
            "what each rank gets, the parts of all",
            lambda n: (n - 1) / n,
            _all_gather,
            lambda value, rank, ranks, block, index: value(index // block, index % block),
            whole_input=False,
        ),
        Collective(
            "reduce_scatter",
            "what each rank gives, of which it gets one part back summed",
            lambda n: (n - 1) / n,
            _reduce_scatter,
            lambda value, rank, ranks, block, index: sum(value(peer, rank * block + index) for peer in range(ranks)),
            sums=True,
            whole_output=False,
        ),
        Collective(
            "all_to_all",
            "what each rank gives, one part to each",
            lambda n: (n - 1) / n,
            dist.all_to_all_single,
            _all_to_all_expected,
        ),
    )
}


# All collectives: those of the chapters, and two more that training uses for checkpoints and pipelines.
ALL_COLLECTIVES = COLLECTIVES | {
    collective.name: collective
    for collective in (
        Collective(
            "reduce",
            "the buffer that each rank gives",
            lambda n: 1.0,
            lambda output, _: dist.reduce(output, root_of(dist.get_world_size())),
            COLLECTIVES["all_reduce"].expected,
            sums=True,
            in_place=True,
            only_on_root=True,
        ),
        Collective(
            "send_recv",
            "what each rank sends to the next one of a ring",
            lambda n: 1.0,
            _around_the_ring,
            lambda value, rank, ranks, block, index: value((rank - 1) % ranks, index),
        ),
    )
}


@dataclass(frozen=True)
class CollectiveMeasurement:
    """The timing of one verified collective.

    Args:
        bytes: S, rounded up to whole elements for each rank.
        timing: seconds of the slowest rank for each call; the same on all ranks.
        verification: check of this rank's output after the timed calls.
    """

    collective: Collective
    dtype: str
    bytes: int
    ranks: int
    timing: Timing
    verification: Verification

    def algbw_gb_s(self, seconds: float) -> float:
        """Return S / time in 10⁹ bytes/s."""
        return self.bytes / seconds / 1e9

    def busbw_gb_s(self, seconds: float) -> float:
        """Return the bytes that cross a link in one direction / time in 10⁹ bytes/s, if no switch reduces or multicasts."""
        return self.algbw_gb_s(seconds) * self.collective.bus_factor(self.ranks)


def collective_bytes(wanted: int, dtype: str, ranks: int) -> int:
    """Return S for about `wanted` bytes, rounded up so that every rank has the same whole number of elements."""
    element = DTYPES[dtype].itemsize
    return -(-wanted // (element * ranks)) * element * ranks


def memory_needed(size_bytes: int) -> int:
    """Return the most bytes that one collective of S bytes needs on a rank: input, output, and verification."""
    return 2 * size_bytes + min(_CHECKING_BYTES, _CHECKING_FACTOR * size_bytes)


def measure_collective(
    collective: Collective, size_bytes: int, dtype: str, here: World, roll: RollCall, *, time_limit_s: float = 0.3
) -> CollectiveMeasurement:
    """Verify a collective, time it, and verify its output again. All ranks must call this with the same arguments.

    Args:
        size_bytes: S; rounded up by `collective_bytes`.
        dtype: one of `DTYPES`.
        here: this rank.
        roll: receives the name of every collective before it starts, for hang reports.
        time_limit_s: as in `time_function`.

    Raises:
        WrongValueError: the output of this rank is wrong.
        HyperionError: there is only one rank, or there are too many ranks for exact sums in this dtype.
    """
    if here.size < 2:
        raise HyperionError(
            f"a collective needs at least two ranks, not {here.size}",
            where="measure_collective",
            next_step="start two or more ranks",
        )
    buffers = Buffers(collective, size_bytes, dtype, here, roll)
    buffers.prepare()
    buffers.call()
    buffers.require_exact("before it was timed")
    clock = RanksClock(here, buffers.prepare, roll.step)
    timing = time_function(buffers.call, here.device, cold=False, time_limit_s=time_limit_s, clock=clock)
    verification = buffers.require_exact("after the timed calls")
    return CollectiveMeasurement(collective, dtype, buffers.bytes, here.size, timing, verification)


class Buffers:
    """Input and output of one collective on this rank, with its call and its verification."""

    def __init__(self, collective: Collective, size_bytes: int, dtype: str, here: World, roll: RollCall):
        self.collective, self.dtype, self.here, self.roll = collective, dtype, here, roll
        self._values = _values_of(DTYPES[dtype], here.size if collective.sums else 1)
        self.bytes = collective_bytes(size_bytes, dtype, here.size)
        self.block = self.bytes // (DTYPES[dtype].itemsize * here.size)
        self.described = f"{collective.name}, {dtype}, {self.bytes:,} bytes"
        options = {"dtype": DTYPES[dtype], "device": here.device.torch_device}
        self.input = torch.empty(self.block * (here.size if collective.whole_input else 1), **options)
        self.output = torch.empty(self.block * (here.size if collective.whole_output else 1), **options)
        if collective.name == "broadcast" and here.rank != root_of(here.size):
            self.input.fill_(_POISON)
        else:
            self._fill_input()

    def prepare(self) -> None:
        """Restore the input, and poison the output so that an old result cannot pass."""
        if self.collective.in_place:
            self.output.copy_(self.input)
        else:
            self.output.fill_(_POISON)

    def call(self) -> None:
        """Run the collective once."""
        self.roll.step(self.described)
        self.collective.call(self.output, self.input)

    def require_exact(self, when: str) -> Verification:
        """Compare every element of the output.

        Args:
            when: time of the check for the error message.

        Raises:
            WrongValueError: an element is wrong; the message contains the rank, the first such element and both values.
        """
        if self.here.device.kind != "cpu":
            # A rank that waits for a peer waits here; hang reports recognise it by this frame.
            torch.cuda.synchronize(self.here.device.torch_device)
        wrong, first = self.wrong()
        verification = Verification(CHECK, float(wrong), 0.0)
        if first is not None:
            place, actual, expected = first
            raise WrongValueError(
                f"rank {self.here.rank}: {wrong:,} of {self.output.numel():,} values of {self.described} are wrong {when}: "
                f"element {place:,} is {actual:g} instead of {expected:g}",
                where=f"rank {self.here.rank} of {self.here.size}, {self.here.device.name}",
                next_step="run it again: if the same rank fails, suspect its device or link, otherwise the communication library",
            )
        return verification

    def wrong(self) -> tuple[int, tuple[int, float, float] | None]:
        """Return the number of wrong elements, and for the first one its index, its value and the expected value."""
        count, first = 0, None
        if self.collective.only_on_root and self.here.rank != root_of(self.here.size):
            return count, first
        for start in range(0, self.output.numel(), _CHUNK):
            actual = self.output[start : start + _CHUNK]
            index = torch.arange(start, start + actual.numel(), device=actual.device)
            expected = self.collective.expected(self._values, self.here.rank, self.here.size, self.block, index).to(actual.dtype)
            differs = actual != expected
            here = int(differs.sum())
            if here and first is None:
                place = int(differs.nonzero()[0])
                first = start + place, actual[place].item(), expected[place].item()
            count += here
        return count, first

    def _fill_input(self) -> None:
        for start in range(0, self.input.numel(), _CHUNK):
            part = self.input[start : start + _CHUNK]
            part.copy_(self._values(self.here.rank, torch.arange(start, start + part.numel(), device=part.device)))


def _values_of(dtype: torch.dtype, terms: int) -> Callable:
    """Return value(rank, index): pseudo-random integers from 1 on, of which `terms` add up exactly in the dtype.

    A format with p bits of precision represents every integer up to 2^p: 256 in bf16, 2048 in fp16.
    """
    exact = int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max
    values = min(exact // terms, _MOST_VALUES)
    if values < 2:
        raise HyperionError(
            f"{dtype} cannot represent sums of {terms} ranks exactly", where="collectives.Buffers", next_step="use a wider dtype"
        )

    def value(rank, index: torch.Tensor) -> torch.Tensor:
        # A hash: a ramp shifted by its period would look the same. Source: Steele et al., SplitMix, OOPSLA 2014.
        mixed = (index + 1 + rank * 0x3C6EF372) * 0x1E3779B97F4A7C15
        mixed = (mixed ^ (mixed >> 30)) * 0x3F58476D1CE4E5B9
        return (mixed ^ (mixed >> 27)).remainder(values) + 1

    return value


# Names of the kernels of NCCL, RCCL and MSCCL.
_KERNEL = re.compile(r"^(?:void )?(\w*(?:nccl|rccl|mscc)\w*Kernel\w*)", re.IGNORECASE)


def kernels_of_collectives(cells: Sequence[tuple[Collective, str, int]], here: World, roll: RollCall) -> list[str] | None:
    """Run each collective once more on every rank, and return the kernels' names on rank 0 of a GPU, else None.

    Call this after all timing, because a profiler can slow down later work.

    Args:
        cells: (collective, dtype, bytes).
        roll: receives the name of every collective before it starts.
    """

    def call(collective: Collective, dtype: str, size: int) -> None:
        buffers = Buffers(collective, size, dtype, here, roll)
        buffers.prepare()
        buffers.call()

    calls = [partial(call, *cell) for cell in cells]
    if here.rank == 0 and here.device.kind != "cpu":
        return kernels_launched(calls, here.device)
    for one in calls:
        one()
    return None


def kernels_launched(calls: Sequence[Callable[[], object]], device: Device) -> list[str] | None:
    """Return the name of the kernel of each call; None if the profiler did not record exactly one per call.

    Args:
        calls: collectives that all ranks call. NCCL and RCCL launch one kernel per collective.
        device: a GPU.
    """
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for call in calls:
            call()
            torch.cuda.synchronize(device.torch_device)
    on_device = [event for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
    matches = [_KERNEL.match(event.name) for event in sorted(on_device, key=lambda event: event.time_range.start)]
    names = [match[1] for match in matches if match]
    return names if len(names) == len(calls) else None


def algorithm_of(kernel: str, *, switch_may_add: bool) -> str:
    """Return the algorithm of an NCCL kernel, derived from its name.

    NCCL builds one kernel for trees, and one with the name of the ring for all other algorithms. Source: NVIDIA nccl,
    src/device/generate.py, best_kernel.

    Args:
        switch_may_add: whether the library may use the switch (NVLS).
    """
    if "SendRecv" in kernel or "AlltoAll" in kernel:
        return "messages between pairs"
    if "TREE" in kernel:
        return "tree"
    if "RING" not in kernel:
        return "not told by the kernel's name"
    return "ring, or by way of the switch (NVLS)" if switch_may_add else "ring"


@dataclass(frozen=True)
class CollectiveOverlap:
    """The times of an all-reduce and a computation, alone and overlapped; each sample is that of the slowest rank.

    Args:
        bytes: S of the all-reduce.
        dtype: dtype of the all-reduce.
        ranks: number of ranks.
        compute, collective, both: timings, sampled in turn.
        verification: check of the output after the last overlapped call.
    """

    bytes: int
    dtype: str
    ranks: int
    compute: Timing
    collective: Timing
    both: Timing
    verification: Verification

    @property
    def share(self) -> Estimate:
        """(compute + collective - both) / the shorter of the two: 1 if the shorter one is fully hidden, 0 if they run one after
        the other, below 0 if they slow each other down by more than they save."""
        return self._estimate(lambda compute, collective, both: (compute + collective - both) / min(compute, collective))

    @property
    def exposed_share(self) -> Estimate:
        """(both - compute) / collective: the share of the collective that a training step waits for."""
        return self._estimate(lambda compute, collective, both: (both - compute) / collective)

    def _estimate(self, function: Callable[[float, float, float], float]) -> Estimate:
        series = [timing.samples_s for timing in (self.compute, self.collective, self.both)]
        return estimates_of_medians(series, lambda medians: [function(*medians)])[0]

    def __str__(self) -> str:
        compute, collective, both = (
            f"{timing.estimate.value * 1e3:.4g} ms" for timing in (self.compute, self.collective, self.both)
        )
        share = self.share
        return (
            f"all_reduce of {self.bytes:,} bytes, {self.dtype}, {self.ranks} ranks: {collective} alone; computing: {compute} "
            f"alone, {both} together; overlapped {share.value:.0%} of the shorter one "
            f"(95 % CI {share.ci_low:.0%} to {share.ci_high:.0%})"
        )


def measure_overlap(
    size_bytes: int,
    dtype: str,
    here: World,
    roll: RollCall,
    *,
    compute: Callable[[], object] | None = None,
    minimum_samples: int = MINIMUM_SAMPLES,
    time_limit_s: float = 1.0,
) -> CollectiveOverlap:
    """Time an all-reduce that overlaps with a computation. All ranks must call this with the same arguments.

    The overlapped call starts the all-reduce with async_op (on a GPU it runs on a separate stream), launches the computation,
    and waits for both. On a CPU the all-reduce runs in gloo's threads, which also need cores.

    Args:
        size_bytes: S; rounded up to whole elements for every rank.
        dtype: dtype of the all-reduce, one of `collectives.DTYPES`.
        here: this rank.
        roll: receives the name of every collective before it starts, for hang reports.
        compute: a computation on this rank's device; None means matrix products that take about as long as the all-reduce.
        minimum_samples, time_limit_s: as in `time_interleaved`.

    Raises:
        WrongValueError: the sum on this rank is wrong afterwards.
        HyperionError: there is only one rank.
    """
    buffers = Buffers(COLLECTIVES["all_reduce"], size_bytes, dtype, here, roll)
    clock = RanksClock(here, buffers.prepare, roll.step)
    compute = compute or _products(here.device, _seconds(buffers.call, here, clock), clock, here)

    def at_once() -> None:
        roll.step(f"{buffers.described}, overlapped with a computation")
        work = cast(dist.Work, dist.all_reduce(buffers.output, async_op=True))  # None is for ranks outside of the group
        compute()
        wait_for_peers(work)

    alone, collective, both = time_interleaved(
        [compute, buffers.call, at_once],
        here.device,
        cold=False,
        minimum_samples=minimum_samples,
        time_limit_s=time_limit_s,
        clock=clock,
    )
    # The overlapped call is the last of each round, so the output is its result.
    verification = buffers.require_exact("after it overlapped with a computation")
    return CollectiveOverlap(buffers.bytes, dtype, here.size, alone, collective, both, verification)


def _products(device: Device, lasting_s: float, clock: RanksClock, here: World) -> Callable[[], object]:
    """Return matrix products that take about `lasting_s`; their number is the same on all ranks because the times are."""
    size = _PRODUCT[device.kind]
    dtype = "fp32" if device.kind == "cpu" else "bf16"
    product = Gemm(size, size, size, dtype, device)
    count = max(1, min(_MOST_PRODUCTS, round(lasting_s / _seconds(product, here, clock))))

    def compute() -> torch.Tensor:
        for _ in range(count):
            product()
        return product.c_MN

    return compute


def _seconds(function: Callable[[], object], here: World, clock: RanksClock) -> float:
    """Return a quick median in seconds; the same on all ranks."""
    timing = time_function(function, here.device, cold=False, minimum_samples=10, time_limit_s=0.1, clock=clock)
    return timing.estimate.value
