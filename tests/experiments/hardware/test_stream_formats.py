"""Streams by number format: the same bytes in each, the copy beside a plain loop, joules where power is readable."""

from dataclasses import replace

import pytest
import torch

from hyperion.chapter import Context, experiment_named
from hyperion.experiments.hardware import bandwidth, stream_formats
from hyperion.hardware import Telemetry, detect
from hyperion.measure import measure_bandwidth
from tests.chapter.toy import perform, toy_context
from tests.hardware.machines import facts

OPERATIONS = ["copy", "scale", "add", "triad", "dot"]
SIZES = {
    "dtypes": ["fp64", "fp32", "fp16", "bf16"],
    "array_mib": 1,
    "time_limit_s": 0.01,
    "energy_dtype": "fp32",
    "energy_s": 0.02,
    "cross_check_dtype": "fp32",
    "cross_check_calls": 2,
}


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    return toy_context("stream_formats", SIZES, tmp_path_factory.mktemp("streams"))


@pytest.fixture(scope="module")
def rows(context, tmp_path_factory):
    return perform(context, tmp_path_factory.mktemp("run")).rows


def of_bandwidth(rows):
    return [row for row in rows if row.metric == "bandwidth_gb_s" and "plain_loop_calls" not in row.params]


@pytest.mark.slow
def test_every_operation_in_every_format_over_the_same_bytes(rows):
    cells = {(row.variant, row.dtype): row for row in of_bandwidth(rows)}
    assert set(cells) == {(operation, dtype) for operation in OPERATIONS for dtype in SIZES["dtypes"]}
    elements = {dtype: cells["copy", dtype].params["elements"] for dtype in SIZES["dtypes"]}
    assert elements == {"fp64": 2**17, "fp32": 2**18, "fp16": 2**19, "bf16": 2**19}
    assert all(row.value > 0 and row.n >= 30 and row.check and not row.hot for row in cells.values())


@pytest.mark.slow
def test_the_copy_stands_beside_a_plain_loop_with_its_interval(rows):
    (ratio,) = [row for row in rows if row.metric == "speedup"]
    rates = {row.variant: row.value for row in rows if row.metric == "bandwidth_gb_s" and "plain_loop_calls" in row.params}
    assert ratio.value == pytest.approx(rates["copy"] / rates["plain copy_"])
    assert ratio.ci_low <= ratio.value <= ratio.ci_high and ratio.n >= 30 and ratio.hot


def test_a_plain_loop_that_does_more_is_slower(context, monkeypatch):
    """The ratio is ours over theirs, and not the other way round."""
    compare = stream_formats.compare_with_plain_loop

    def thrice(function, device, calls, *, plain):
        return compare(function, device, calls, plain=lambda: [plain() for _ in range(3)])

    monkeypatch.setattr(stream_formats, "compare_with_plain_loop", thrice)
    cross_rows, _ = stream_formats._cross_check(context, stream_formats.StreamFormatsOptions.of(context))
    assert next(row.value for row in cross_rows if row.metric == "speedup") > 1.5


@pytest.mark.slow
def test_without_power_no_joules_and_the_reason(rows):
    if any(row.power_w is not None for row in rows):
        pytest.skip("power is readable here")
    energy = [row for row in rows if row.metric == "energy_j_per_gb"]
    assert [row.variant for row in energy] == OPERATIONS
    assert all(row.value is None and row.value_reason.startswith("no power: ") for row in energy)


@pytest.mark.slow
def test_joules_are_power_times_time_over_bytes(context, monkeypatch, tmp_path):
    state = Telemetry(power_w=500.0, power_scope="device", samples=20, window_s=1.0, interval_s=0.05)
    longer = {}

    def measured_with_power(operation, *args, **options):
        assert options["minimum_span_s"] == SIZES["energy_s"]
        measured = measure_bandwidth(operation, *args, **options)
        longer[operation] = replace(measured, timing=replace(measured.timing, telemetry=state))
        return longer[operation]

    monkeypatch.setattr(stream_formats, "read", lambda device: state)
    monkeypatch.setattr(stream_formats, "measure_bandwidth", measured_with_power)
    result = perform(replace(context, sizes=SIZES | {"dtypes": ["fp32"]}), tmp_path)
    energy = {row.variant: row for row in result.rows if row.metric == "energy_j_per_gb"}
    assert list(energy) == OPERATIONS
    for name, row in energy.items():
        joules = 500 * longer[name].timing.estimate.value
        assert row.value == pytest.approx(joules / (longer[name].bytes / 1e9)) and row.power_w == 500
        assert row.ci_low <= row.value <= row.ci_high


@pytest.mark.slow
def test_out_of_memory_is_a_row_and_the_others_go_on(context, monkeypatch, tmp_path):
    def refuse_triads(operation, *args, **options):
        if operation == "triad":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        return measure_bandwidth(operation, *args, **options)

    monkeypatch.setattr(bandwidth, "measure_bandwidth", refuse_triads)
    found = perform(replace(context, sizes=SIZES | {"dtypes": ["fp32"]}), tmp_path).rows
    triads = [row for row in found if row.variant == "triad"]
    assert {row.metric for row in triads} == {"bandwidth_gb_s", "energy_j_per_gb"}
    assert all(row.value is None and "out of memory" in row.value_reason for row in triads)
    assert all(row.value is not None for row in of_bandwidth(found) if row.variant != "triad")


def test_every_format_is_foretold_the_same_limit(context, monkeypatch):
    device = detect(facts("H200"))
    monkeypatch.setattr(Context, "device", property(lambda self: device))
    forecasts = experiment_named("stream_formats").forecast(replace(context, sizes=SIZES | {"array_mib": 1024}))
    assert len(forecasts) == len(OPERATIONS) * 4 and forecasts[0].variant == "copy"
    assert len({forecast.ceiling for forecast in forecasts}) == 1 and forecasts[0].ceiling > 4000
    assert all(0.5 < forecast.estimate / forecast.ceiling < 1 for forecast in forecasts)
