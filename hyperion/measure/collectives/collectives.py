"""Measure the time of collectives, verify every element of their outputs, and measure how they overlap with a computation.

The inputs are integers that differ between ranks and between elements. Their sums are exact in the dtype, so outputs are compared
for equality. This detects a rank that is missing, counted twice or swapped with another rank, and data that is shifted by one
element.

S is the message size in bytes. `Collective.size` says which buffer of a collective has the size S.

Source of the definition of S and of the bus factors: NVIDIA nccl-tests, doc/PERFORMANCE.md.
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
# Limits of the memory that the verification needs. The first value is a limit in bytes. For a message smaller than a chunk, the
# second value times the size of the message is also a limit. This factor is large because each element of 2 bytes needs an index
# of 8 bytes and some temporary values.
_CHECKING_BYTES, _CHECKING_FACTOR = 2 << 30, 64
# Number of rows of the square matrices that the default computation multiplies, by kind of device.
_PRODUCT = {"cpu": 256, "cuda": 4096, "rocm": 4096}
_MOST_PRODUCTS = 1000


class WrongValueError(HyperionError):
    """Raised when the output of a collective has a wrong value on a rank."""

    exit_code = 1


# Newer versions of torch have renamed these functions and warn about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Collective:
    """The description of a collective operation.

    Args:
        name: common name of the collective.
        size: description of the buffer that has the size S, defined as in nccl-tests.
        bus_factor: function that maps the number of ranks to the bus factor, busbw / algbw. The bus factor is the number of bytes
            that cross the link of a rank in one direction, divided by S.
        call: function (output, input) that runs the collective.
        expected: function (value, rank, ranks, block, index) that returns the expected values at `index` of the output of a
            rank, as int64. value(rank, index) returns the input of a rank. `block` is the number of elements in S / ranks bytes.
        sums: whether the collective sums the values of all ranks.
        in_place: whether the output buffer is also the input buffer, so that each call overwrites the input.
        whole_input: True if the input has S bytes on each rank, False if it has S / ranks bytes.
        whole_output: True if the output has S bytes on each rank, False if it has S / ranks bytes.
        only_on_root: whether only the output of the root is defined. The outputs of the other ranks are then not compared.
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
    """Return the root rank of broadcast and reduce, which is the last rank.

    The root is not rank 0, because rank 0 is PyTorch's default. If a library ignored the given root, a test with root 0 would not
    detect this.
    """
    return ranks - 1


