"""Test the measurement checks: add known errors to real measurements, and require that a check detects each error.

An error that is added on purpose is called a planted fault. Each fault has a clean twin, which is the same measurement without
the fault. The clean twin must pass the check. Otherwise, a check that rejects every measurement would seem to work.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device, GpuFacts, MachineFacts, collect_facts, detect, detect_cpu, gemm_path, lookup, peak
from hyperion.hardware.cpu import OtherLoad
from hyperion.measure.clock.clocks import Clock, WallClock, device_clock
from hyperion.measure.clock.timing import Timing, time_function
from hyperion.measure.clock.verify import Verification
from hyperion.measure.collectives.collectives import COLLECTIVES, Buffers
from hyperion.measure.products.gemm import Gemm
from hyperion.measure.steps.trace import time_step
from hyperion.processes import RollCall, World
from hyperion.results import Estimate, Row
from hyperion.units import GIB

# Type of a function that records, as one line of text, the wrong result that a reader would have seen without the check.
Believe = Callable[[str], None]


@dataclass(frozen=True)
class PlantedFault:
    """One kind of measurement error, and the check that must detect it.

    Args:
        name: name of the error.
        check: name of the check that must detect the error.
        refusal: text that the error message of this check contains. If the message of an exception does not contain it, another
            check raised the exception, and the error does not count as detected.
        plant: function (device, broken, believe) -> None that runs the measurement, with the fault if `broken` is True. It calls
            `believe` with the wrong result that a reader would have seen. If a check rejects the measurement, the exception of
            this check is raised.
    """

    name: str
    check: str
    refusal: str
    plant: Callable[[Device, bool, Believe], None]


@dataclass(frozen=True)
class FaultResult:
    """The result of running a measurement with and without a planted fault.

    Args:
        name: name of the error.
        believed: the wrong result that a reader would have seen.
        check: name of the check that should detect the error.
        caught: whether this check detected the error.
        message: message of the check, or a description of what happened instead.
        twin_passes: whether the same measurement without the fault passed the check.
        twin_message: reason why the measurement without the fault did not pass. "" if it passed.
        seconds: total duration of both measurements.
    """

    name: str
    believed: str
    check: str
    caught: bool
    message: str
    twin_passes: bool
    twin_message: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the check rejects the measurement with the fault and accepts the measurement without it."""
        return self.caught and self.twin_passes


def _run(device: Device, fault: PlantedFault) -> FaultResult:
    started = time.monotonic()
    believed, raised = _measure(device, fault, broken=True)
    # The message must be the expected one, because another check may have raised the exception.
    caught = isinstance(raised, HyperionError) and fault.refusal in raised.what
    _, objection = _measure(device, fault, broken=False)
    return FaultResult(
        fault.name,
        believed,
        fault.check,
        caught,
        "no error raised" if raised is None else _words(raised),
        objection is None,
        "" if objection is None else _words(objection),
        time.monotonic() - started,
    )


def _measure(device: Device, fault: PlantedFault, *, broken: bool) -> tuple[str, Exception | None]:
    """Run the measurement with or without the fault.

    Returns:
        The result that a reader would have seen, and the exception of the check, or None if no exception was raised.
    """
    read: list[str] = []
    try:
        fault.plant(device, broken, read.append)
    except Exception as error:  # any exception is possible; `refusal` tells whether the right check raised it
        return "; ".join(read), error
    return "; ".join(read), None


def _words(error: Exception) -> str:
    return error.what if isinstance(error, HyperionError) else f"{type(error).__name__}: {error}"


_TRIES, _BUSY_SHARE = 3, 0.1
_QUICK_S = 0.05
_WORK_S = 1e-3


class UnsteadyError(HyperionError):
    """Raised when the device was not in a steady state while the samples were taken."""


def require_steady(timing: Timing) -> None:
    """Raise an error if the samples drifted, or if the warm-up reached its time limit; see `Timing.unsteady`."""
    if timing.unsteady:
        raise UnsteadyError(timing.unsteady, next_step="let the device warm up, and lock its clocks if possible")


def _no_synchronisation(device: Device, broken: bool, believe: Believe) -> None:
    queue = Queue(waits=not broken)
    queue.launch()
    believe(f"{queue.one(queue.launch) * 1e6:.0f} us measured for {queue.work_s * 1e6:.0f} us of work")
    time_function(queue.launch, device, cold=False, minimum_samples=20, time_limit_s=_QUICK_S, clock=queue)


