"""Clocks stop when the work is done, not when it is asked for: on an injected device that works later than it is launched."""

import types
from dataclasses import replace

import pytest
import torch

from hyperion.hardware import detect_cpu
from hyperion.measure.clock import clocks
from hyperion.measure.clock.clocks import BlockClock, WallClock, _EventClock
from hyperion.measure.clock.timing import CacheFlush

LAUNCH_NS, WORK_NS = 10_000, 1_000_000


class Gpu:
    """A device on a virtual time in nanoseconds: launches return after 10 µs, the work of each takes 1 ms, in order."""

    kind, torch_device = "cuda", "cuda:0"

    def __init__(self):
        self.now_ns = self.idle_at_ns = 0

    def launch(self, work_ns: int = WORK_NS) -> None:
        self.now_ns += LAUNCH_NS
        self.idle_at_ns = max(self.idle_at_ns, self.now_ns) + work_ns

    def synchronize(self, device=None) -> None:
        self.now_ns = max(self.now_ns, self.idle_at_ns)


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()

    class Event:
        """A stamp in the queue, which can be read only once the device has passed it."""

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at_ns = max(gpu.idle_at_ns, gpu.now_ns)

        def elapsed_time(self, end):
            assert gpu.now_ns >= end.at_ns, "the device has not passed the event yet: no synchronisation at the end"
            return (end.at_ns - self.at_ns) / 1e6

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.launch(cycles))
    monkeypatch.setattr(clocks, "time", types.SimpleNamespace(perf_counter_ns=lambda: gpu.now_ns, monotonic=lambda: 0.0))
    return gpu


@pytest.mark.parametrize("count", [1, 5, 40])
def test_device_events_are_read_when_the_device_has_passed_them(gpu, count):
    samples = _EventClock(gpu, head_start_cycles=1000).sample([gpu.launch], None, count)
    assert samples == [pytest.approx([WORK_NS / 1e9] * count)]


def test_the_flush_lies_outside_of_every_sample_of_device_events(gpu):
    flushes = []

    def flush():
        flushes.append(None)
        gpu.launch(7 * WORK_NS)

    samples = _EventClock(gpu, head_start_cycles=80_000).sample([gpu.launch, gpu.launch], flush, 20)
    assert samples == [pytest.approx([WORK_NS / 1e9] * 20)] * 2 and len(flushes) == 40
    samples = _EventClock(gpu, head_start_cycles=80_000).sample([gpu.launch, gpu.launch], flush, 3)
    assert samples == [pytest.approx([WORK_NS / 1e9] * 3)] * 2 and len(flushes) == 40 + 12


def test_the_flush_lies_outside_of_every_sample_of_the_host_s_clock(monkeypatch):
    now_ns = 0

    def work(duration_ns):
        nonlocal now_ns
        now_ns += duration_ns

    monkeypatch.setattr(clocks._HostClock, "stamp", staticmethod(lambda: now_ns))
    samples = clocks._HostClock().sample([lambda: work(10), lambda: work(20)], lambda: work(700), 3)
    assert samples == [pytest.approx([10e-9] * 3), pytest.approx([20e-9] * 3)]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("count", [1, 40])
