"""A batch sweep ends in a batch that is refused: a row, foretold from two that fitted."""

import pytest
import torch

from hyperion.chapter import Context
from hyperion.experiments.steps import batch_scaling as experiment
from hyperion.models import reference_model
from hyperion.results import RowError, Run

NAME = "encoder_d128_h2_l2"
SIZES = {"precision": "auto", "memory_limit_gib": 0.09, "time_limit_s": 0.02, "batches": {NAME: [1, 48, 96]}}


@pytest.fixture
def context(tmp_path):
    return Context(notebook="toy", experiment="batch_scaling", sizes=SIZES, workspace=tmp_path / "work")


@pytest.mark.process
@pytest.mark.long
def test_the_sweep_ends_in_a_row_for_the_batch_that_was_refused(context, tmp_path):
    result = experiment.run(context, lambda done, total, note: None)
    run = Run.create(tmp_path / "run", {})
    run.record("toy", "batch_scaling", result.rows, result.samples, input_hash="toy")  # every row obeys its metric's rules
    rates = {row.params["batch"]: row for row in result.rows if row.metric == "samples_per_s"}
    assert list(rates) == [1, 48, 96] and all(row.n >= 30 and row.check for row in rates.values())
    shares = {row.params["batch"]: row.value for row in result.rows if row.metric == "batch_efficiency"}
    best = max(rates, key=lambda batch: rates[batch].value)
    assert max(shares.values()) == shares[best] == 1.0
    assert shares[1] == pytest.approx(rates[1].value / rates[best].value)
    largest = next(row for row in result.rows if row.metric == "count")
    if largest.value is None:
        pytest.skip(largest.value_reason)
    fitted, refused = (row for row in result.rows if row.params.get("step") == "probe")
    assert fitted.params["batch"] < largest.value < refused.params["batch"]
    assert fitted.value > fitted.limit and refused.value is None
    assert refused.value_reason.startswith("out of memory: ") and "DefaultCPUAllocator" in refused.value_reason


class _Device:
    """Memory that grows in a straight line and is granted up to a cap."""

    def __init__(self, grants_gib, slope_gib=1e-4):
        self.grants_gib, self.slope_gib, self.asked = grants_gib, slope_gib, []

    def fill(self, context, batches):
        sweep = experiment._Sweep(context, reference_model(NAME))
        sweep.used = self.used
        sweep.fill_memory(batches)
        return sweep

    def used(self, batch, kind):
        self.asked.append((batch, kind))
        gib = 0.01 + self.slope_gib * batch
        granted = gib if gib <= self.grants_gib else None
        return experiment.Point(batch, granted, SIZES["memory_limit_gib"], "" if granted else "out of memory: full")


def count_of(sweep):
    return next(row for row in sweep.rows if row.metric == "count")


def test_the_line_is_put_to_the_test_on_both_sides(context):
    device = _Device(grants_gib=0.09)
    sweep = device.fill(context, [1, 8, 16])
    foretold = experiment.forecast(context)[0].estimate
    assert device.asked[3:] == [(int(foretold / 2), "half way"), (600, "probe"), (1000, "probe")]
    assert count_of(sweep).value == pytest.approx(800, abs=1)
    count_of(sweep).validate()
    assert next(row for row in sweep.rows if row.metric == "sample_memory_mib").value == pytest.approx(0.1024)


@pytest.mark.parametrize("grants_gib", [0.05, 9.0], ids=["refused too early", "never refused"])
def test_a_wrong_verdict_refuses_the_row(context, grants_gib):
    with pytest.raises(RowError, match="wrong verdicts"):
        count_of(_Device(grants_gib).fill(context, [1, 8, 16])).validate()


@pytest.mark.parametrize(
    "device, batches, reason",
    [(_Device(0.0105), [1, 8, 16], "no line"), (_Device(9.0), [500], "no line"), (_Device(9.0, 0.0), [8, 16], "no slope")],
)
def test_without_a_line_there_is_no_largest_batch_and_the_row_says_why(context, device, batches, reason):
    sweep = device.fill(context, batches)
    assert count_of(sweep).value is None and reason in count_of(sweep).value_reason


@pytest.mark.slow
def test_a_batch_out_of_memory_ends_the_timed_sweep_and_is_a_row(context, monkeypatch):
    forward = torch.nn.TransformerEncoder.forward

    def small_device(self, inputs):
        if len(inputs) > 48:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return forward(self, inputs)

    monkeypatch.setattr(torch.nn.TransformerEncoder, "forward", small_device)
    sweep = experiment._Sweep(context, reference_model(NAME))
    sweep.time_batches([1, 48, 96, 192])
    assert [row.params["batch"] for row in sweep.rows if row.metric == "batch_efficiency"] == [1, 48]
    ended = [row for row in sweep.rows if row.metric == "samples_per_s" and row.value is None]
    assert [row.params["batch"] for row in ended] == [96]
    assert ended[0].value_reason == "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB."


def test_another_error_is_no_out_of_memory(context, monkeypatch):
    monkeypatch.setattr(torch.nn.TransformerEncoder, "forward", lambda self, inputs: inputs @ inputs)
    with pytest.raises(RuntimeError, match="[Ee]xpected"):
        experiment._Sweep(context, reference_model(NAME)).time_batches([3])


def test_the_largest_batch_is_forecast_first_from_shapes(context):
    forecasts = experiment.forecast(context)
    model = reference_model(NAME)
    a_sample = 8 * model.activations + 4 * 16 * 128
    assert (forecasts[0].metric, forecasts[0].params) == ("count", {"what": "largest batch"})
    assert forecasts[0].estimate == pytest.approx((0.09 * 2**30 - 16 * model.parameter_count) / a_sample)
    assert [forecast.params["batch"] for forecast in forecasts[1:]] == [96, 48, 1]