def _no_synchronisation_of_a_block(device: Device, broken: bool, believe: Believe) -> None:
    queue = Queue(waits=True)
    clock = QueueBlockClock(device, 10, queue, waits=not broken)
    believe(f"{clock.sample([queue.launch], None, 1)[0][0] * 1e6:.0f} us measured for {queue.work_s * 1e6:.0f} us of work")
    time_function(queue.launch, device, cold=False, minimum_samples=20, time_limit_s=_QUICK_S, clock=clock)


def _no_warm_up(device: Device, broken: bool, believe: Believe) -> None:
    """Time a function whose first calls are up to four times as slow as later calls.

    If `broken` is True, the time limit ends the warm-up too early.
    """
    # The time starts at four times its final value and decays exponentially over 50 calls.
    clock = Scripted(lambda call: _WORK_S * (1 + 3 * np.exp(-call / 50)))
    timing = time_function(lambda: None, device, cold=False, minimum_samples=30, time_limit_s=0.1 if broken else 5.0, clock=clock)
    believe(f"{timing.samples_s.mean() * 1e3:.2f} ms on average, but {_WORK_S * 1e3:.2f} ms after a complete warm-up")
    require_steady(timing)


def _clock_drift(device: Device, broken: bool, believe: Believe) -> None:
    # If `broken` is True, it counts as 1, and the time grows by 20 % in 1000 calls, which exceeds the drift tolerance.
    clock = Scripted(lambda call: _WORK_S * (1 + (broken * call / 5000)))
    timing = time_function(lambda: None, device, cold=False, minimum_samples=1000, time_limit_s=0.1, clock=clock)
    first, last = timing.drift.ends
    believe(
        f"{np.median(timing.samples_s) * 1e3:.3f} ms, although the time rose from {first * 1e3:.3f} ms to {last * 1e3:.3f} ms"
    )
    require_steady(timing)


def _no_flush(clock: Callable[[Device], Clock]) -> Callable[[Device, bool, Believe], None]:
    """Return a function for `PlantedFault.plant`.

    The function times a copy with cold caches. If `broken` is True, the clock does not flush the cache.
    """

    def plant(device: Device, broken: bool, believe: Believe) -> None:
        source = torch.randn(1 << 16, device=device.torch_device)
        target = torch.empty_like(source)
        hot = time_function(lambda: target.copy_(source), device, cold=False, minimum_samples=10, time_limit_s=_QUICK_S)
        believe(
            f"{2 * source.nbytes / np.median(hot.samples_s) / 1e9:.3g} GB/s of the cache, reported as the bandwidth of the memory"
        )
        broken_clock = clock(device) if broken else None
        time_function(lambda: target.copy_(source), device, minimum_samples=10, time_limit_s=_QUICK_S, clock=broken_clock)

    return plant


def _skipped_work(device: Device, broken: bool, believe: Believe) -> None:
    """Time a function. If `broken` is True, three of four calls do no work, as if they returned an earlier result."""
    calls = iter(range(1 << 40))

    def work() -> None:
        call = next(calls)
        if not broken or call % 4 == 0:
            # One of four calls does the work of four calls. So the mean time is correct, and only the median is wrong.
            time.sleep(4 * _WORK_S if broken else _WORK_S)

    believe("a median of almost zero, because most calls return an earlier result")
    time_function(work, device, cold=False, minimum_samples=20, time_limit_s=_QUICK_S)


class _NeverWritten(Gemm):
    """A matrix product that returns without computing its output."""

    def __call__(self) -> torch.Tensor:
        return self.c_MN


class _RoundedProduct(Gemm):
    """A matrix product that claims to compute in float32, but computes in bfloat16."""

    def __call__(self) -> torch.Tensor:
        return self.c_MN.copy_(self.a_MK.bfloat16() @ self.b_KN.bfloat16())


def _product(kind: type[Gemm]) -> Callable[[Device, bool, Believe], None]:
    """Return a function for `PlantedFault.plant`.

    The function measures a matrix product. If `broken` is True, the faulty class `kind` computes the product.
    """

    def plant(device: Device, broken: bool, believe: Believe) -> None:
        product = (kind if broken else Gemm)(128, 128, 128, "fp32", device)
        timing, verification = product.measure(cold=False, time_limit_s=_QUICK_S)
        rate = timing.estimate.map(lambda seconds: product.flops / seconds / 1e12)
        believe(f"{rate.value:.3g} TFLOPS in fp32")
        _row(device, "fp32", rate, verification).validate()

    return plant


