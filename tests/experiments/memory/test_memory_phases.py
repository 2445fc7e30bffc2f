"""Memory by phase at toy sizes: the parts add up, and each phase holds what it must."""

import pytest
import torch

from hyperion.experiments.memory.memory_phases import EXPERIMENT, PHASES, memory_by_phase
from hyperion.hardware import detect_cpu
from hyperion.workloads.workloads import ImageSizes, random_batch, workload
from tests.chapter.toy import perform, toy_context

pytestmark = pytest.mark.slow

RATE = {"learning_rate": 1e-3, "warmup_steps": 1}
SIZES = {
    "dtypes": ["fp32", "bf16"],
    "parts_tolerance": 0.01,
    "allocator_tolerance": 0.02,
    "language": {"model": "lm_d64_h4_l2", "sequence_length": 32, "batch_size": 4} | RATE,
    "image": {"width": 8, "batch_size": 16} | RATE,
}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phases")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield perform(toy_context("memory_phases", SIZES, folder), folder)
    torch.set_num_threads(threads)


def held(result, dtype, phase, part, variant="resnet18_w8"):
    return next(
        row.value
        for row in result.rows
        if (row.variant, row.dtype, row.metric) == (variant, dtype, "allocated_memory_gib")
        and (row.params["phase"], row.params["part"]) == (phase, part)
    )


def test_the_parts_add_up_to_all_tensors_in_every_phase(result):
    checked = [row for row in result.rows if row.check == "the parts add up to all tensors"]
    assert len(checked) == 2 * 2 * len(PHASES)
    assert max(row.check_error for row in checked) < 1e-4


def test_what_comes_and_goes_in_a_step(result):
    for dtype in SIZES["dtypes"]:
        parameters = held(result, dtype, PHASES[0], "parameters")
        gradients = [held(result, dtype, phase, "gradients") for phase in PHASES]
        activations = [held(result, dtype, phase, "activations") for phase in PHASES]
        assert gradients == [0, 0, parameters, parameters]
        assert activations[1] > 0 and max(activations[0], *activations[2:]) < 1e-6
        assert held(result, dtype, PHASES[0], "optimizer state") == parameters  # SGD with momentum


def test_autocast_halves_activations_and_nothing_else(result):
    kept = {dtype: held(result, dtype, "after forward", "activations") for dtype in SIZES["dtypes"]}
    assert 0.5 <= kept["bf16"] / kept["fp32"] < 0.6
    for part in ("parameters", "optimizer state"):
        assert held(result, "bf16", "after forward", part) == held(result, "fp32", "after forward", part)


def test_shapes_foretold_the_activations(result, tmp_path):
    forecasts = EXPERIMENT.forecast(toy_context("memory_phases", SIZES, tmp_path))
    assert {forecast.variant for forecast in forecasts} == {"lm_d64_h4_l2", "resnet18_w8"}
    for forecast in forecasts:
        measured = held(result, forecast.dtype, forecast.params["phase"], forecast.params["part"], forecast.variant)
        assert forecast.estimate == pytest.approx(measured, rel=0.02)


def test_a_loop_that_keeps_its_gradients_is_seen():
    torch.set_num_threads(1)
    work = workload(ImageSizes(**SIZES["image"]))
    engine = work.engine("fp32", detect_cpu(), 0)
    engine.optimizer.zero_grad = lambda: None
    first = memory_by_phase(engine, random_batch(work, detect_cpu(), 0))[0]
    assert first.parts["gradients"] == first.parts["parameters"]
