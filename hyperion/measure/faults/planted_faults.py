"""Test the checks: plant known measurement errors into real measurements, and require that a check detects each of them.

Each fault has a clean twin, the same measurement without the fault, which must pass: a check that rejects everything proves
nothing.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device, GpuFacts, MachineFacts, collect_facts, detect, detect_cpu, gemm_path, lookup, peak
from hyperion.measure.clock.clocks import Clock
from hyperion.measure.clock.step import time_step
from hyperion.measure.clock.timing import Timing, time_function
from hyperion.measure.clock.verify import Verification
from hyperion.measure.collectives.collectives import COLLECTIVES, Buffers
from hyperion.measure.faults.broken_clocks import Block, Queue, Scripted, Unflushed, Unread
from hyperion.measure.products.gemm import Gemm
from hyperion.processes import RollCall, World
from hyperion.results import Estimate, Row
from hyperion.units import GIB

# Receives the wrong number that a reader would have seen.
Believe = Callable[[str], None]


@dataclass(frozen=True)
class Fault:
    """One kind of measurement error.

    Args:
        name: the error.
        check: the check that detects it.
        refusal: text in the message of this check. An error without this text does not count as detected.
        plant: (device, broken, believe) -> None; runs the measurement, with the fault if `broken`. It raises the error of the
            check and passes the number that a reader would have seen to `believe`.
    """

    name: str
    check: str
    refusal: str
    plant: Callable[[Device, bool, Believe], None]


@dataclass(frozen=True)
class FaultResult:
    """The result of a planted fault.

    Args:
        name: the error.
        believed: the number that a reader would have seen.
        check: the check that should detect it.
        caught: whether the check detected it.
        message: the message of the check, or what happened instead.
        twin_passes: whether the measurement without the fault passed.
        twin_message: why it did not pass, else "".
        seconds: duration of both.
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
        """Whether the check rejects the fault and accepts its twin."""
        return self.caught and self.twin_passes


def run_faults(device: Device, faults: Iterable[Fault]) -> list[FaultResult]:
    """Run each fault and its twin."""
    return [_run(device, fault) for fault in faults]


def _run(device: Device, fault: Fault) -> FaultResult:
    started = time.monotonic()
    believed, raised = _measure(device, fault, broken=True)
    caught = isinstance(raised, HyperionError) and fault.refusal in raised.what
    _, objection = _measure(device, fault, broken=False)
    return FaultResult(
        fault.name,
        believed,
        fault.check,
        caught,
        "nothing objected" if raised is None else _words(raised),
        objection is None,
        "" if objection is None else _words(objection),
        time.monotonic() - started,
    )


def _measure(device: Device, fault: Fault, *, broken: bool) -> tuple[str, Exception | None]:
    """Return what a reader would have seen, and the exception or None."""
    read: list[str] = []
    try:
        fault.plant(device, broken, read.append)
    except Exception as error:  # a fault can raise anything; `refusal` decides whether it was the right check
        return "; ".join(read), error
    return "; ".join(read), None


def _words(error: Exception) -> str:
    return error.what if isinstance(error, HyperionError) else f"{type(error).__name__}: {error}"


_QUICK_S = 0.05
_WORK_S = 1e-3


class UnsteadyError(HyperionError):
    """Raised when samples are not of one steady state."""


def require_steady(timing: Timing) -> None:
    """Raise if `Timing.unsteady` gives a reason."""
    if timing.unsteady:
        raise UnsteadyError(timing.unsteady, next_step="let the device warm up, and lock its clocks if possible")


def _no_synchronisation(device: Device, broken: bool, believe: Believe) -> None:
    queue = Queue(waits=not broken)
    queue.launch()
    believe(f"{queue.one(queue.launch) * 1e6:.0f} us for {queue.work_s * 1e6:.0f} us of work")
    time_function(queue.launch, device, cold=False, minimum_samples=20, time_limit_s=_QUICK_S, clock=queue)