def _around_the_ring(output: torch.Tensor, given: torch.Tensor) -> None:
    """Send to the next rank and receive from the previous rank at the same time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Both messages are in one batch. With a blocking send before the receive, all ranks would send first and could deadlock.
    messages = [dist.P2POp(dist.isend, given, (rank + 1) % ranks), dist.P2POp(dist.irecv, output, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(messages):
        wait_for_peers(work.wait)


def _all_to_all_expected(value, rank, ranks, block, index):
    return value(index // block, rank * block + index % block)


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective(
            "all_reduce",
            "the buffer of each rank, which is input and output",
            # Ring: reduce-scatter and all-gather each send (n - 1) / n of the buffer over every link.
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
            "the output of each rank, which contains the inputs of all ranks",
            lambda n: (n - 1) / n,
            _all_gather,
            lambda value, rank, ranks, block, index: value(index // block, index % block),
            whole_input=False,
        ),
        Collective(
            "reduce_scatter",
            "the input of each rank; each rank receives the sum of one part of all inputs",
            lambda n: (n - 1) / n,
            _reduce_scatter,
            lambda value, rank, ranks, block, index: sum(value(peer, rank * block + index) for peer in range(ranks)),
            sums=True,
            whole_output=False,
        ),
        Collective(
            "all_to_all",
            "the input of each rank, which sends one part to every rank",
            lambda n: (n - 1) / n,
            dist.all_to_all_single,
            _all_to_all_expected,
        ),
    )
}


# The collectives that the chapters measure, and two more that training uses for checkpoints and pipelines.
ALL_COLLECTIVES = COLLECTIVES | {
    collective.name: collective
    for collective in (
        Collective(
            "reduce",
            "the input of each rank",
            lambda n: 1.0,
            lambda output, _: dist.reduce(output, root_of(dist.get_world_size())),
            COLLECTIVES["all_reduce"].expected,
            sums=True,
            in_place=True,
            only_on_root=True,
        ),
        Collective(
            "send_recv",
            "the message that each rank sends to the next rank of the ring",
            lambda n: 1.0,
            _around_the_ring,
            lambda value, rank, ranks, block, index: value((rank - 1) % ranks, index),
        ),
    )
}


@dataclass(frozen=True)
class CollectiveMeasurement:
    """The timing of one collective.

    Args:
        collective: the collective.
        dtype: dtype of the elements.
        bytes: message size S in bytes, rounded up so that all ranks have the same whole number of elements.
        ranks: number of ranks.
        timing: seconds of each call on the slowest rank. All ranks have the same values.
        verification: check of the output of this rank after the timed calls.
    """

    collective: Collective
    dtype: str
    bytes: int
    ranks: int
    timing: Timing
    verification: Verification

    def algbw_gb_s(self, seconds: float) -> float:
        """Return the algorithm bandwidth, S / time, in 10⁹ bytes/s."""
        return self.bytes / seconds / 1e9

    def busbw_gb_s(self, seconds: float) -> float:
        """Return the bus bandwidth, algorithm bandwidth x bus factor, in 10⁹ bytes/s.

        It is the rate at which bytes cross the link of a rank in one direction. This is not true if
        a switch does the reduction or the multicast.
        """
        return self.algbw_gb_s(seconds) * self.collective.bus_factor(self.ranks)


def collective_bytes(wanted: int, dtype: str, ranks: int) -> int:
    """Return `wanted` bytes rounded up, so that every rank has the same whole number of elements."""
    element = DTYPES[dtype].itemsize
    return -(-wanted // (element * ranks)) * element * ranks


def memory_needed(size_bytes: int) -> int:
    """Return the maximum memory in bytes that a collective of S bytes needs on a rank for input, output and verification."""
    return 2 * size_bytes + min(_CHECKING_BYTES, _CHECKING_FACTOR * size_bytes)


def measure_collective(
    collective: Collective, size_bytes: int, dtype: str, here: World, roll: RollCall, *, time_limit_s: float = 0.3
) -> CollectiveMeasurement:
    """Verify a collective, time it, and verify its output again. All ranks must call this with the same arguments.

    Args:
        collective: the collective.
        size_bytes: S in bytes. It is rounded up by `collective_bytes`.
        dtype: a key of `DTYPES`.
        here: description of this rank.
        roll: object that receives the name of every collective before the collective starts. Hang reports contain these names.
        time_limit_s: see `time_function`.

    Raises:
        WrongValueError: the output of this rank is wrong.
        HyperionError: there is only one rank, or the sums of all ranks would not be exact in this dtype.
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
    # Report a wrong collective before spending time on its timing.
    buffers.require_exact("before it was timed")
    clock = RanksClock(here, buffers.prepare, roll.step)
    timing = time_function(buffers.call, here.device, cold=False, time_limit_s=time_limit_s, clock=clock)
    verification = buffers.require_exact("after the timed calls")
    return CollectiveMeasurement(collective, dtype, buffers.bytes, here.size, timing, verification)