def _constant_data(device: Device, broken: bool, believe: Believe) -> None:
    product = Gemm(128, 128, 128, "fp32", device)
    if broken:
        product.a_MK.fill_(1.0)
        product.b_KN.fill_(1.0)
    believe("the rate for operands of ones, labelled as the rate for normal numbers, which draw more power")
    product.measure(cold=False, time_limit_s=_QUICK_S)


def _wrong_flops(device: Device, broken: bool, believe: Believe) -> None:
    product = Gemm(128, 96, 64, "fp32", device)
    if broken:
        product.flops = product.m * product.n * product.k
    believe(f"{product.flops / 1e6:.2f} MFLOP instead of {2 * product.m * product.n * product.k / 1e6:.2f} MFLOP")
    product.measure(cold=False, time_limit_s=_QUICK_S)


def _outside_of_phases(device: Device, broken: bool, believe: Believe) -> None:
    def step(phase) -> None:
        with phase("forward"):
            time.sleep(_WORK_S)
        if broken:
            time.sleep(_WORK_S)

    timing = time_step(step, detect_cpu(), minimum_samples=10, time_limit_s=_QUICK_S)
    inside, whole = (np.median(t.samples_s) * 1e3 for t in (timing.phases["forward"], timing.whole))
    believe(f"phases of {inside:.2f} ms for a step of {whole:.2f} ms")
    _row(device, "fp32", Estimate(1e-9, 1e-9, 1e-9, 10), timing.verification).validate()


def mi250x(compute_units: int, memory_bytes: float, clock_mhz: float) -> Device:
    """Return the description of a device that torch reports as an MI250X, with these properties."""
    gpu = GpuFacts(
        name="AMD Instinct MI250X/MI250",
        total_memory_bytes=int(memory_bytes),
        multi_processor_count=compute_units,
        major=9,
        minor=0,
        gcn_arch_name="gfx90a:sramecc+:xnack-",
        max_clock_mhz=clock_mhz,
    )
    here = collect_facts()
    return detect(MachineFacts(python=here.python, torch=here.torch, cuda=None, hip="7.2", cpu=here.cpu, gpus=(gpu,)))


def _wrong_device(wrong: tuple[int, float, float], said: str) -> Callable[[Device, bool, Believe], None]:
    """Return a function for `PlantedFault.plant`.

    The function looks up the data sheet of one die of an MI250X. If `broken` is True, the device has the properties `wrong`,
    which do not match the data sheet.

    Args:
        wrong: (number of compute units, memory in bytes, clock in MHz).
        said: the result that a reader would have seen.
    """

    def plant(device: Device, broken: bool, believe: Believe) -> None:
        believe(said)
        described = mi250x(*(wrong if broken else (110, 64 * GIB, 1700)))
        sheet, reason = lookup(described)
        if sheet is None:
            raise HyperionError(f"no peak: {reason}")

    return plant


def _above_peak(device: Device, broken: bool, believe: Believe) -> None:
    rate = 300.0 if broken else 150.0
    believe(f"{rate:g} TFLOPS in bf16 on one die of an MI250X")
    die = mi250x(110, 64 * GIB, 1700)
    _row(die, "bf16", Estimate(rate, rate, rate, 30), Verification("float64 slice", 0.0, 1e-3)).validate()


def _zero_reading(device: Device, broken: bool, believe: Believe) -> None:
    believe("a power of 0 W, as if the device needed no power")
    row = _row(device, "fp32", Estimate(1e-9, 1e-9, 1e-9, 30), Verification("float64 slice", 0.0, 1e-3))
    replace(row, power_w=0.0 if broken else None).validate()


def _best_of_one(device: Device, broken: bool, believe: Believe) -> None:
    believe("only the fastest sample, without a confidence interval")
    row = _row(device, "fp32", Estimate(1e-9, 1e-9, 1e-9, 30), Verification("float64 slice", 0.0, 1e-3))
    (replace(row, n=None, ci_low=None, ci_high=None) if broken else row).validate()


