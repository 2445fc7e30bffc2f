"""The checks by themselves: how often drift is cried without any, what an interval holds, and what each lets pass."""

import math
from dataclasses import replace

import pytest
import torch

from hyperion.hardware import HardwareError, detect_cpu
from hyperion.measure import time_function
from hyperion.measure.clock import timing
from hyperion.measure.clock.clocks import WallClock, device_clock
from hyperion.measure.clock.timing import HarnessError, require_cache_label, require_flushed, require_whole_work
from hyperion.measure.clock.verify import Verification
from hyperion.measure.planted_faults import Queue, Scripted, Unflushed
from hyperion.measure.products.gemm import require_passed, require_product_flops
from hyperion.results import Row, RowError

CPU = detect_cpu()


def test_the_interval_of_drifting_samples_reaches_from_end_to_end():
    drifting, steady = (
        time_function(lambda: None, CPU, cold=False, minimum_samples=500, clock=Scripted(lambda call, by=by: 1 + by * call))
        for by in (1e-3, 0.0)
    )
    first, last = drifting.drift.ends
    assert drifting.estimate.ci_low <= first < last <= drifting.estimate.ci_high
    assert "drifted by +" in drifting.unsteady and steady.unsteady == ""
    assert steady.estimate.ci_high / steady.estimate.ci_low < 1.01


@pytest.fixture
def undisturbed(monkeypatch):
    """The scheduler interrupts nothing, whatever else runs on this machine."""
    monkeypatch.setattr(timing, "_interruptions", lambda: 0)


@pytest.mark.usefixtures("undisturbed")
def test_calls_in_a_row_are_asked_again_before_a_clock_is_blamed():
    seen = iter([1.0, 1.0, 1.0, 0.02])
    require_whole_work(0.01, lambda calls: next(seen), again=lambda calls: [0.01])
    with pytest.raises(HarnessError, match="10 ms per call, but 2 calls in a row take 1000 ms"):
        require_whole_work(0.01, lambda calls: 1.0, again=lambda calls: [0.01])


@pytest.mark.usefixtures("undisturbed")
def test_a_machine_that_became_slow_slows_the_clocks_samples_too():
    blocks = []
    require_whole_work(0.01, lambda calls: blocks.append(calls) or 1.0, again=lambda calls: [0.5])
    assert len(blocks) == 3, "the clock's median reading must have become slow, not one reading"


@pytest.mark.usefixtures("undisturbed")
def test_one_delayed_reading_does_not_excuse_a_clock_that_stops_early():
    readings = iter([0.5] + [0.01] * 40)
    with pytest.raises(HarnessError, match="calls in a row take"):
        require_whole_work(0.01, lambda calls: 1.0, again=lambda calls: [next(readings)])


@pytest.mark.parametrize("counted", [True, False])
def test_a_scheduler_that_interrupts_each_block_of_calls_is_no_early_clock(monkeypatch, counted):
    now, interruptions = 0.0, 0

    class Interrupted:
        """The clock of a process that runs for 8 ms and then waits for 24 ms. A call takes 1 ms of processor time."""

        @staticmethod
        def now():
            return now

        def sample(self, functions, flush, count):
            return [[self._call() for _ in range(count)] for _ in functions]

        def in_a_row(self, function, count):
            return sum(self._call() for _ in range(count)) / count

        @staticmethod
        def _call():
            nonlocal now, interruptions
            before, now = now, now + 1e-3
            if int(now / 1e-3 + 0.5) % 32 == 8:
                now, interruptions = now + 24e-3, interruptions + 1
            return now - before

    monkeypatch.setattr(timing, "_interruptions", lambda: interruptions if counted else 0)
    if counted:
        timed = time_function(lambda: None, CPU, cold=False, minimum_samples=5, clock=Interrupted())
        assert timed.estimate.value == pytest.approx(1e-3)
    else:  # then the calls themselves take this time, and a median that hides it is wrong
        with pytest.raises(HarnessError, match="calls in a row take"):
            time_function(lambda: None, CPU, cold=False, minimum_samples=5, clock=Interrupted())


class Skipping:
    """The clock of a function of which three of four calls return an earlier result. The first call in the warm-up is delayed."""

    def __init__(self, delay_s: float = 0.0, interrupts_every: int = 0):
        self._now, self._calls, self._delay_s = 0.0, 0, delay_s
        self._interrupts_every, self.interruptions = interrupts_every, 0

    def now(self) -> float:
        return self._now

    def sample(self, functions, flush, count):
        return [[self._call() for _ in range(count)] for _ in functions]

    def in_a_row(self, function, count):
        return sum(self._call() for _ in range(count)) / count

    def _call(self) -> float:
        self._calls += 1
        if self._interrupts_every and self._calls > 1002 and self._calls % self._interrupts_every == 0:
            self.interruptions += 1
        seconds = 1e-7 + (4e-3 if self._calls % 4 == 1 else 0.0) + (self._delay_s if self._calls == 2 else 0.0)
        self._now += seconds
        return seconds


