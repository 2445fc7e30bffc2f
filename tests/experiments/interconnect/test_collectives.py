"""The interconnect experiment before it runs: its cells, its forecasts, and a machine with one device. (What two ranks leave:
tests/measure/test_collectives.py.)"""

from dataclasses import replace

import pytest

from hyperion.chapter import Context, load_profile
from hyperion.experiments.interconnect import collectives
from hyperion.experiments.interconnect.collectives import EXPERIMENT, CollectivesOptions, cells
from hyperion.measure import ALL_COLLECTIVES
from hyperion.measure.collectives.collectives import WrongValueError, algorithm_of
from hyperion.processes import World
from hyperion.results import Row

SIZES = {
    "dtype": "fp32",
    "bytes": [8, 1000, 1 << 20],
    "other_dtypes": ["bf16", "int64"],
    "other_bytes": [8, 16],
    "all_reduce_bytes": [1 << 22],
    "time_limit_s": 0.01,
    "overlap_bytes": [1 << 20],
    "overlap_time_limit_s": 0.1,
    "hang_timeout_s": 60.0,
}


def context(tmp_path, upstream=(), **sizes) -> Context:
    return Context(notebook="toy", experiment="collectives", sizes=SIZES | sizes, workspace=tmp_path, upstream=list(upstream))


def test_cells_are_each_collective_in_each_size_that_ranks_can_share():
    found = [(c.name, dtype, size) for c, dtype, size in cells(CollectivesOptions.parse(SIZES, "collectives"), 4)]
    assert len(found) == len(set(found))
    assert [size for name, dtype, size in found if (name, dtype) == ("all_reduce", "fp32")] == [16, 1008, 1 << 20, 1 << 22]
    # Eight and sixteen bytes are one int64 for each of four ranks; in bf16 they differ.
    assert [size for name, dtype, size in found if (name, dtype) == ("all_to_all", "int64")] == [32]
    assert [size for name, dtype, size in found if (name, dtype) == ("all_to_all", "bf16")] == [8, 16]


@pytest.mark.parametrize("profile", ["smoke", "full", "study"])
def test_profiles_sweep_one_format_and_touch_all_others(profile):
    options = CollectivesOptions.parse(load_profile(profile).sizes("collectives"), "collectives")
    dtypes = {dtype for _, dtype, _ in cells(options, 4)}
    assert {"fp32", "bf16", "fp16", "fp64", "int64"} == dtypes and len(options.bytes) >= 3


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What a machine with one device gets: the CPU as the only rank."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as environment:
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            environment.setenv(name, "")
        return EXPERIMENT.run(context(folder, ranks=1), lambda *progress: None)


def test_one_device_checks_values_and_has_rows_that_say_what_it_cannot_show(alone):
    assert {row.variant for row in alone.rows} == {*ALL_COLLECTIVES, "overlap", "topology"}
    assert all(row.value is None and row.value_reason.startswith("one device: ") for row in alone.rows)
    checked = [row for row in alone.rows if row.check]
    assert {row.variant for row in checked} == set(ALL_COLLECTIVES) - {"send_recv"}
    assert {row.dtype for row in checked} == {"fp32", "bf16", "int64"} and all(row.check_error == 0 for row in checked)
    for row in alone.rows:
        row.validate()


def test_one_device_forecasts_nothing(tmp_path):
    (forecast,) = EXPERIMENT.forecast(context(tmp_path, ranks=1))
    assert forecast.estimate is None and forecast.basis.startswith("one device")


def test_a_single_rank_with_wrong_values_is_seen(tmp_path, monkeypatch):
    broken = replace(ALL_COLLECTIVES["all_gather"], call=lambda output, given: None)
    monkeypatch.setattr(collectives, "ALL_COLLECTIVES", {"all_gather": broken, "all_reduce": ALL_COLLECTIVES["all_reduce"]})
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    with pytest.raises(WrongValueError, match="rank 0: .* of all_gather, fp32, .* on the only rank"):
        EXPERIMENT.run(context(tmp_path, ranks=1), lambda *progress: None)


@pytest.mark.parametrize(("free", "profiled"), [(0, []), (1 << 40, ["all_reduce"])])
def test_no_kernel_is_profiled_where_no_message_fits(tmp_path, monkeypatch, free, profiled):
    monkeypatch.setattr(collectives, "ALL_COLLECTIVES", {"all_reduce": ALL_COLLECTIVES["all_reduce"]})
    place = context(tmp_path)
    here = World(rank=0, size=2, local_rank=0, backend="gloo", device=place.device)
    rows = collectives._kernel_rows(place, CollectivesOptions.parse(SIZES, "collectives"), here, None, free)
    assert [row.variant for row in rows] == profiled


def test_a_cpu_forecasts_from_the_measured_memory_and_not_without(tmp_path):
    rates = [f for f in EXPERIMENT.forecast(context(tmp_path)) if f.metric == "busbw_gb_s"]
    assert [f.variant for f in rates] == [*ALL_COLLECTIVES, "all_reduce"]
    assert all(f.ceiling is None and f.estimate is None and "01_hardware_exploration" in f.basis for f in rates)
    stream = Row(
        notebook="n", experiment="bandwidth", variant="copy", metric="bandwidth_gb_s", value=16.0, params={"elements": 10**8}
    )
    forecasts = EXPERIMENT.forecast(context(tmp_path, [stream]))
    # Two ranks share 16 GB/s, and a byte over loopback is read and written twice: 2 GB/s.
    largest = next(f for f in forecasts if (f.variant, f.metric) == ("broadcast", "busbw_gb_s"))
    assert largest.params == {"bytes": 1 << 20, "ranks": 2} and largest.ceiling == pytest.approx(2.0)
    assert largest.estimate is None
    assert all(word in largest.basis for word in ("without the latency", "16 GB/s (measured in 1.1)", "2 ranks"))
    others = {f.metric: f for f in forecasts if f.metric != "busbw_gb_s"}
    assert others["overlap_share"].estimate == 0 and others["overlap_share"].params["bytes"] == 1 << 20
    assert others["latency_s"].estimate is None and others["recommended_bytes"].estimate is None


@pytest.mark.parametrize(
    ("kernel", "may_add", "algorithm"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_TREE_LL", True, "tree"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", False, "ring"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", True, "ring, or by way of the switch (NVLS)"),
        ("ncclDevKernel_SendRecv", False, "messages between pairs"),
        ("ncclDevKernel_Generic_1", False, "the kernel's name does not state it"),
    ],
)
def test_a_kernels_name_tells_no_more_of_the_algorithm_than_it_can(kernel, may_add, algorithm):
    assert algorithm_of(kernel, switch_may_add=may_add) == algorithm
