"""One product with other numbers: what each holds is declared and checked, ratios and energy come from the right samples."""

import numpy as np
import pytest
import torch

from hyperion.chapter import Context, experiment_named
from hyperion.experiments.hardware import operand_data
from hyperion.experiments.hardware.operand_data import DATA, layer_operands, make_products
from hyperion.hardware import Telemetry, detect
from hyperion.measure import DISTRIBUTIONS, Timing
from hyperion.measure.clock.timing import HarnessError
from hyperion.models import TransformerLM, named_config
from tests.chapter.toy import by_params, perform, toy_context
from tests.hardware.machines import facts

SIZES = {"dtype": "fp32", "size": 96, "model": "lm_d64_h4_l2", "time_limit_s": 0.05, "settle_s": 0.01, "alone_s": 0.02}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("operand_data")
    return perform(toy_context("operand_data", SIZES, folder), folder)


@pytest.mark.slow
@pytest.mark.parametrize("timed", ["in turn", "alone"])
def test_all_data_have_a_rate_and_all_but_the_usual_a_ratio(result, timed):
    rates = by_params(result.rows, "gemm_tflops", timed=timed)
    assert tuple(rates) == DATA and all(row.n >= 30 and row.params["cache"] == "hot" for row in rates.values())
    # Only turns taken are a speed-up.
    ratios = by_params(result.rows, "speedup" if timed == "in turn" else "rate_ratio", timed=timed, over="normal")
    assert set(ratios) == set(DATA) - {"normal"}
    for data, row in ratios.items():
        assert row.value == pytest.approx(rates[data].value / rates["normal"].value)
        assert row.limit is None and row.limit_source.startswith("no limit")


def test_energy_has_a_value_or_a_reason(result):
    energies = [row for row in result.rows if row.metric == "energy_j_per_tflop"]
    assert [row.variant for row in energies] == list(DATA)
    assert all((row.value is None) == bool(row.value_reason) for row in energies)


def test_every_product_holds_what_it_declares(tmp_path):
    products = make_products(toy_context("operand_data", SIZES, tmp_path))
    assert {data: product.verify_data().passed for data, product in products.items()} == dict.fromkeys(DATA, True)
    assert products["zeros"].a_MK.eq(0).all() and products["constant"].b_KN.eq(1).all()
    assert products["activations"].distinct_share > 0.5


def test_constant_numbers_under_the_name_of_normal_ones_are_caught(monkeypatch, tmp_path):
    monkeypatch.setitem(DISTRIBUTIONS, "normal", DISTRIBUTIONS["constant"])
    with pytest.raises(HarnessError, match="operands are normal"):
        perform(toy_context("operand_data", SIZES, tmp_path), tmp_path)


def test_activations_are_what_the_second_layer_of_an_mlp_is_fed(monkeypatch, tmp_path):
    kept = []
    monkeypatch.setattr(operand_data, "TransformerLM", lambda config: kept.append(TransformerLM(config)) or kept[0])
    a_MK, b_KN = layer_operands(toy_context("operand_data", SIZES, tmp_path))
    (model,) = kept
    layer = model.blocks[1].mlp.down
    assert a_MK.shape == b_KN.shape == (96, 96) and torch.equal(b_KN[:, :64], layer.weight.T[:96])
    # What GELU leaves is never below -0.17, and has values of both signs.
    assert a_MK.min() > -0.171 and a_MK.min() < 0 < a_MK.max()


def test_small_activations_are_repeated_and_large_ones_cut(tmp_path):
    config = named_config("lm_d64_h4_l2")
    tokens, width = config.context, 4 * config.width
    a_MK, _ = layer_operands(toy_context("operand_data", SIZES | {"size": 8 * tokens + width}, tmp_path))
    assert torch.equal(a_MK[:width, :width], a_MK[8 * tokens :, :width]), "eight sequences, then again"
    assert torch.equal(a_MK[:, :width], a_MK[:, width : 2 * width]) and not torch.equal(a_MK[:width], a_MK[width : 2 * width])