def test_skipped_work_is_found_although_the_warm_up_was_one_delayed_call():
    with pytest.raises(HarnessError, match="the clock reports 0.0001 ms per call, but 10 calls in a row take"):
        time_function(lambda: None, CPU, cold=False, minimum_samples=20, time_limit_s=0.05, clock=Skipping(delay_s=0.04))


def test_skipped_work_is_found_although_the_scheduler_interrupts_two_of_three_readings(monkeypatch):
    """The mean of an interrupted reading is as long as calls in a row."""
    clock = Skipping(interrupts_every=15)
    monkeypatch.setattr(timing, "_interruptions", lambda: clock.interruptions)
    with pytest.raises(HarnessError, match="the clock reports 0.0001 ms per call, but 10 calls in a row take"):
        time_function(lambda: None, CPU, cold=False, minimum_samples=20, time_limit_s=0.05, clock=clock)
    assert clock.interruptions > 20


def test_clocks_whose_samples_are_of_another_kind_are_not_asked():
    require_whole_work(1e-9, lambda calls: None, again=lambda calls: [1e-9])
    assert WallClock(CPU, 3).in_a_row(lambda: None, 5) is None
    assert device_clock(CPU).in_a_row(lambda: None, 5) > 0


@pytest.mark.slow
def test_a_stopwatch_that_does_not_wait_is_refused_and_one_that_waits_is_not():
    for waits in (True, False):
        queue = Queue(waits)
        try:
            timing = time_function(queue.launch, CPU, cold=False, minimum_samples=10, time_limit_s=0.05, clock=queue)
            assert waits and timing.estimate.value >= queue.work_s
        except HarnessError:
            assert not waits


def test_every_cold_sample_needs_its_flush():
    require_flushed(30, 30)
    with pytest.raises(HarnessError, match="30 samples are labelled cold, but the cache was flushed 29 times"):
        require_flushed(30, 29)
    with pytest.raises(HarnessError, match="flushed 0 times"):
        time_function(lambda: None, CPU, minimum_samples=3, time_limit_s=0.01, clock=Unflushed(CPU))


@pytest.mark.parametrize(
    ("label", "cold", "expected"),
    [
        ("cold", True, ""),
        ("hot", False, ""),
        (None, True, ""),
        (None, False, ""),
        ("cold", False, "samples with hot caches are labelled cold"),
        ("hot", True, "samples with cold caches are labelled hot"),
    ],
)
def test_a_label_says_how_samples_were_taken_or_is_refused(label, cold, expected):
    refusal = ""
    try:
        require_cache_label(label, cold)
    except HarnessError as error:
        refusal = error.what
    assert refusal == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_flops_are_counted_from_shapes_whatever_the_format(dtype):
    a, b = torch.zeros(3, 5, dtype=dtype), torch.zeros(7, 5, dtype=dtype).T
    require_product_flops(2 * 3 * 5 * 7, a, b)
    with pytest.raises(HarnessError, match="105 FLOPs are claimed for a product"):
        require_product_flops(3 * 5 * 7, a, b)


def test_a_verification_of_nan_does_not_pass():
    require_passed(Verification("fine", 0.1, 0.2))
    with pytest.raises(HarnessError, match="not fine"):
        require_passed(Verification("not fine", float("nan"), 0.2))


@pytest.mark.parametrize("clock_mhz", [1_700_000.0, 1.7, 0.0])
def test_a_device_whose_clock_is_not_in_mhz_is_refused(clock_mhz):
    for name in ("max_clock_mhz", "nominal_clock_mhz"):
        with pytest.raises(HardwareError, match=name):
            replace(CPU, **{name: clock_mhz})


@pytest.mark.parametrize(
    ("column", "reading", "remedy"),
    [
        ("power_w", 0.0, "null"),
        ("clock_mhz", 0.0, "null"),
        ("clock_mhz", -1.0, "null"),
        ("clock_mhz", 1_980_000.0, "MHz"),
        ("power_w", 560_000.0, "watts"),
    ],
)
def test_a_row_refuses_readings_that_are_none(column, reading, remedy):
    row = Row(notebook="n", experiment="e", variant="v", metric="share", value=0.5)
    replace(row, **{column: 700.0}).validate()
    with pytest.raises(RowError, match=column) as refused:
        replace(row, **{column: reading}).validate()
    assert remedy in refused.value.next_step


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((0.1, 0.2), (0.1, 0.3), "a"),
        ((0.1, 0.2), (0.3, 0.4), "b"),
        ((0.3, 0.2), (0.1, 0.2), "a"),
        ((0.1, 0.2), (float("nan"), 0.2), "b"),
        ((float("nan"), 0.2), (0.5, 0.2), "a"),
        ((0.1, 0.0), (0.1, 0.2), "a"),
    ],
)
def test_the_worse_of_two_checks_is_the_one_further_from_passing(a, b, expected):
    checks = Verification("a", *a), Verification("b", *b)
    assert checks[0].worse(checks[1]).name == expected
    if not math.isnan(a[0] + b[0]):
        assert checks[1].worse(checks[0]).name == expected
