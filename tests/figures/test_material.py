"""Whose numbers these are, and whether the device was steady."""

import json

import pandas as pd
import pytest

from hyperion.figures.material import Material, device_name
from hyperion.figures.tables import tables_of
from hyperion.results import Row, Run
from tests.book.made_up.run import made_up_run

SAMPLED = ("warm", "drift", "unsteady")


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
        ("a", 1): (True, 0.0, ""),
        ("a", 2): (False, 0.3, "the warm-up's windows still differed when its time was up"),
        ("b", 1): (True, 0.268, "the samples drifted by +26.8% while they were taken (z = +5.9)"),
        ("d", 1): (True, 0.0, ""),
        ("b", 2): (False, -0.05, "the warm-up's windows still differed; the samples drifted by -5.0% (z = -4)"),
    }
    samples = [
        {
            "variant": variant,
            "dtype": "",
            "params": json.dumps({"m": m, "k": 1}),
            "warm": warm,
            "drift": drift,
            "unsteady": unsteady,
        }
        for (variant, m), (warm, drift, unsteady) in series.items()
        for _ in range(9 if (variant, m) == ("d", 1) else 10)
    ]
    run = Run.create(tmp_path / "run", {"environment": {}})
    rows = [row(*key) for key in series] + [row("c", 1)]
    run.record("n", "e", rows, pd.DataFrame(samples), input_hash="h")
    material = Material(run)
    assert [material.steadiness(row) for row in material.rows] == [
        "yes",
        "no (warm-up)",
        "no (drift +26.8 %)",
        "unknown (9 samples)",
        "no (warm-up, drift -5.0 %)",
        "",
    ]
    (_, table), *_ = tables_of(material.rows, material.steadiness)
    assert table["steady"].tolist() == [material.steadiness(row) for row in material.rows]
    assert "steady" not in tables_of(material.rows)[0][1]


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
    samples = {"variant": "timed", "dtype": "", "params": '{"m": 1}', "warm": True, "drift": 0.0, "unsteady": ""}
    run = Run.create(tmp_path / "run", {"environment": {}})
    run.record("n", "e", rows, pd.DataFrame([samples] * 10), input_hash="h")
    material = Material(run)
    assert [material.steadiness(row) for row in material.rows] == ["yes", "unknown", ""]
