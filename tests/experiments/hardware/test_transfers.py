"""Copies between memories: nothing to copy between on a CPU; on GPUs, played here, every cell, pair and limit."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from hyperion.chapter import Context, experiment_named
from hyperion.errors import HyperionError
from hyperion.experiments.hardware import transfers
from hyperion.hardware import detect, detect_cpu
from hyperion.measure import measure_copy
from tests.chapter.toy import perform, toy_context
from tests.hardware.machines import facts

SIZES = {"kib": [4, 64], "peer_mib": 1, "time_limit_s": 0.01, "cpu_cap_gib": 0.25, "step_mib": 16}


@pytest.fixture
def context(tmp_path):
    return toy_context("transfers", SIZES, tmp_path)


@pytest.fixture
def gpus(monkeypatch):
    """Play `count` GPUs of a machine: what they copy is copied on this host."""

    def play(machine: str, count: int, direct: bool = True):
        device = detect(facts(machine))
        monkeypatch.setattr(Context, "device", property(lambda self: device))
        monkeypatch.setattr(transfers, "detect", lambda facts=None, index=0: replace(device, index=index))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda source, destination: direct)
        monkeypatch.setattr(transfers, "measure_transfer", lambda d, size, _, *, pinned, **rest: copied(size, pinned))
        monkeypatch.setattr(transfers, "measure_between", lambda a, b, size, **rest: copied(size, None))
        monkeypatch.setattr(transfers, "largest_allocation", no_gpu)

    return play


def copied(size: int, pinned: bool | None):
    source = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    return measure_copy(source, torch.empty_like(source), detect_cpu(), pinned=pinned, time_limit_s=0.01)


def no_gpu(*args, **options):
    raise HyperionError("not even 64 MiB were granted: no GPU")


@pytest.mark.slow
def test_a_cpu_has_nothing_to_copy_between_and_says_so(context, tmp_path):
    rows = perform(context, tmp_path).rows
    copies = [row for row in rows if row.metric == "bandwidth_gb_s"]
    assert [row.variant for row in copies] == ["host to device", "device to host", "peer to peer"]
    assert all(row.value is None and "one memory" in row.value_reason for row in copies)


@pytest.mark.slow
def test_a_cpu_gives_one_tensor_no_more_than_the_cap(context, tmp_path):
    (row,) = [row for row in perform(context, tmp_path).rows if row.metric == "largest_allocation_gib"]
    if row.value is None:
        pytest.skip(row.value_reason)
    assert 0.1 < row.value <= 0.25 == row.limit and "cap" in row.limit_source
    assert row.check == "written and read back"


@pytest.mark.slow
def test_no_profile_takes_more_than_a_quarter_of_a_cpus_memory(context, monkeypatch):
    asked = []

    def remember(device, *, step_bytes, cap_gib):
        asked.append(cap_gib)
        raise HyperionError("asked")

    monkeypatch.setattr(transfers, "largest_allocation", remember)
    transfers._allocation_row(context, transfers.TransfersOptions.parse(SIZES | {"cpu_cap_gib": 10**6}, "transfers"))
    assert asked == [pytest.approx(context.device.memory_bytes / 2**30 / 4)]


def test_what_earlier_experiments_left_in_cycles_is_freed_before_the_largest_tensor_is_sought(context, monkeypatch):
    """Else a device would seem smaller by what a sweep before it has held."""

    class Left:
        pass

    left = Left()
    left.itself, alive = left, weakref.ref(left)
    del left
    monkeypatch.setattr(transfers, "largest_allocation", lambda *args, **options: no_gpu() if alive() is None else None)
    gc.disable()
    try:
        assert "not even 64 MiB" in transfers._allocation_row(context, transfers.TransfersOptions.of(context)).value_reason
    finally:
        gc.enable()


@pytest.mark.slow
def test_every_direction_memory_and_size_without_a_limit(context, gpus, tmp_path):
    gpus("H200", 1)
    rows = perform(context, tmp_path).rows
    cells = {(row.variant, row.params["memory"], row.params["bytes"]) for row in rows if "memory" in row.params}
    directions, sizes = ("host to device", "device to host"), (4096, 65536)
    assert cells == {(d, m, s) for d in directions for m in ("pinned", "pageable") for s in sizes}
    assert all(row.limit is None and "no datasheet value" in row.limit_source for row in rows if "memory" in row.params)
    (peer,) = [row for row in rows if row.variant == "peer to peer"]
    assert peer.value is None and "needs two" in peer.value_reason
    (tensor,) = [row for row in rows if row.metric == "largest_allocation_gib"]
    assert tensor.value is None and "not even 64 MiB" in tensor.value_reason


@pytest.mark.slow
def test_every_ordered_pair_of_gpus_with_the_links_limit(context, gpus, tmp_path):
    gpus("H200", 3)
    rows = [row for row in perform(context, tmp_path).rows if row.variant == "peer to peer"]
    pairs = [(row.params["source"], row.params["destination"]) for row in rows]
    assert sorted(pairs) == [(a, b) for a in range(3) for b in range(3) if a != b]
    assert {row.limit for row in rows} == {450} and all(row.params["direct"] for row in rows)
    forecasts = [f for f in experiment_named("transfers").forecast(context) if f.variant == "peer to peer"]
    assert {forecast.ceiling for forecast in forecasts} == {450} and len(forecasts) == 6
    assert all(forecast.low < forecast.estimate < 450 < forecast.high for forecast in forecasts)
    assert all(forecast.params.items() <= row.params.items() for forecast, row in zip(forecasts, rows, strict=True))


@pytest.mark.slow
def test_a_copy_through_the_host_is_not_held_against_the_link(context, gpus, tmp_path):
    gpus("H200", 2, direct=False)
    rows = [row for row in perform(context, tmp_path).rows if row.variant == "peer to peer"]
    assert len(rows) == 2
    assert all(row.limit is None and "through the host" in row.limit_source and not row.params["direct"] for row in rows)


def test_what_one_peer_gets_is_no_limit_for_the_others(context, gpus):
    """A GCD of an MI250X has four links to its module's other one, and one or two to the rest."""
    gpus("MI250X", 8)
    forecasts = [f for f in experiment_named("transfers").forecast(context) if f.variant == "peer to peer"]
    assert len(forecasts) == 56 and {f.ceiling for f in forecasts} == {None}
    gpus("MI250X", 2)
    forecasts = [f for f in experiment_named("transfers").forecast(context) if f.variant == "peer to peer"]
    assert {f.ceiling for f in forecasts} == {200} and {f.estimate for f in forecasts} == {None}


def test_one_tensor_is_foretold_all_of_the_memory(context, gpus):
    gpus("H200", 1)
    first = experiment_named("transfers").forecast(context)[0]
    assert first.metric == "largest_allocation_gib"
    assert first.estimate == pytest.approx(context.device.memory_bytes / 2**30)


def test_out_of_memory_is_a_row(context, gpus, monkeypatch, tmp_path):
    gpus("H200", 2)

    def refuse(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    monkeypatch.setattr(transfers, "measure_transfer", refuse)
    monkeypatch.setattr(transfers, "measure_between", refuse)
    rows = [row for row in perform(context, tmp_path).rows if row.metric == "bandwidth_gb_s"]
    assert len(rows) == 2 * 2 * 2 + 2 and all("out of memory" in row.value_reason for row in rows)
