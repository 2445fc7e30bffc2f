"""The host's costs as rows, and the steps that are foretold from them."""

import pytest

from hyperion.chapter import experiment_named
from hyperion.experiments.steps.operator_cost import BLOCK, CONVOLUTION, ONCE, PLAIN
from hyperion.results import Row
from hyperion.workloads.reference_steps import StepVariant, compiled_host, forecast_reference_step, operator_time, step_ceilings
from tests.chapter.toy import by_params, perform, toy_context
from tests.experiments.hardware.test_model_products import streams, upstream
from tests.workloads.test_step_forecasts import NAME, SIZES, launch, on


def host(variant, seconds, metric="operator_time_s", **params):
    return Row(
        notebook="toy",
        experiment="operator_cost",
        variant=variant,
        metric=metric,
        value=seconds,
        n=30,
        ci_low=seconds,
        ci_high=seconds,
        params=params,
        limit_source="no limit: toy",
        check="toy",
        check_error=0.0,
        check_tolerance=1.0,
    )


@pytest.fixture
def context(tmp_path, monkeypatch):
    on("H200", monkeypatch)
    return toy_context("model_steps", SIZES, tmp_path, [upstream("gemm", "torch.mm", 1e6), *streams(), launch(1e-6)])


@pytest.mark.slow
def test_operators_are_rows_and_a_block_that_the_profile_leaves_out_says_so(tmp_path):
    rows = perform(toy_context("operator_cost", {"time_limit_s": 0.02}, tmp_path), tmp_path).rows
    found = by_params(rows, "operator_time_s", clock="host")
    assert set(found) == {PLAIN, CONVOLUTION} and all(row.ci_low <= row.value <= row.ci_high for row in found.values())
    (once,) = [row for row in rows if row.variant == ONCE]
    assert once.metric == "step_overhead_s" and once.ci_low <= once.value <= once.ci_high and once.check_error < 1
    (block,) = [row for row in rows if row.variant == BLOCK]
    assert block.value is None and "left out by this profile" in block.value_reason
    forecasts = experiment_named("operator_cost").forecast(toy_context("operator_cost", {"time_limit_s": 0.02}, tmp_path))
    assert {(f.variant, f.metric, f.dtype) for f in forecasts} == {(row.variant, row.metric, row.dtype) for row in rows}


def test_the_prediction_of_a_compiled_block_has_the_number_format_of_its_row(tmp_path):
    context = toy_context("operator_cost", {"time_limit_s": 0.02, "compiled": "bf16"}, tmp_path)
    (block,) = [one for one in experiment_named("operator_cost").forecast(context) if one.variant == BLOCK]
    assert block.dtype == "bf16"


def test_the_measured_cost_comes_before_launches_and_an_absent_one_does_not_count(context):
    assert operator_time(context)[0] == pytest.approx(4e-6)
    context.upstream.append(host(PLAIN, 32e-6))
    seconds, how = operator_time(context)
    assert seconds == 32e-6 and "measured in steps of tiny tensors" in how
    assert step_ceilings(context, "fp32")[0].convolution_time_s is None
    context.upstream.append(host(CONVOLUTION, 70e-6))
    assert step_ceilings(context, "fp32")[0].convolution_time_s == 70e-6
    context.upstream.append(
        Row(notebook="toy", experiment="operator_cost", variant=BLOCK, metric="block_time_s", value=None, value_reason="left out")
    )
    assert compiled_host(context, 2)[0].blocks == 0


def test_what_a_step_costs_once_enters_it_once_eager_and_compiled(context):
    variants = StepVariant("fp32"), StepVariant("fp32", compiled=True)
    context.upstream.extend([host(PLAIN, 1e-3), host(BLOCK, 2e-3, "block_time_s", kernels=28)])
    before = [forecast_reference_step(context, NAME, 2, variant)[1].estimate for variant in variants]
    context.upstream.append(host(ONCE, -1e-5, "step_overhead_s"))
    assert step_ceilings(context, "fp32")[0].step_overhead_s == 0.0, "less than nothing is noise"
    context.upstream.append(host(ONCE, 4e-4, "step_overhead_s"))
    after = [forecast_reference_step(context, NAME, 2, variant)[1] for variant in variants]
    assert [foretold.estimate for foretold in after] == pytest.approx([seconds + 4e-4 for seconds in before])
    assert all("400 us once" in foretold.basis for foretold in after)


def test_what_entering_compiled_blocks_costs_enters_their_steps(context):
    eager, compiled = StepVariant("fp32"), StepVariant("fp32", compiled=True)
    context.upstream.append(host(PLAIN, 20e-6))
    before = [forecast_reference_step(context, NAME, 2, variant)[1] for variant in (eager, compiled)]
    assert "taken for nothing" in before[1].basis
    context.upstream.append(host(BLOCK, 2e-3, "block_time_s", kernels=28))
    after = [forecast_reference_step(context, NAME, 2, variant)[1] for variant in (eager, compiled)]
    assert after[0].estimate == before[0].estimate
    # Two blocks, 2 ms each; in those are 28 launches of 10 us, which the step counts one by one. The host decides.
    assert compiled_host(context, 2)[0].entry_time_s == pytest.approx(2e-3 - 28 * 10e-6)
    assert "2 blocks entered" in after[1].basis and "the host's time decides" in after[1].basis
    assert 2 * 2e-3 <= after[1].estimate <= 2 * 2e-3 + 1e-3


@pytest.mark.slow
def test_a_sweep_of_batches_is_no_faster_than_the_host(context):
    sizes = {"precision": "fp32", "memory_limit_gib": 1, "time_limit_s": 0.1, "batches": {NAME: [1, 2]}}
    context = toy_context("batch_scaling", sizes, context.workspace, [*context.upstream, host(PLAIN, 1e-3)])
    _, two, one = experiment_named("batch_scaling").forecast(context)
    assert "the host's time" in one.basis
    for foretold, batch in ((one, 1), (two, 2)):
        alone = forecast_reference_step(context, NAME, batch, StepVariant("fp32"))[1]
        assert batch / foretold.estimate == pytest.approx(alone.estimate)
