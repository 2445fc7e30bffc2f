"""Whose numbers these are."""

from hyperion.figures.material import Material, device_name
from tests.book.made_up import made_up_run


def test_the_first_gpu_else_the_cpu_names_the_machine():
    assert device_name({"environment": {"gpus": [{"name": "A"}, {"name": "B"}], "cpu": {"name": "C", "cores": 1}}}) == "A"
    assert device_name({"environment": {"gpus": [], "cpu": {"name": "C", "cores": 4}}}) == "C (4 cores)"
    assert device_name({}) == "a machine that run.json does not describe"


def test_a_replayed_experiment_names_its_reference(tmp_path):
    run = made_up_run(tmp_path / "run", replay="replay:h200:")
    material = Material(run)
    assert material.replayed_from("01_hardware_exploration", "gemm") == "h200"
    assert material.machine("gemm") == "h200 (replay)"
    assert material.replayed_from("01_hardware_exploration", "never run") == ""