def _no_synchronisation_of_a_block(device: Device, broken: bool, believe: Believe) -> None:
    queue = Queue(waits=True)
    clock = Block(device, 10, queue, waits=not broken)
    believe(f"{clock.sample([queue.launch], None, 1)[0][0] * 1e6:.0f} us for {queue.work_s * 1e6:.0f} us of work")
    time_function(queue.launch, device, cold=False, minimum_samples=20, time_limit_s=_QUICK_S, clock=clock)


def _no_warm_up(device: Device, broken: bool, believe: Believe) -> None:
    """The first calls are four times slower; the warm-up is long enough or too short."""
    clock = Scripted(lambda call: _WORK_S * (1 + 3 * np.exp(-call / 50)))
    timing = time_function(lambda: None, device, cold=False, minimum_samples=30, time_limit_s=0.1 if broken else 5.0, clock=clock)
    believe(f"{timing.samples_s.mean() * 1e3:.2f} ms for {_WORK_S * 1e3:.2f} ms once warm")
    require_steady(timing)


def _clock_drift(device: Device, broken: bool, believe: Believe) -> None:
    clock = Scripted(lambda call: _WORK_S * (1 + (broken * call / 5000)))
    timing = time_function(lambda: None, device, cold=False, minimum_samples=1000, time_limit_s=0.1, clock=clock)
    first, last = timing.drift.ends
    believe(f"{np.median(timing.samples_s) * 1e3:.3f} ms, from {first * 1e3:.3f} at first to {last * 1e3:.3f} at last")
    require_steady(timing)


def _no_flush(clock: Callable[[Device], Clock]) -> Callable[[Device, bool, Believe], None]:
    """Time a copy with cold caches, with a clock that does not flush if broken."""

    def plant(device: Device, broken: bool, believe: Believe) -> None:
        source = torch.randn(1 << 16, device=device.torch_device)
        target = torch.empty_like(source)
        hot = time_function(lambda: target.copy_(source), device, cold=False, minimum_samples=10, time_limit_s=_QUICK_S)
        believe(f"{2 * source.nbytes / np.median(hot.samples_s) / 1e9:.3g} GB/s out of the cache, as if it were memory's")
        broken_clock = clock(device) if broken else None
        time_function(lambda: target.copy_(source), device, minimum_samples=10, time_limit_s=_QUICK_S, clock=broken_clock)

    return plant


def _skipped_work(device: Device, broken: bool, believe: Believe) -> None:
    """If broken, three of four calls reuse an earlier result."""
    calls = iter(range(1 << 40))

    def work() -> None:
        call = next(calls)
        if not broken or call % 4 == 0:
            time.sleep(4 * _WORK_S if broken else _WORK_S)

    believe("the time of a call that finds its work done: that of most, and so the median")
    time_function(work, device, cold=False, minimum_samples=20, time_limit_s=_QUICK_S)


class _NeverWritten(Gemm):
    """A product that returns without computing."""

    def __call__(self) -> torch.Tensor:
        return self.c_MN


class _Rounded(Gemm):
    """A product in bfloat16 that claims to be float32."""

    def __call__(self) -> torch.Tensor:
        return self.c_MN.copy_(self.a_MK.bfloat16() @ self.b_KN.bfloat16())


def _product(kind: type[Gemm]) -> Callable[[Device, bool, Believe], None]:
    """Measure a product that is of this kind if broken."""

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
    believe("the rate of ones as that of normal numbers, which draw more power")
    product.measure(cold=False, time_limit_s=_QUICK_S)


def _wrong_flops(device: Device, broken: bool, believe: Believe) -> None:
    product = Gemm(128, 96, 64, "fp32", device)
    if broken:
        product.flops = product.m * product.n * product.k
    believe(f"{product.flops / 1e6:.2f} MFLOP for {2 * product.m * product.n * product.k / 1e6:.2f}")
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
    """Return a device that torch reports as an MI250X, with these properties."""
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
    """Look up the peak of a device with properties in a wrong unit if broken, else of one die."""

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
    believe("0 W: a device that needs no power")
    row = _row(device, "fp32", Estimate(1e-9, 1e-9, 1e-9, 30), Verification("float64 slice", 0.0, 1e-3))
    replace(row, power_w=0.0 if broken else None).validate()