class Buffers:
    """The input and output buffers of one collective on this rank, with methods to run and to verify the collective."""

    def __init__(self, collective: Collective, size_bytes: int, dtype: str, here: World, roll: RollCall):
        self.collective, self.dtype, self.here, self.roll = collective, dtype, here, roll
        self._values = _values_of(DTYPES[dtype], here.size if collective.sums else 1)
        self.bytes = collective_bytes(size_bytes, dtype, here.size)
        self.block = self.bytes // (DTYPES[dtype].itemsize * here.size)
        self.described = f"{collective.name}, {dtype}, {self.bytes:,} bytes"
        options = {"dtype": DTYPES[dtype], "device": here.device.torch_device}
        self.input = torch.empty(self.block * (here.size if collective.whole_input else 1), **options)
        self.output = torch.empty(self.block * (here.size if collective.whole_output else 1), **options)
        # Only the root holds the data. If the other ranks did too, they would pass the check without receiving anything.
        if collective.name == "broadcast" and here.rank != root_of(here.size):
            self.input.fill_(_POISON)
        else:
            self._fill_input()

    def prepare(self) -> None:
        """Prepare the buffers for the next call.

        For an in-place collective, restore the input. Otherwise, fill the output with a wrong value, so that a call that writes
        nothing is detected.
        """
        if self.collective.in_place:
            self.output.copy_(self.input)
        else:
            self.output.fill_(_POISON)

    def call(self) -> None:
        """Run the collective once."""
        self.roll.step(self.described)
        self.collective.call(self.output, self.input)

    def require_exact(self, when: str) -> Verification:
        """Check that every element of the output equals the expected value.

        Args:
            when: time of the check for the error message, such as "after the timed calls".

        Raises:
            WrongValueError: an element is wrong. The message contains the rank, the index of the first wrong element, its value
                and the expected value.
        """
        if self.here.device.kind != "cpu":
            # If another rank does not take part, this rank waits here. Hang reports recognise a waiting rank by this frame.
            torch.cuda.synchronize(self.here.device.torch_device)
        wrong, first = self.wrong()
        verification = Verification(CHECK, float(wrong), 0.0)
        if first is not None:
            place, actual, expected = first
            raise WrongValueError(
                f"rank {self.here.rank}: {wrong:,} of {self.output.numel():,} values of {self.described} are wrong {when}: "
                f"element {place:,} is {actual:g} instead of {expected:g}",
                where=f"rank {self.here.rank} of {self.here.size}, {self.here.device.name}",
                next_step="run the collective again; if the same rank fails, its device or link may be broken; if another rank "
                "fails, the communication library may be faulty",
            )
        return verification

    def wrong(self) -> tuple[int, tuple[int, float, float] | None]:
        """Compare the output with the expected values.

        Returns:
            The number of wrong elements, and (index, value, expected value) of the first wrong element. The second item is None
            if all elements are correct.
        """
        count, first = 0, None
        if self.collective.only_on_root and self.here.rank != root_of(self.here.size):
            return count, first
        for start in range(0, self.output.numel(), _CHUNK):
            actual = self.output[start : start + _CHUNK]
            index = torch.arange(start, start + actual.numel(), device=actual.device)
            # Every rank can compute the inputs of all other ranks, so the check needs no communication.
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
    """Return a function (rank, index) that returns the input values of a rank, which are pseudo-random integers.

    The integers are at least 1, and so small that the sum of `terms` of them is exact in the dtype. A format with p bits of
    precision can represent every integer up to 2^p, which is 256 for bf16 and 2048 for fp16.

    Raises:
        HyperionError: the sum of `terms` different integers is not exact in this dtype.
    """
    # eps is 2^(1-p), so 2 / eps is 2^p.
    exact = int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max
    values = min(exact // terms, _MOST_VALUES)
    if values < 2:
        raise HyperionError(
            f"{dtype} cannot represent sums of {terms} ranks exactly", where="collectives.Buffers", next_step="use a wider dtype"
        )

    def value(rank, index: torch.Tensor) -> torch.Tensor:
        # The values are hashes of the index, because with a repeating ramp, a shift by one period would not be detected. Source
        # of the hash: Steele et al., SplitMix, OOPSLA 2014.
        mixed = (index + 1 + rank * 0x3C6EF372) * 0x1E3779B97F4A7C15
        mixed = (mixed ^ (mixed >> 30)) * 0x3F58476D1CE4E5B9
        return (mixed ^ (mixed >> 27)).remainder(values) + 1

    return value


# Matches the names of the kernels of NCCL, RCCL and MSCCL.
_KERNEL = re.compile(r"^(?:void )?(\w*(?:nccl|rccl|mscc)\w*Kernel\w*)", re.IGNORECASE)


def kernels_of_collectives(cells: Sequence[tuple[Collective, str, int]], here: World, roll: RollCall) -> list[str] | None:
    """Run each collective once on every rank, and return the names of the kernels.

    Call this function after all timing, because the profiler can slow down later work.

    Args:
        cells: the collectives to run, each as (collective, name of the dtype, S in bytes).
        here: description of this rank.
        roll: object that receives the name of every collective before the collective starts.

    Returns:
        One name for each collective on rank 0. None on the other ranks, on a CPU, and if `kernels_launched` returns None.
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
    """Return the name of the kernel of each call, or None if the profiler did not record exactly one kernel per call.

    Args:
        calls: functions that run one collective each. All ranks must call them. NCCL and RCCL launch one kernel per collective.
        device: a GPU.
    """
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for call in calls:
            call()
            # Kernels of two collectives must not overlap, because kernels are assigned to calls by their order in time.
            torch.cuda.synchronize(device.torch_device)
    on_device = [event for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
    matches = [_KERNEL.match(event.name) for event in sorted(on_device, key=lambda event: event.time_range.start)]
    names = [match[1] for match in matches if match]
    return names if len(names) == len(calls) else None


def algorithm_of(kernel: str, *, switch_may_add: bool) -> str:
    """Return the algorithm of an NCCL kernel, derived from the name of the kernel.

    NCCL has one kernel for the tree algorithm. The kernel for all other algorithms has "RING" in its name. Source: NVIDIA nccl,
    src/device/generate.py, best_kernel.

    Args:
        switch_may_add: whether NCCL may let the switch do the reduction (NVLS).
    """
    if "SendRecv" in kernel or "AlltoAll" in kernel:
        return "messages between pairs"
    if "TREE" in kernel:
        return "tree"
    if "RING" not in kernel:
        return "the kernel's name does not state it"
    return "ring, or by way of the switch (NVLS)" if switch_may_add else "ring"


@dataclass(frozen=True)
class CollectiveOverlap:
    """The times of an all-reduce, of a computation, and of a call that overlaps the two.

    The three calls are timed alternately. Each sample is the time of the slowest rank.

    Args:
        bytes: message size of the all-reduce in bytes.
        dtype: dtype of the all-reduce.
        ranks: number of ranks.
        compute: timing of the computation without the all-reduce.
        collective: timing of the all-reduce without the computation.
        both: timing of the call that overlaps the all-reduce with the computation.
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
        """Saved time divided by the shorter time: (compute + collective - both) / min(compute, collective).

        It is 1 if the overlap hides the shorter operation completely, 0 if it saves no time, and negative if the two operations
        slow each other down by more than the overlap saves.
        """
        return self._estimate(lambda compute, collective, both: (compute + collective - both) / min(compute, collective))

    @property
    def exposed_share(self) -> Estimate:
        """Share of the all-reduce time that the computation does not hide: (both - compute) / collective."""
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
            f"all_reduce of {self.bytes:,} bytes, {self.dtype}, {self.ranks} ranks: {collective} alone; computation: {compute} "
            f"alone; both overlapped: {both}; the overlap hides {share.value:.0%} of the shorter one "
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

    The overlapped call starts the all-reduce with async_op=True, launches the computation, and waits for both. On a GPU, the
    all-reduce runs on a separate stream. On a CPU, the all-reduce runs in the threads of gloo, which also need cores.

    Args:
        size_bytes: S of the all-reduce in bytes. It is rounded up by `collective_bytes`.
        dtype: dtype of the all-reduce, a key of `collectives.DTYPES`.
        here: description of this rank.
        roll: object that receives the name of every collective before the collective starts. Hang reports contain these names.
        compute: function that runs a computation on this rank's device. None means matrix products that take about as long as
            the all-reduce.
        minimum_samples, time_limit_s: see `time_interleaved`.

    Raises:
        WrongValueError: the output of the last overlapped call is wrong on this rank.
        HyperionError: there is only one rank.
    """
    buffers = Buffers(COLLECTIVES["all_reduce"], size_bytes, dtype, here, roll)
    clock = RanksClock(here, buffers.prepare, roll.step)
    compute = compute or _products(here.device, _seconds(buffers.call, here, clock), clock, here)

    def at_once() -> None:
        roll.step(f"{buffers.described}, overlapped with a computation")
        work = cast(dist.Work, dist.all_reduce(buffers.output, async_op=True))  # None only for ranks outside of the group
        compute()
        wait_for_peers(work.wait)

    alone, collective, both = time_interleaved(
        [compute, buffers.call, at_once],
        here.device,
        cold=False,
        minimum_samples=minimum_samples,
        time_limit_s=time_limit_s,
        clock=clock,
    )
    # The overlapped call comes last in each round, so the output is the result of an overlapped call.
    verification = buffers.require_exact("after it overlapped with a computation")
    return CollectiveOverlap(buffers.bytes, dtype, here.size, alone, collective, both, verification)


def _products(device: Device, lasting_s: float, clock: RanksClock, here: World) -> Callable[[], object]:
    """Return a function that computes matrix products for about `lasting_s` seconds.

    The number of products is the same on all ranks, because it is computed from times that are the same on all ranks.
    """
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
    """Return the median time of a call in seconds, from a few samples. The value is the same on all ranks."""
    timing = time_function(function, here.device, cold=False, minimum_samples=10, time_limit_s=0.1, clock=clock)
    return timing.estimate.value
