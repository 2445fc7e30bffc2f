"""TAF of captured steps at toy sizes: rows add up by hand, and what cannot be done is said."""

from dataclasses import replace

import pytest

from hyperion.chapter import experiment_named
from hyperion.chapter.rows import maf_row
from hyperion.errors import HyperionError
from hyperion.measure.products.dispatch import products_of
from hyperion.models import flops_per_token, named_config
from hyperion.results import Row
from hyperion.workloads.reference_steps import captured_step
from tests.chapter.toy import perform, toy_context

MODEL, LANGUAGE = "encoder_d128_h2_l2", "lm_d64_h4_l2"
SIZES = {"models": [MODEL], "dtypes": ["fp32"], "batch_size": 2, "sequences": 1, "time_limit_s": 1.0}
SHAPE = {"m": 256, "n": 256, "k": 256, "cache": "cold"}


def upstream(experiment, variant, tflops, dtype="fp32", **params):
    return Row(
        notebook="hw",
        experiment=experiment,
        variant=variant,
        metric="gemm_tflops",
        dtype=dtype,
        value=tflops,
        n=30,
        ci_low=0.9 * tflops,
        ci_high=1.1 * tflops,
        params=SHAPE | params,
        limit_source="no limit: toy",
        check="toy",
        check_error=0.0,
        check_tolerance=1.0,
    )


def streams():
    return [
        Row(
            notebook="hw",
            experiment="bandwidth",
            variant="copy",
            metric="bandwidth_gb_s",
            dtype="fp32",
            value=10.0,
            n=30,
            ci_low=9.0,
            ci_high=11.0,
            params={"elements": elements, "cache": "cold"},
            limit_source="no limit: toy",
            check="toy",
            check_error=0.0,
            check_tolerance=1.0,
        )
        for elements in (10**6, 10**7)
    ]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model_products")
    rows = [upstream("gemm", "torch.mm", 5.0), upstream("best_products", "fastest found", 8.0)]
    return perform(toy_context("model_products", SIZES, folder, rows), folder).rows


@pytest.mark.slow
def test_taf_lies_between_its_products_and_says_how_much_it_knows(measured):
    taf = next(row for row in measured if row.metric == "taf_tflops")
    products = [row for row in measured if row.metric == "gemm_tflops"]
    assert taf.variant == MODEL and taf.params == {"batch": 2} and taf.n >= 30
    assert taf.ci_low <= max(row.ci_high for row in products) and taf.value > 0
    covered = next(row for row in measured if row.params.get("what") == "FLOPs timed")
    assert 0 < covered.value <= 1 and sum(row.params["share"] for row in products) <= covered.value + 0.001
    assert taf.check_error <= taf.check_tolerance


def test_a_product_row_has_the_share_that_its_sizes_and_count_give(measured):
    total = sum(p.flops for call in captured_step(MODEL, 2, "fp32") for p in products_of(call) or ())
    rows = [row for row in measured if row.metric == "gemm_tflops"]
    assert rows and rows[0].params["share"] == max(row.params["share"] for row in rows)
    for row in rows:
        p = row.params
        flops = 2 * p["products"] * p["m"] * p["n"] * p["k"] * p["count"]
        assert p["share"] == pytest.approx(flops / total, abs=1e-4) and p["precision"] == row.dtype == "fp32"


def test_shares_are_of_the_fastest_product_that_the_search_found(measured):
    taf = next(row for row in measured if row.metric == "taf_tflops")
    share = next(row for row in measured if row.params.get("what") == "TAF / MAF")
    assert share.value == pytest.approx(taf.value / 8.0) and share.params["maf"] == "best_products"
    assert share.ci_low == pytest.approx(taf.ci_low / 8.8) and share.ci_high == pytest.approx(taf.ci_high / 7.2)
    whole = next(row for row in measured if row.params.get("what") == "MAF / peak")
    assert (whole.value is None) == bool(whole.value_reason)
    if whole.value is not None:
        assert whole.value == pytest.approx(8.0 / whole.params["peak_tflops"])


def test_maf_is_that_of_the_search_else_the_best_square_and_never_a_warm_one():
    square, hot = upstream("gemm", "torch.mm", 5.0), upstream("gemm", "torch.mm", 50.0, cache="hot")
    found, finalist = upstream("best_products", "fastest found", 4.0), upstream("best_products", "finalist", 4.5)
    assert maf_row([square, hot], "fp32") is square and maf_row([square, hot, finalist, found], "fp32") is found
    assert maf_row([hot], "fp32") is None and maf_row([square], "bf16") is None


def test_without_upstream_rows_the_shares_say_so_and_nothing_is_foretold(tmp_path):
    context = toy_context("model_products", SIZES | {"dtypes": ["int8"]}, tmp_path)
    [foretold] = experiment_named("model_products").forecast(replace(context, sizes=SIZES))
    assert foretold.estimate is None and "no estimate" in foretold.basis
    if not context.device.supports("int8")[0]:
        rows = perform(context, tmp_path).rows
        assert [row.value for row in rows] == [None] and rows[0].value_reason.startswith("unsupported")


def test_a_forecast_is_the_flops_over_the_time_of_products_at_measured_rates(tmp_path):
    context = toy_context("model_products", SIZES, tmp_path, [upstream("gemm", "torch.mm", 0.001), *streams()])
    [slow] = experiment_named("model_products").forecast(context)
    assert 0 < slow.ceiling <= 0.001 * 1.01 and slow.params == {"batch": 2} and "10 GB/s" in slow.basis
    context = toy_context("model_products", SIZES, tmp_path, [upstream("gemm", "torch.mm", 1e6), *streams()])
    [bound] = experiment_named("model_products").forecast(context)
    assert 0.01 < bound.ceiling < 10  # at 10 GB/s the memory holds every product back


def test_a_language_model_is_captured_at_its_whole_context():
    config = named_config(LANGUAGE)
    products = [p for call in captured_step(LANGUAGE, 1, "fp32") for p in products_of(call) or ()]
    attention = sum(p.flops for p in products if p.kind == "attention")
    flops = flops_per_token(config).forward_backward * config.context
    # Attention's backward works its scores out anew, one product of seven, which the convention leaves out.
    assert sum(p.flops for p in products) == pytest.approx(flops + attention / 7, rel=1e-3)


def test_a_step_in_bf16_has_products_in_bf16():
    dtypes = {p.dtype for call in captured_step(MODEL, 2, "bf16") for p in products_of(call) or ()}
    assert dtypes == {"bf16"}


def test_a_step_in_tf32_is_not_captured_as_one_in_bf16():
    with pytest.raises(HyperionError, match="a step cannot be captured in tf32"):
        captured_step(MODEL, 2, "tf32")
