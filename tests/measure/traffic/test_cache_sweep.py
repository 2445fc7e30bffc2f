"""A sweep names the level that has room, counts every pass, and says where it measured launches instead of a cache."""

import dataclasses
import gc
import itertools
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyperion.hardware import detect, detect_cpu
from hyperion.measure import (
    FORMATS,
    SWEEPS,
    CacheCapacity,
    RepeatedCalls,
    cache_capacities,
    cache_level,
    measure_cache_sweep,
    sweep_sizes,
    verify_sum,
)
from hyperion.measure.traffic import cache_sweep
from hyperion.measure.traffic.cache_sweep import _Work, is_long
from tests.hardware.machines import facts, gpu

KIB, MIB = 2**10, 2**20
TWO_CORES = (CacheCapacity("L1", 32 * KIB, 2), CacheCapacity("L2", MIB, 2), CacheCapacity("L3", 32 * MIB))


@pytest.mark.parametrize(
    ("size", "sharers", "level"),
    [
        (4 * KIB, 1, "L1"),
        (32 * KIB, 1, "L1"),
        (32 * KIB + 1, 1, "L2"),
        (64 * KIB, 2, "L1"),
        (3 * MIB // 2, 1, "L3"),
        (3 * MIB // 2, 2, "L2"),
        (3 * MIB // 2, 64, "L2"),
        (32 * MIB, 64, "L3"),
        (33 * MIB, 64, "memory"),
    ],
)
def test_a_working_set_is_in_the_innermost_level_with_room(size, sharers, level):
    assert cache_level(size, sharers, TWO_CORES) == level


def test_unknown_levels_are_not_invented():
    assert cache_level(4 * KIB, 1, ()) is None
    nameless = gpu("H200", name="NVIDIA Something", l2_cache_bytes=None)
    assert cache_capacities(detect(facts(gpus=(nameless,)))) == ()


@pytest.mark.parametrize(("machine", "mib"), [("H200", 60), ("MI250X", 8), ("MI300X", 256)])
def test_of_a_gpu_the_last_level_is_known(machine, mib):
    assert cache_capacities(detect(facts(machine))) == (CacheCapacity("last-level cache", mib * MIB),)


def test_of_caches_with_different_sizes_the_smallest_is_the_capacity(monkeypatch):
    monkeypatch.setattr(cache_sweep, "data_caches", lambda: [SimpleNamespace(level=1, sizes_bytes=(48 * KIB, 32 * KIB))])
    assert cache_capacities(detect_cpu()) == (CacheCapacity("L1", 32 * KIB, 2),)


@given(st.integers(1, 2**31), st.integers(1, 8), st.integers(2**20, 2**40))
def test_sizes_double_from_four_kib_to_past_the_last_level(cache, count, memory):
    sizes = sweep_sizes((CacheCapacity("L1", 1), CacheCapacity("L3", cache, count)), memory)
    assert sizes[0] == 4 * KIB and all(b == 2 * a for a, b in itertools.pairwise(sizes))
    assert sizes[-1] >= 4 * cache * count or 2 * sizes[-1] > memory // 8
    assert len(sizes) == 1 or sizes[-2] < 4 * cache * count and sizes[-1] <= memory // 8


@pytest.mark.parametrize("operation", SWEEPS)
def test_a_sweep_is_verified_and_counts_the_bytes_of_every_pass(operation):
    sizes = [4 * KIB, 96 * KIB, 2 * MIB]
    points = measure_cache_sweep(operation, detect_cpu(), sizes=sizes, time_limit_s=0.03)
    assert [point.working_set_bytes for point in points] == sizes
    for point in points:
        passes = int(point.how.split(" passes")[0]) if "passes" in point.how else 1
        assert point.bytes == passes * point.working_set_bytes
        assert passes == 1 if operation == "copy" else point.bytes >= 16 * MIB
        assert point.verification.passed and not point.captured and len(point.timing.samples_s) >= 30
        rate = point.bytes / np.median(point.timing.samples_s) / 1e9
        assert point.bandwidth_gb_s.value == pytest.approx(rate)
        assert point.level


@pytest.mark.parametrize("operation", SWEEPS)
def test_timed_calls_that_write_nothing_are_caught(operation, monkeypatch):
    """The calls before the timing have written the output, so only its poison shows that the timed ones do not."""
    timing = RepeatedCalls(lambda: None, detect_cpu(), calls=1).time(time_limit_s=0.01)
    monkeypatch.setattr(RepeatedCalls, "time", lambda self, time_limit_s: timing)
    [point] = measure_cache_sweep(operation, detect_cpu(), sizes=[4 * KIB])
    assert not point.verification.passed


def test_a_point_that_takes_no_longer_than_one_element_measured_launches():
    [point] = measure_cache_sweep("copy", detect_cpu(), sizes=[4 * KIB], time_limit_s=0.02)
    slow = dataclasses.replace(point.launch, samples_s=np.full(30, 1e-6))
    for seconds, bound in ((1.9e-6, True), (2.1e-6, False)):
        timing = dataclasses.replace(point.timing, samples_s=np.full(30, seconds))
        assert dataclasses.replace(point, timing=timing, launch=slow).launch_bound is bound


@pytest.mark.parametrize("fault", [float("nan"), 0.0])
def test_one_wrong_pass_among_many_is_caught(fault):
    source = torch.randn(1000)
    sums = source.expand(64, 1000).sum(dim=1)
    assert verify_sum(sums, (source,), FORMATS["fp32"]).passed
    sums[40] = fault
    assert not verify_sum(sums, (source,), FORMATS["fp32"]).passed


def test_calls_in_a_row_give_the_time_of_one():
    calls = []

    def work():
        calls.append(None)
        time.sleep(0.0005)

    repeated = RepeatedCalls(work, detect_cpu(), calls=4)
    assert not calls and repeated.not_captured == "unavailable: a CPU has no graphs"
    started = time.perf_counter()
    timing = repeated.time(time_limit_s=0.01)
    elapsed = time.perf_counter() - started
    assert len(calls) >= 4 * len(timing.samples_s) and len(calls) % 4 == 0
    # A sleep never ends early: the mean of four is one call, not the block.
    assert timing.samples_s.min() >= 0.0005 and 4 * timing.samples_s.sum() <= elapsed and not timing.cold


def test_a_long_call_is_made_once_and_a_short_one_often():
    cpu = detect_cpu()
    assert RepeatedCalls(lambda: time.sleep(0.003), cpu).calls == 1
    assert RepeatedCalls(lambda: None, cpu).calls == 1000


def test_only_a_call_on_a_gpu_is_too_long_for_a_graph():
    sheet = detect(facts("H200"))
    assert is_long(2e-4, sheet) and not is_long(1.9e-4, sheet) and not is_long(1.0, detect_cpu())


def test_a_long_call_is_timed_by_itself_without_a_graph(monkeypatch):
    monkeypatch.setattr(cache_sweep, "is_long", lambda seconds, device: True)
    (point,) = measure_cache_sweep("copy", detect_cpu(), sizes=[MIB], time_limit_s=0.02)
    assert point.long and not point.captured and point.how == "call by call, on the device's clock"
    assert point.verification.passed and point.bytes == MIB


@pytest.mark.slow
def test_what_no_cache_holds_is_read_once_in_parts():
    [last] = [capacity.total_bytes for capacity in cache_capacities(detect_cpu())[-1:]] or [32 * MIB]
    assert _Work("read", last // 2, "fp32", detect_cpu(), 0, last).sharers == 1
    beyond = _Work("read", last + 4, "fp32", detect_cpu(), 0, last)
    assert beyond.passes == 1 and beyond.sharers == min(torch.get_num_threads(), beyond.elements)


@pytest.mark.parametrize("operation", SWEEPS)
def test_a_working_set_is_freed_when_the_next_one_is_made(operation):
    """Without the help of the garbage collector: a sweep on a GPU would hold all of its sizes at once."""
    gc.disable()
    try:
        work = _Work(operation, 4096, "fp32", detect_cpu(), seed=0, shared_up_to=0)
        memory = weakref.ref(work.source)
        del work
        assert memory() is None
    finally:
        gc.enable()