def _wrong_rank(device: Device, broken: bool, believe: Believe) -> None:
    """Simulate an all-reduce over two ranks in one process.

    If `broken` is True, one element of the output of rank 1 is too large by 1.
    """
    believe("a bus bandwidth, although rank 1 received a wrong sum")
    sound = COLLECTIVES["all_reduce"]
    ranks = [Buffers(sound, 4096, "bf16", World(rank, 2, rank, "gloo", detect_cpu()), RollCall()) for rank in range(2)]
    total = ranks[0].input + ranks[1].input
    for place, rank in enumerate(ranks):
        rank.output.copy_(total)
        rank.output[7] += broken and place == 1
        rank.require_exact("after the timed calls")


def _row(device: Device, dtype: str, rate: Estimate, verification: Verification) -> Row:
    """Return the result row that holds the rate of a matrix product."""
    limit = peak(device, gemm_path(dtype, device))
    return Row(
        notebook="harness",
        experiment="planted faults",
        variant="torch.mm",
        dtype=dtype,
        metric="gemm_tflops",
        value=rate.value,
        n=rate.n,
        ci_low=rate.ci_low,
        ci_high=rate.ci_high,
        limit=limit.limit_tflops,
        limit_source=limit.limit_source or f"no limit: {limit.reason}",
        check=verification.name,
        check_error=verification.error,
        check_tolerance=verification.tolerance,
    )


# Faulty or simulated clocks. `Scripted` returns times that follow a script. `Queue` and `QueueBlockClock` can stop without
# synchronising. `Unflushed` does not flush the cache.


class Scripted:
    """A clock that measures nothing. Its samples follow a script, with random noise as on an idle machine.

    Args:
        script: function that maps the number of a call (counted from 1) to its seconds.
    """

    def __init__(self, script: Callable[[int], float]):
        self._script, self._calls, self._now_s = script, 0, 0.0
        self._random = np.random.default_rng(0)

    def now(self) -> float:
        return self._now_s

    def in_a_row(self, function: Callable, count: int) -> None:
        """Return None, because no function is run."""

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        series = [[self._next() for _ in range(count)] for _ in functions]
        self._now_s += sum(map(sum, series))
        return series

    def _next(self) -> float:
        self._calls += 1
        return self._script(self._calls) * self._random.normal(1, 0.003)


class Queue:
    """A simulated device and its clock. A call on this device returns before its work is done, as on a GPU.

    Args:
        waits: whether the clock waits for the device at the end of a sample. If False, the clock stops too early.
    """

    # Much longer than the overhead of `launch`, which is about 0.1 ms on a busy machine.
    work_s = 2e-3
    now = staticmethod(time.monotonic)

    def __init__(self, waits: bool):
        self._waits, self._worker = waits, ThreadPoolExecutor(1)
        # A dummy task, so that `wait` works before the first launch.
        self._last: Future = self._worker.submit(int)

    def launch(self) -> None:
        """Submit one unit of work and return."""
        self._last = self._worker.submit(time.sleep, self.work_s)

    def wait(self) -> None:
        """Wait until all submitted work is done."""
        self._last.result()

    def sample(self, functions: list[Callable], flush: Callable | None, count: int) -> list[list[float]]:
        return [[self.one(function) for _ in range(count)] for function in functions]

    def in_a_row(self, function: Callable, count: int) -> float:
        self.wait()
        started = time.perf_counter()
        for _ in range(count):
            function()
        self.wait()
        return (time.perf_counter() - started) / count

    def one(self, function: Callable) -> float:
        """Return the seconds that this clock measures for one call."""
        started = time.perf_counter()
        function()
        if self._waits:
            self.wait()
        return time.perf_counter() - started


class QueueBlockClock(WallClock):
    """A host clock that times blocks of calls on the simulated device `queue`.

    Args:
        waits: whether the clock synchronises at the end of a block. It always synchronises at the start.
    """

    def __init__(self, device: Device, calls: int, queue: Queue, waits: bool):
        super().__init__(device, calls)
        self.synchronize, self._queue, self._waits = self._synchronize, queue, waits
        self._synchronized = 0

    def _synchronize(self) -> None:
        # WallClock synchronises twice for each block: before it and after it.
        at_the_end = self._synchronized % 2 == 1
        self._synchronized += 1
        if self._waits or not at_the_end:
            self._queue.wait()

    def in_a_row(self, function: Callable, count: int) -> float:
        return self._queue.in_a_row(function, count)