def timing(seconds, cold=False, **state):
    telemetry = Telemetry(samples=20, window_s=2.0, interval_s=0.1, power_scope="device" if state else None, **state)
    return Timing(np.full(40, seconds), (seconds,), True, cold, "interval", telemetry)


def test_energy_is_that_of_each_alone_and_ratios_are_taken_among_samples_timed_alike(monkeypatch, tmp_path):
    """Injected readings: 400 W alone with zeros, which are done in half the time; 600 W with all others; 500 W in turn."""
    alone = iter([timing(1e-3, power_w=400.0, clock_mhz=1980.0)] + [timing(2e-3, power_w=600.0, clock_mhz=1500.0)] * 4)
    in_turn = [timing(3e-3, power_w=500.0, clock_mhz=1600.0)] * len(DATA)
    monkeypatch.setattr(operand_data, "time_interleaved", lambda *args, **options: in_turn)
    monkeypatch.setattr(operand_data, "time_function", lambda *args, **options: next(alone))
    rows = perform(toy_context("operand_data", SIZES, tmp_path), tmp_path).rows
    tera = 2 * 96**3 / 1e12
    energies = by_params(rows, "energy_j_per_tflop", power_of="device")
    assert energies["zeros"].value == pytest.approx(400 * 1e-3 / tera)
    assert energies["normal"].value == pytest.approx(600 * 2e-3 / tera)
    assert by_params(rows, "rate_ratio", timed="alone")["zeros"].value == pytest.approx(2)
    assert by_params(rows, "speedup", timed="in turn")["zeros"].value == pytest.approx(1)
    rates = by_params(rows, "gemm_tflops", timed="alone")
    assert (rates["zeros"].power_w, rates["normal"].clock_mhz) == (400.0, 1500.0)


def test_a_roofline_foretells_no_difference(monkeypatch, tmp_path):
    monkeypatch.setattr(Context, "device", property(lambda self: detect(facts("H200"))))
    sizes = SIZES | {"dtype": "bf16", "size": 8192}
    forecasts = experiment_named("operand_data").forecast(toy_context("operand_data", sizes, tmp_path))
    assert (forecasts[0].variant, forecasts[0].metric, forecasts[0].params["timed"]) == ("zeros", "rate_ratio", "alone")
    assert {f.estimate for f in forecasts if f.metric in ("speedup", "rate_ratio")} == {1.0}
    rates = [f for f in forecasts if f.metric == "gemm_tflops"]
    assert [f.ceiling for f in rates] == pytest.approx([1070.53] * 2 * len(DATA), rel=1e-4)
    assert len({f.estimate for f in rates}) == 1 and 0.6 < rates[0].estimate / rates[0].ceiling < 0.9


def test_every_forecast_meets_a_row(result, tmp_path):
    for foretold in experiment_named("operand_data").forecast(toy_context("operand_data", SIZES, tmp_path)):
        rows = [row for row in result.rows if (row.variant, row.metric) == (foretold.variant, foretold.metric)]
        assert len([row for row in rows if foretold.params.items() <= row.params.items()]) == 1


def test_an_unsupported_format_is_rows_with_the_reason(tmp_path):
    rows = perform(toy_context("operand_data", SIZES | {"dtype": "tf32"}, tmp_path), tmp_path).rows
    assert {row.variant for row in rows} == set(DATA) and all("unsupported: TF32" in row.value_reason for row in rows)
    assert experiment_named("operand_data").forecast(toy_context("operand_data", SIZES | {"dtype": "tf32"}, tmp_path)) == []


def test_what_does_not_fit_is_rows_with_the_reason(monkeypatch, tmp_path):
    def full(context):
        raise torch.OutOfMemoryError("tried to allocate 9 GiB\nmore")

    monkeypatch.setattr(operand_data, "layer_operands", full)
    rows = perform(toy_context("operand_data", SIZES, tmp_path), tmp_path).rows
    assert all(row.value_reason == "out of memory: tried to allocate 9 GiB" for row in rows) and len(rows) == 2 * len(DATA)