def _best_of_one(device: Device, broken: bool, believe: Believe) -> None:
    believe("one sample, the fastest there was, without an interval")
    row = _row(device, "fp32", Estimate(1e-9, 1e-9, 1e-9, 30), Verification("float64 slice", 0.0, 1e-3))
    (replace(row, n=None, ci_low=None, ci_high=None) if broken else row).validate()


def _wrong_rank(device: Device, broken: bool, believe: Believe) -> None:
    """An all-reduce of two ranks, computed here from both inputs; if broken, one element on rank 1 is off by one."""
    believe("a bus bandwidth, though rank 1 computes on with a wrong sum")
    sound = COLLECTIVES["all_reduce"]
    ranks = [Buffers(sound, 4096, "bf16", World(rank, 2, rank, "gloo", detect_cpu()), RollCall()) for rank in range(2)]
    total = ranks[0].input + ranks[1].input
    for place, rank in enumerate(ranks):
        rank.output.copy_(total)
        rank.output[7] += broken and place == 1
        rank.require_exact("after the timed calls")


def _row(device: Device, dtype: str, rate: Estimate, verification: Verification) -> Row:
    """Return a row with a product's rate."""
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


FAULTS: tuple[Fault, ...] = (
    Fault("no synchronisation", "checks.require_whole_work", "calls in a row take", _no_synchronisation),
    Fault(
        "no synchronisation after a block of calls",
        "checks.require_whole_work",
        "calls in a row take",
        _no_synchronisation_of_a_block,
    ),
    Fault("no warm-up", "Timing.unsteady", "warm-up's windows still differed", _no_warm_up),
    Fault("no cache flush", "checks.require_flushed", "the cache was flushed 0 times", _no_flush(Unflushed)),
    Fault("a cache flush that reads nothing", "checks.require_flushed", "did not read its buffer", _no_flush(Unread)),
    Fault("constant data under another name", "operands.verify_data", "operands are normal", _constant_data),
    Fault("a multiply-add counted as one FLOP", "checks.require_product_flops", "FLOPs are claimed", _wrong_flops),
    Fault("a timed region that skips work", "checks.require_whole_work", "calls in a row take", _skipped_work),
    Fault("an output that is never written", "verify_product, Row.validate", "check_error is nan", _product(_NeverWritten)),
    Fault("bf16 under the name of fp32", "verify_product, Row.validate", "failed its check", _product(_Rounded)),
    Fault("clock drift during sampling", "Timing.drift", "the samples drifted", _clock_drift),
    Fault("work outside of every phase", "time_step, Row.validate", "failed its check", _outside_of_phases),
    Fault(
        "a module's compute units for a die's",
        "specs.lookup",
        "220 compute units, expected 110",
        _wrong_device((220, 128 * GIB, 1700), "383 TFLOPS as the peak of one die: an MFU half as high"),
    ),
    Fault(
        "GB taken for GiB",
        "specs.lookup",
        "GiB of memory, expected 64",
        _wrong_device((110, 64e9, 1700), "59.6 GiB of memory for 64: batches 7 % too small"),
    ),
    Fault(
        "kHz taken for MHz",
        "Device",
        "not a clock in MHz",
        _wrong_device((110, 64 * GIB, 1_700_000), "a limit of 191,488 TFLOPS, which no fault exceeds"),
    ),
    Fault("a value above the peak", "Row.validate", "beyond its limit", _above_peak),
    Fault("a reading of 0 for an unreadable one", "Row.validate", "power_w is 0", _zero_reading),
    Fault("best of one", "Row.validate", "lacks n or the 95 % confidence interval", _best_of_one),
    Fault("a rank with wrong values", "Buffers.require_exact", "rank 1: 1 of", _wrong_rank),
)


def run_self_test(device: Device, faults: Iterable[Fault] = FAULTS) -> list[FaultResult]:
    """Plant every fault into a measurement on this device, and run its clean twin. Takes about 10 s on a CPU.

    Args:
        device: device for products and copies; faults that need a particular device use a description of it.
        faults: faults to plant; `hyperion.doctor.harness.ALL_FAULTS` also contains faults that need a model or rows.
    """
    return run_faults(device, faults)
