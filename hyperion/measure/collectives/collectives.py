"""Collectives, and a ring of messages: what each leaves on every rank, value by value, and which bandwidth its time means.

Inputs are whole numbers that differ by rank and by element and whose sums are exact in the format, so the outputs are
compared for equality: a rank left out, counted twice or swapped with another, or data moved by one element, shows.

Source of the factors and of what S counts: NVIDIA nccl-tests, doc/PERFORMANCE.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hyperion.errors import HyperionError
from hyperion.measure.clock.ranks_clock import RanksClock
from hyperion.measure.clock.timing import Timing, time_function
from hyperion.measure.clock.verify import Verification
from hyperion.processes import RollCall, World, wait_for_peers

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int64": torch.int64}
CHECK = "equal to the expected values on every rank"
_POISON = -1
_MOST_VALUES = 1 << 11
_CHUNK = 1 << 24
# Of a message shorter than a stretch: indices of 8 bytes and a handful of numbers made from each, for elements of 2.
_CHECKING_BYTES, _CHECKING_FACTOR = 2 << 30, 64


class WrongValueError(HyperionError):
    """A rank got something else than the collective should have left there."""

    exit_code = 1


# torch gives its tensor forms new names, and warns of the old ones where it has the new.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Collective:
    """One collective operation on `ranks` ranks.

    Args:
        name: the field's.
        size: what the S of its bandwidths counts, as nccl-tests has it.
        bus_factor: busbw / algbw by number of ranks: the share of S that must cross a rank's link in one direction.
        call: does it, (output, input), every rank at once.
        expected: (value, rank, ranks, block, index) -> int64 values that must stand at `index` of this rank's output,
            where value(rank, index) is what a rank put in, and `block` is S / ranks in elements.
        sums: whether values of all ranks are added up.
        in_place: the output is also the input, and is overwritten by each call.
        whole_input, whole_output: whether that buffer has S bytes, or S / ranks.
        only_on_root: whether the others' outputs are undefined, and only the root's is compared.
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
    """Who broadcasts, and who gets what is reduced: the last rank. Where 0 is the default, a mistaken root would not show."""
    return ranks - 1


def _around_the_ring(output: torch.Tensor, given: torch.Tensor) -> None:
    """Every rank sends to the next one and receives from the one before, at the same time."""
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


# The operations of the chapters, and those that training uses beside them: checkpoints and pipelines.
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
    """One verified, timed collective.

    Args:
        bytes: S, rounded up to whole elements for each rank.
        timing: of each call the slowest rank's seconds, the same on all ranks.
        verification: of this rank, before the timed calls and of what the last of them left.
    """

    collective: Collective
    dtype: str
    bytes: int
    ranks: int
    timing: Timing
    verification: Verification

    def algbw_gb_s(self, seconds: float) -> float:
        """S over time."""
        return self.bytes / seconds / 1e9

    def busbw_gb_s(self, seconds: float) -> float:
        """What crosses a link in one direction over time, if no switch adds or copies."""
        return self.algbw_gb_s(seconds) * self.collective.bus_factor(self.ranks)


def collective_bytes(wanted: int, dtype: str, ranks: int) -> int:
    """S for about `wanted` bytes: the same whole number of elements, at least one, for every rank."""
    element = DTYPES[dtype].itemsize
    return -(-wanted // (element * ranks)) * element * ranks


def memory_needed(size_bytes: int) -> int:
    """Bytes that one collective of S bytes takes at most on a rank: input, output, and what checking a stretch of them does."""
    return 2 * size_bytes + min(_CHECKING_BYTES, _CHECKING_FACTOR * size_bytes)


def measure_collective(
    collective: Collective, size_bytes: int, dtype: str, here: World, roll: RollCall, *, time_limit_s: float = 0.3
) -> CollectiveMeasurement:
    """Verify, time, and verify again what the timed calls left. All ranks call it with the same arguments.

    Args:
        size_bytes: S; rounded up by `collective_bytes`.
        dtype: one of `DTYPES`.
        roll: told of every collective that is started.

    Raises:
        WrongValueError: on the rank whose output is wrong.
        HyperionError: a single rank, or more of them than the format can count exactly.
    """
    if here.size < 2:
        raise HyperionError(
            f"{here.size} ranks: a collective takes two", where="measure_collective", next_step="start at least two ranks"
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
    """Input and output of one collective on this rank, the call on them, and the comparison with what must be there."""

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
        """Input as it was, and nothing in the output that could be taken for a result."""
        if self.collective.in_place:
            self.output.copy_(self.input)
        else:
            self.output.fill_(_POISON)

    def call(self) -> None:
        """The collective, once."""
        self.roll.step(self.described)
        self.collective.call(self.output, self.input)

    def require_exact(self, when: str) -> Verification:
        """Compare every element of the output.

        Raises:
            WrongValueError: one of them differs; the message names the rank, the first such element and both values.
        """
        if self.here.device.kind != "cpu":
            # Who waits for a peer waits here: the roll call tells it from one that is elsewhere by this frame.
            torch.cuda.synchronize(self.here.device.torch_device)
        wrong, first = self.wrong()
        verification = Verification(CHECK, float(wrong), 0.0)
        if not verification.passed:
            place, found, due = first
            raise WrongValueError(
                f"rank {self.here.rank}: {wrong:,} of {self.output.numel():,} values of {self.described} are wrong {when}: "
                f"element {place:,} is {found:g} instead of {due:g}",
                where=f"rank {self.here.rank} of {self.here.size}, {self.here.device.name}",
                next_step="run it again; if the rank stays the same, suspect its device or link, else the communication library",
            )
        return verification

    def wrong(self) -> tuple[int, tuple[int, float, float] | None]:
        """How many elements differ, and of the first: its index, what stands there, what should."""
        count, first = 0, None
        if self.collective.only_on_root and self.here.rank != root_of(self.here.size):
            return count, first
        for start in range(0, self.output.numel(), _CHUNK):
            found = self.output[start : start + _CHUNK]
            index = torch.arange(start, start + found.numel(), device=found.device)
            due = self.collective.expected(self._values, self.here.rank, self.here.size, self.block, index).to(found.dtype)
            differs = found != due
            here = int(differs.sum())
            if here and first is None:
                place = int(differs.nonzero()[0])
                first = start + place, found[place].item(), due[place].item()
            count += here
        return count, first

    def _fill_input(self) -> None:
        for start in range(0, self.input.numel(), _CHUNK):
            part = self.input[start : start + _CHUNK]
            part.copy_(self._values(self.here.rank, torch.arange(start, start + part.numel(), device=part.device)))


def _values_of(dtype: torch.dtype, terms: int) -> Callable:
    """value(rank, index): whole numbers from 1 on, scattered, of which `terms` add up exactly in the format.

    A format with p bits of precision holds every whole number up to 2^p: 256 in bf16, 2048 in fp16.
    """
    exact = int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max
    values = min(exact // terms, _MOST_VALUES)
    if values < 2:
        raise HyperionError(
            f"{dtype} cannot add up {terms} ranks exactly", where="collectives.Buffers", next_step="choose a wider format"
        )

    def value(rank, index: torch.Tensor) -> torch.Tensor:
        # A hash, not a ramp: a ramp moved by its period would look the same. Source: Steele et al., SplitMix, OOPSLA 2014.
        mixed = (index + 1 + rank * 0x3C6EF372) * 0x1E3779B97F4A7C15
        mixed = (mixed ^ (mixed >> 30)) * 0x3F58476D1CE4E5B9
        return (mixed ^ (mixed >> 27)).remainder(values) + 1

    return value
