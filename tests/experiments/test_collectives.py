"""The interconnect experiment before it runs: its cells, its forecasts, and a machine with one device. (What two ranks leave:
tests/measure/test_collectives.py.)"""

import pytest

from hyperion.experiments import Context, load_profile
from hyperion.experiments.collectives import EXPERIMENT, cells
from hyperion.measure import COLLECTIVES
from hyperion.results import Row

SIZES = {
    "dtype": "fp32", "bytes": [8, 1000, 1 << 20], "other_dtypes": ["bf16", "int64"], "other_bytes": [8, 16],
    "all_reduce_bytes": [1 << 22], "time_limit_s": 0.01, "hang_timeout_s": 60.0,
}  # fmt: skip


def context(tmp_path, upstream=(), **sizes) -> Context:
    return Context(notebook="toy", experiment="collectives", sizes=SIZES | sizes, workspace=tmp_path, upstream=list(upstream))


def test_cells_are_each_collective_in_each_size_that_ranks_can_share(tmp_path):
    found = [(c.name, dtype, size) for c, dtype, size in cells(context(tmp_path), 4)]
    assert len(found) == len(set(found))
    assert [size for name, dtype, size in found if (name, dtype) == ("all_reduce", "fp32")] == [16, 1008, 1 << 20, 1 << 22]
    # Eight and sixteen bytes are one int64 for each of four ranks; in bf16 they differ.
    assert [size for name, dtype, size in found if (name, dtype) == ("all_to_all", "int64")] == [32]
    assert [size for name, dtype, size in found if (name, dtype) == ("all_to_all", "bf16")] == [8, 16]


@pytest.mark.parametrize("profile", ["smoke", "full", "study"])
def test_profiles_sweep_one_format_and_touch_all_others(tmp_path, profile):
    sizes = load_profile(profile).sizes("03_interconnect", "collectives")
    dtypes = {dtype for _, dtype, _ in cells(context(tmp_path, **sizes), 4)}
    assert {"fp32", "bf16", "fp16", "fp64", "int64"} == dtypes and len(sizes["bytes"]) >= 3


def test_one_device_has_rows_that_say_why(tmp_path):
    alone = context(tmp_path, ranks=1)
    result = EXPERIMENT.run(alone, lambda *progress: None)
    assert {row.variant for row in result.rows} == set(COLLECTIVES)
    assert all(row.value is None and row.value_reason.startswith("one device") for row in result.rows)
    for row in result.rows:
        row.validate()
    (forecast,) = EXPERIMENT.forecast(alone)
    assert forecast.estimate is None and forecast.basis.startswith("one device")


def test_a_cpu_forecasts_from_the_measured_memory_and_not_without(tmp_path):
    assert all(f.estimate is None and "01_hardware_exploration" in f.basis for f in EXPERIMENT.forecast(context(tmp_path)))
    stream = Row(notebook="n", experiment="bandwidth", variant="copy", metric="bandwidth_gb_s", value=16.0,
                 params={"elements": 10**8})  # fmt: skip
    forecasts = EXPERIMENT.forecast(context(tmp_path, [stream]))
    # Two ranks share 16 GB/s, and a byte over loopback is read and written twice: 2 GB/s.
    largest = next(f for f in forecasts if (f.variant, f.metric) == ("broadcast", "busbw_gb_s"))
    assert largest.params == {"bytes": 1 << 20, "ranks": 2}
    assert largest.estimate == pytest.approx((1 << 20) / (200e-6 + (1 << 20) / 2e9) / 1e9)
    assert forecasts[-1].metric == "collective_time_s" and forecasts[-1].params["bytes"] == 8
    assert all(word in largest.basis for word in ("200 us assumed", "16 GB/s (measured in 1.1)", "2 ranks"))