def test_a_call_that_waits_for_the_host_takes_as_long_beside_any_other_call(gpu, first, count):
    """As in a loop of its own. During the other call, which takes the device 20 ms, the host would be 19 ms ahead."""

    def waits():
        for _ in range(300):
            gpu.launch(WORK_NS // 1000)

    def works():
        gpu.now_ns += WORK_NS
        gpu.launch(20 * WORK_NS)

    functions = [waits, works] if first == 0 else [works, waits]
    samples = _EventClock(gpu, head_start_cycles=1000).sample(functions, None, count)
    assert samples[first] == pytest.approx([300 * LAUNCH_NS / 1e9] * count)
    assert samples[1 - first] == pytest.approx([20 * WORK_NS / 1e9] * count)


def test_short_calls_are_sampled_in_one_batch_and_so_are_those_that_meet_other_ranks(gpu, monkeypatch):
    calls = []
    slow, short = lambda: [gpu.launch() for _ in range(99)], lambda: calls.append(gpu.launch())
    _EventClock(gpu, head_start_cycles=80_000).sample([short, short], None, 40)
    assert len(calls) == 2 + 80, "one call of each to measure the host"
    _EventClock(gpu, head_start_cycles=1000, separate=False).sample([slow, short], None, 40)
    assert len(calls) == 2 + 80 + 40
    _EventClock(gpu, head_start_cycles=80_000).sample([slow, short], None, 40)
    assert len(calls) == 2 + 80 + 40 + 80, "an extra call before each sample; the first slow function decides"


def test_the_extra_call_before_a_batch_is_of_the_function_that_precedes_the_first_one(gpu):
    order = []
    _EventClock(gpu, 80_000, separate=False).sample([lambda: order.append("a"), lambda: order.append("b")], None, 2)
    assert order == ["b", "a", "b", "a", "b"]


def test_work_that_the_device_still_has_does_not_count_for_the_time_of_the_host(gpu):
    gpu.launch(10 * WORK_NS)
    assert not _EventClock(gpu, 80_000)._outlasts_the_spin(gpu.synchronize)


@pytest.mark.parametrize("calls", [1, 10])
def test_blocks_on_the_host_s_clock_end_with_the_device_idle(gpu, calls):
    (samples,) = WallClock(gpu, calls).sample([gpu.launch], None, 4)
    whole = (calls * WORK_NS + LAUNCH_NS) / calls / 1e9  # the device waits for the first launch, then for none
    assert samples == pytest.approx([whole] * 4)


def test_blocks_on_the_host_s_clock_begin_with_the_device_idle(gpu):
    gpu.launch(50 * WORK_NS)
    (samples,) = WallClock(gpu, 1).sample([gpu.launch], None, 1)
    assert samples == pytest.approx([(WORK_NS + LAUNCH_NS) / 1e9])


def test_calls_in_a_row_are_timed_from_idle_to_idle(gpu):
    gpu.launch(50 * WORK_NS)
    seconds = _EventClock(gpu, head_start_cycles=1000).in_a_row(gpu.launch, 10)
    assert seconds == pytest.approx((10 * WORK_NS + LAUNCH_NS) / 10 / 1e9)


def test_the_flush_reads_twice_the_last_level_cache_and_shows_that_it_did():
    cpu = detect_cpu()
    flush = CacheFlush(cpu)
    assert flush.bytes >= max(2 * (cpu.last_level_cache_bytes or 0), 1 << 24) - 4
    assert CacheFlush(replace(cpu, last_level_cache_bytes=1 << 24)).bytes == 2 << 24
    assert not flush.read_all and flush.calls == 0
    flush()
    assert flush.read_all and flush.calls == 1
    partial = CacheFlush(cpu, elements=1000)
    torch.sum(partial._buffer[:900], dim=0, out=partial._total)
    assert not partial.read_all


def test_a_block_clock_times_each_function_after_calls_of_its_own(monkeypatch):
    """Two functions with their own threads, which spin for 14 ms after a call: the other one is then ten times slower."""
    now_ns, spins_until_ns, order = 0, {"a": 0, "b": 0}, []

    def function(name, other):
        def call():
            nonlocal now_ns
            order.append(name)
            now_ns += WORK_NS if now_ns >= spins_until_ns[other] else 10 * WORK_NS
            spins_until_ns[name] = now_ns + 14_000_000

        return call

    monkeypatch.setattr(clocks._HostClock, "stamp", staticmethod(lambda: now_ns))
    monkeypatch.setattr(BlockClock, "now", staticmethod(lambda: now_ns / 1e9))
    functions = [function("a", "b"), function("b", "a")]
    alternating = clocks._HostClock().sample(functions, None, 3)
    assert alternating[1] == pytest.approx([0.01] * 3)
    order.clear()
    assert BlockClock().sample(functions, None, 3) == [pytest.approx([0.001] * 3)] * 2
    assert order == sorted(order), "all calls of one function precede those of the other"


@pytest.mark.parametrize("rounds", [1, 4, 5, 8, 11])
def test_on_ranks_the_last_function_runs_last_because_its_result_is_checked(rounds):
    order = []
    functions = [lambda: order.append("compute"), lambda: order.append("both")]
    clock = clocks.device_clock(detect_cpu(), separate=False)
    clock.sample(functions, None, rounds)
    clock.sample(functions, None, 1)
    assert order == ["compute", "both"] * (rounds + 1)
