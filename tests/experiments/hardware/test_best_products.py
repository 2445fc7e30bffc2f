"""The fastest product of each format: its rows agree with each other, and what cannot be measured says why."""

from dataclasses import replace

import pytest
import torch

from hyperion.chapter import Context, experiment_named
from hyperion.experiments.hardware import best_products
from hyperion.hardware import detect
from hyperion.measure import RefusedProduct, Verification
from hyperion.results import Row
from tests.chapter.toy import perform, toy_context
from tests.hardware.machines import facts

SHAPES = [{"name": "a small layer", "m": 64, "n": 192, "k": 64}, {"name": "its way back", "m": 64, "n": 64, "k": 192}]
SIZES = {
    "dtypes": ["fp32", "tf32", "bf16"],
    "largest": 128,
    "step": 64,
    "search_limit_s": 0.3,
    "time_limit_s": 0.02,
    "exhaustive": False,
    "shapes": SHAPES,
    "plain_loop": ["bf16"],
    "plain_loop_calls": 2,
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("best_products")
    return perform(toy_context("best_products", SIZES, folder), folder)


def rows_of(result, variant, dtype):
    return [row for row in result.rows if (row.variant, row.dtype) == (variant, dtype)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_fastest_is_a_finalist_and_says_what_was_seen(result, dtype):
    (fastest,) = rows_of(result, "fastest found", dtype)
    finalists = rows_of(result, "finalist", dtype)
    shape = {name: fastest.params[name] for name in ("m", "n", "k", "cache", "data")}
    assert (shape["cache"], shape["data"]) == ("cold", "normal")
    same = next(row for row in finalists if row.params == shape)
    assert (fastest.value, fastest.ci_low, fastest.n) == (same.value, same.ci_low, same.n) and fastest.n >= 30
    assert len(finalists) <= fastest.params["seen"] <= fastest.params["shapes"] == 8
    assert (fastest.params["stopped"] == "all shapes seen") == (fastest.params["seen"] == 8)


def test_the_fastest_is_held_against_the_librarys_own_call_where_it_is_asked_for(result):
    (row,) = [row for row in result.rows if row.metric == "speedup"]
    (fastest,) = rows_of(result, "fastest found", "bf16")
    assert row.dtype == "bf16" and row.params["plain_loop"] == "torch.mm" and row.n >= 30 and row.ci_low < row.value < row.ci_high
    assert all(row.params[name] == fastest.params[name] for name in "mnk") and row.check_error <= row.check_tolerance


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_given_shapes_are_measured_in_every_format(result, dtype):
    given = rows_of(result, "given shape", dtype)
    assert [row.params["shape"] for row in given] == [shape["name"] for shape in SHAPES]
    assert [(row.params["m"], row.params["n"], row.params["k"]) for row in given] == [(64, 192, 64), (64, 64, 192)]
    assert all(row.value > 0 and row.check == "float64 slice" for row in given)


def test_the_fastest_square_product_of_chapter_1_1_is_a_finalist(tmp_path):
    # 48 is no multiple of the step, so the search itself cannot choose this shape; 256 is larger than the largest size.
    common = {"notebook": "nb", "experiment": "gemm", "variant": "torch.mm", "metric": "gemm_tflops"}
    squares = [
        Row(**common, value=value, dtype=dtype, params={"m": n, "n": n, "k": n, "cache": "cold"})
        for dtype, n, value in (("fp32", 48, 2.0), ("fp32", 32, 1.0), ("bf16", 256, 2.0))
    ]
    sizes = SIZES | {"dtypes": ["fp32", "bf16"], "shapes": [], "plain_loop": []}
    result = perform(toy_context("best_products", sizes, tmp_path, upstream=squares), tmp_path)
    cubes = {(r.dtype, r.params["m"]) for r in rows_of(result, "finalist", "fp32") + rows_of(result, "finalist", "bf16")}
    assert ("fp32", 48) in cubes and ("fp32", 32) not in cubes and ("bf16", 256) not in cubes
    assert experiment_named("best_products").reads == ("gemm",)


def test_what_the_device_does_not_multiply_is_one_row_with_the_reason(result):
    (row,) = [row for row in result.rows if row.dtype == "tf32"]
    assert row.variant == "fastest found" and row.value is None and "unsupported: TF32" in row.value_reason


def test_the_samples_of_every_measured_product_are_kept(result):
    counted = result.samples.groupby(["variant", "dtype", "params"]).size()
    for row in result.rows:
        if row.value is not None and row.variant != "fastest found":
            assert row.n in counted[row.variant, row.dtype].to_list()
    assert set(result.samples["variant"]) == {"finalist", "given shape", "fastest over a plain loop"}


def test_a_roofline_foretells_the_largest_square_and_each_given_shape(monkeypatch, tmp_path):
    monkeypatch.setattr(Context, "device", property(lambda self: detect(facts("H200"))))
    thin = {"name": "one token", "m": 16, "n": 8192, "k": 8192}
    sizes = SIZES | {"dtypes": ["fp8", "bf16", "int8"], "largest": 8192, "step": 1024, "shapes": [thin]}
    forecasts = experiment_named("best_products").forecast(toy_context("best_products", sizes, tmp_path))
    by_variant = {(f.variant, f.dtype): f for f in forecasts}
    assert by_variant["fastest found", "fp8_e4m3fn"].ceiling == pytest.approx(2141.1, rel=1e-3)
    assert by_variant["fastest found", "bf16"].ceiling == pytest.approx(1070.5, rel=1e-3)
    assert 0.6 < by_variant["fastest found", "bf16"].estimate / 1070.5 < 0.9
    given = by_variant["given shape", "bf16"]
    # Memory bounds it: 2·M·N·K over the bytes of both operands and of the output, at 4800 GB/s.
    traffic = 2 * ((16 + 8192) * 8192 + 16 * 8192)
    assert 0 < given.estimate < 2 * 16 * 8192**2 / traffic * 4.8
    assert given.params["shape"] == "one token" and "published 4800 GB/s" in given.basis


def test_without_a_data_sheet_nothing_is_foretold(monkeypatch, tmp_path):
    unknown = replace(detect(facts("H200")), name="NVIDIA Unheard-of")
    monkeypatch.setattr(Context, "device", property(lambda self: unknown))
    forecasts = experiment_named("best_products").forecast(toy_context("best_products", SIZES, tmp_path))
    assert forecasts and all(f.estimate is None and "no data sheet entry" in f.basis for f in forecasts)


def test_every_forecast_meets_a_row(result, tmp_path):
    for foretold in experiment_named("best_products").forecast(toy_context("best_products", SIZES, tmp_path)):
        met = [row for row in rows_of(result, foretold.variant, foretold.dtype) if foretold.params.items() <= row.params.items()]
        assert len(met) == 1


@pytest.mark.parametrize("error", [RefusedProduct("no kernel for it"), torch.OutOfMemoryError("tried to allocate 9 GiB")])
def test_a_search_that_is_refused_leaves_a_row_and_the_given_shapes(monkeypatch, tmp_path, error):
    def refuse(*args, **options):
        raise error

    monkeypatch.setattr(best_products, "search_gemm", refuse)
    rows = perform(toy_context("best_products", SIZES | {"dtypes": ["fp32"]}, tmp_path), tmp_path).rows
    assert rows[0].value is None and ("no kernel" in rows[0].value_reason or "out of memory" in rows[0].value_reason)
    assert [row.variant for row in rows[1:]] == ["given shape"] * 2 and all(row.value for row in rows[1:])


def test_a_finalist_that_multiplies_wrongly_has_no_rate(monkeypatch, tmp_path):
    search = best_products.search_gemm

    def one_wrong(*args, **options):
        found = search(*args, **options)
        wrong, right = (replace(found.finalists[0], shape=(side, side, side)) for side in (128, 64))
        return replace(found, finalists=(replace(wrong, verification=Verification("float64 slice", 0.5, 1e-5)), right))

    monkeypatch.setattr(best_products, "search_gemm", one_wrong)
    rows = perform(toy_context("best_products", SIZES | {"dtypes": ["fp32"], "shapes": []}, tmp_path), tmp_path).rows
    fastest, wrong, right = rows
    assert fastest.params["m"] == 64 and fastest.value == right.value
    assert wrong.value is None and "wrong output: relative error 0.5" in wrong.value_reason
