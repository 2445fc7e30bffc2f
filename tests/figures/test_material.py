"""Whose numbers these are, and whether the device was steady."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from hyperion.figures.material import Material, device_name, held_by_power
from hyperion.figures.tables import tables_of
from hyperion.results import Row, Run
from tests.book.made_up.run import made_up_run


def test_the_first_gpu_else_the_cpu_names_the_machine():
    assert device_name({"environment": {"gpus": [{"name": "A"}, {"name": "B"}], "cpu": {"name": "C", "cores": 1}}}) == "A"
    assert device_name({"environment": {"gpus": [], "cpu": {"name": "C", "cores": 4}}}) == "C (4 cores)"
    assert device_name({}) == "a machine that run.json does not describe"


@pytest.mark.slow
def test_a_replayed_experiment_names_its_reference(tmp_path):
    run = made_up_run(tmp_path / "run", replay="replay:h200:")
    material = Material(run)
    assert material.replayed_from("01_hardware_exploration", "gemm") == "h200"
    assert material.machine("gemm") == "h200 (replay)"
    assert material.replayed_from("01_hardware_exploration", "never run") == ""


def test_steadiness_comes_from_the_samples_of_the_same_variant_format_and_parameters(tmp_path):
    def row(variant, m):
        return Row(notebook="n", experiment="e", variant=variant, params={"m": m, "k": 1}, metric="count", value=1.0)

    series = {
        ("a", 1): (True, [1.0] * 10),
        ("a", 2): (False, [1.0] * 10),
        ("b", 1): (True, np.linspace(1, 1.3, 10)),
        ("d", 1): (True, np.linspace(1, 1.3, 9)),
        ("b", 2): (False, np.linspace(1, 0.9, 10)),
    }
    samples = [
        {
            "variant": variant,
            "dtype": "",
            "params": json.dumps({"m": m, "k": 1}),
            "index": index,
            "time_s": time_s,
            "warm": warm,
            "unsteady": "",
        }
        for (variant, m), (warm, times_s) in series.items()
        for index, time_s in enumerate(times_s)
    ]
    run = Run.create(tmp_path / "run", {"environment": {}})
    rows = [row(*key) for key in series] + [row("c", 1)]
    run.record("n", "e", rows, pd.DataFrame(samples), input_hash="h")
    material = Material(run)
    assert [material.steadiness(row) for row in material.rows] == [
        "yes",
        "no (warm-up)",
        "no (drift +29.0 %)",
        "unknown (9 samples)",
        "no (warm-up, drift -11.7 %)",
        "",
    ]
    (_, table), *_ = tables_of(material.rows, material.steadiness)
    assert table["steady"].tolist() == [material.steadiness(row) for row in material.rows]
    assert "steady" not in tables_of(material.rows)[0][1]


def test_a_step_of_several_ranks_is_steady_if_its_slowest_rank_does_not_drift(tmp_path):
    def row(variant, ranks, mode, metric="step_time_s"):
        params = {"ranks": ranks, "mode": mode, "model": "m", "tokens": 64}
        ends = {"ci_low": 0.9, "ci_high": 1.1, "n": 9, "limit_source": "none"} if metric == "step_time_s" else {}
        return Row(notebook="n", experiment="e", variant=variant, dtype="bf16", params=params, metric=metric, value=1.0, **ends)

    flat, rising, short = [1.0] * 12, np.linspace(1, 1.3, 12), [1.0] * 9
    series = {
        ("a", 1, "weak", "step"): [flat],
        ("a", 2, "weak", "step"): [flat, 0.5 * rising],  # the slowest rank does not drift
        ("a", 2, "strong", "step"): [flat, rising],
        ("a", 2, "weak", "alone"): [rising, rising],  # another measurement
        ("b", 2, "weak", "step"): [short, short],
    }
    samples = [
        {"workload": name, "ranks": ranks, "mode": mode, "kind": kind, "rank": rank, "index": index, "time_s": time_s}
        for (name, ranks, mode, kind), times in series.items()
        for rank, times_s in enumerate(times)
        for index, time_s in enumerate(times_s)
    ]
    rows = [row("a", 1, "weak"), row("a", 2, "weak"), row("a", 2, "strong"), row("b", 2, "weak"), row("c", 2, "weak")]
    rows.append(row("a", 2, "weak", "share"))
    run = Run.create(tmp_path / "run", {"environment": {}})
    run.record("n", "e", rows, pd.DataFrame(samples), input_hash="h")
    material = Material(run)
    assert [material.steadiness(row) for row in material.rows] == [
        "yes (drift only)",
        "yes (drift only)",
        "no (drift +28.5 %)",
        "unknown (9 samples)",
        "unknown",
        "",
    ]


def test_each_phase_of_a_step_has_a_steadiness_of_its_own_and_the_worst_of_several_series_counts(tmp_path):
    def row(metric, variant="model", **params):
        limit = {"limit_source": "no limit: made up", "check": "equal", "check_error": 0.0, "check_tolerance": 1.0}
        interval = {"value": 1.0, "n": 10, "ci_low": 0.9, "ci_high": 1.1}
        return Row(notebook="n", experiment="e", variant=variant, metric=metric, params=params, **interval | limit)

    def series(variant, times_s, warm=True, **columns):
        samples = {"variant": variant, "dtype": "", "params": "{}", "index": range(len(times_s)), "time_s": times_s, "warm": warm}
        return pd.DataFrame(samples | {"unsteady": ""} | columns)

    steady, drifting = [1.0] * 10, np.linspace(1, 1.3, 10)
    samples = [
        series("model", steady, phase="step"),
        series("model", drifting, phase="forward"),
        series("model", steady, phase="backward"),
        series("block", steady[:3], blocks="few"),
        series("block", drifting, blocks="many"),
        series("short", steady[:3], blocks="few"),
        series("short", steady, blocks="many"),
    ]
    rows = [row(metric) for metric in ("step_time_s", "forward_time_s", "backward_time_s")]
    rows += [row("block_time_s", "block"), row("block_time_s", "short")]
    run = Run.create(tmp_path / "run", {"environment": {}})
    run.record("n", "e", rows, pd.concat(samples), input_hash="h")
    material = Material(run)
    assert [material.steadiness(row) for row in material.rows] == [
        "yes",
        "no (drift +29.0 %)",
        "yes",
        "no (drift +29.0 %)",
        "unknown (3 samples)",
    ]


@pytest.mark.parametrize(
    ("throttle", "clock_mhz", "source", "held"),
    [
        ("sw_power_cap", 1700.0, "fp64_matrix: 132 x 128 ops/clock x 1980 MHz; a paper", True),
        ("sw_power_cap", 1980.0, "fp32_vector: 132 x 256 ops/clock x 1980 MHz; a paper", False),
        ("none", 1700.0, "fp64_matrix: 132 x 128 ops/clock x 1980 MHz; a paper", False),
        ("hw_thermal", 1700.0, "fp64_matrix: 132 x 128 ops/clock x 1980 MHz; a paper", False),
        ("sw_power_cap", None, "fp64_matrix: 132 x 128 ops/clock x 1980 MHz; a paper", False),
        ("sw_power_cap", 1700.0, "no limit: made up", False),
    ],
)
def test_a_row_is_held_by_power_only_if_its_clock_was_lower(throttle, clock_mhz, source, held):
    row = Row(notebook="n", experiment="e", variant="v", metric="gemm_tflops", value=1.0, limit_source=source)
    assert held_by_power(replace(row, throttle=throttle, clock_mhz=clock_mhz)) == held


def test_a_time_whose_samples_record_no_steadiness_is_unknown_and_a_clock_needs_no_samples_of_its_own(tmp_path):
    def row(variant, **columns):
        limit = {"limit_source": "no limit: made up", "check": "equal", "check_error": 0.0, "check_tolerance": 1.0}
        named = {"notebook": "n", "experiment": "e", "variant": variant, "metric": "inference_time_s", "value": 1.0}
        return Row(**named | limit | columns)

    interval = {"n": 9, "ci_low": 0.9, "ci_high": 1.1}
    rows = [
        row("timed", params={"m": 1, "clock": "wall"}, **interval),
        row("other", params={"m": 1}, **interval),
        row("mean", params={"m": 1, "seeds": 9}, **interval),
    ]
    samples = {"variant": "timed", "dtype": "", "params": '{"m": 1}', "time_s": 1.0, "warm": True, "unsteady": ""}
    run = Run.create(tmp_path / "run", {"environment": {}})
    run.record("n", "e", rows, pd.DataFrame([samples | {"index": place} for place in range(10)]), input_hash="h")
    material = Material(run)
    assert [material.steadiness(row) for row in material.rows] == ["yes", "unknown", ""]