class Unflushed:
    """A clock like `device_clock`, but without the cache flush before each sample.

    Args:
        counted: if True, the clock increments the call counter of the flush before each sample, as if the flush had run.
    """

    def __init__(self, device: Device, counted: bool = False):
        self._clock, self._counted = device_clock(device), counted
        self.now, self.in_a_row = self._clock.now, self._clock.in_a_row

    def sample(self, functions: list[Callable], flush: Any, count: int) -> list[list[float]]:
        def count_only() -> None:
            flush.calls += 1

        return self._clock.sample(functions, count_only if flush is not None and self._counted else None, count)


FAULTS: tuple[PlantedFault, ...] = (
    PlantedFault("no synchronisation", "require_whole_work", "calls in a row take", _no_synchronisation),
    PlantedFault(
        "no synchronisation after a block of calls", "require_whole_work", "calls in a row take", _no_synchronisation_of_a_block
    ),
    PlantedFault("no warm-up", "Timing.unsteady", "warm-up's windows still differed", _no_warm_up),
    PlantedFault("no cache flush", "require_flushed", "the cache was flushed 0 times", _no_flush(Unflushed)),
    PlantedFault(
        "a cache flush that reads nothing",
        "require_flushed",
        "did not read its buffer",
        _no_flush(partial(Unflushed, counted=True)),
    ),
    PlantedFault("constant data with a wrong label", "verify_data", "operands are normal", _constant_data),
    PlantedFault("a multiply-add counted as one FLOP", "require_product_flops", "FLOPs are claimed", _wrong_flops),
    PlantedFault("a timed region that skips work", "require_whole_work", "calls in a row take", _skipped_work),
    PlantedFault(
        "an output that is never written", "verify_product, Row.validate", "check_error is nan", _product(_NeverWritten)
    ),
    PlantedFault("bf16 labelled as fp32", "verify_product, Row.validate", "failed its check", _product(_RoundedProduct)),
    PlantedFault("clock drift during sampling", "Timing.drift", "the samples drifted", _clock_drift),
    PlantedFault("work outside of every phase", "time_step, Row.validate", "failed its check", _outside_of_phases),
    PlantedFault(
        "compute units of a whole module instead of one die",
        "specs.lookup",
        "220 compute units, expected 110",
        _wrong_device((220, 128 * GIB, 1700), "383 TFLOPS as the peak of one die, which halves the MFU"),
    ),
    PlantedFault(
        "GB taken for GiB",
        "specs.lookup",
        "GiB of memory, expected 64",
        _wrong_device((110, 64e9, 1700), "59.6 GiB of memory instead of 64 GiB, so batches are 7 % too small"),
    ),
    PlantedFault(
        "kHz taken for MHz",
        "Device",
        "not a clock in MHz",
        _wrong_device((110, 64 * GIB, 1_700_000), "a limit of 191,488 TFLOPS, which no wrong value exceeds"),
    ),
    PlantedFault("a value above the peak", "Row.validate", "beyond its limit", _above_peak),
    PlantedFault("0 instead of an unreadable value", "Row.validate", "power_w is 0", _zero_reading),
    PlantedFault("only the fastest sample", "Row.validate", "lacks n or the 95 % confidence interval", _best_of_one),
    PlantedFault("a rank with wrong values", "Buffers.require_exact", "rank 1: 1 of", _wrong_rank),
)


def run_self_test(device: Device, faults: Iterable[PlantedFault] = FAULTS) -> list[FaultResult]:
    """Run each measurement twice on a device, once with the planted fault and once without it.

    The default faults take about 10 s on a CPU. On a busy machine, a check may fail to distinguish a fault from its clean twin,
    because interruptions by the scheduler look like skipped work to a clock. If this happens while other processes use more than
    a tenth of the cores, both measurements are repeated, at most twice.

    Args:
        device: device for matrix products and copies. Faults that need a particular device use a description of that device.
        faults: faults to plant. `hyperion.doctor.harness.ALL_FAULTS` also contains faults that need a model or result rows.

    Returns:
        One result for each fault, in the same order.
    """
    return [_run_until_distinguished(device, fault) for fault in faults]


def _run_until_distinguished(device: Device, fault: PlantedFault) -> FaultResult:
    for _ in range(_TRIES - 1):
        load = OtherLoad()
        result = _run(device, fault)
        seen = load.shares()
        if result.passed or seen is None or seen.total <= _BUSY_SHARE:
            return result
    return _run(device, fault)
