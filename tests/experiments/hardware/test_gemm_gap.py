"""The gap's rows: factors multiply to the whole, the search's product beside the square, reasons where nothing is known."""

from dataclasses import replace
from math import prod

import pytest

from hyperion.chapter.context import Context
from hyperion.experiments.hardware import gemm_gap
from hyperion.experiments.hardware.gemm_gap import WHOLE
from hyperion.hardware import detect
from hyperion.results import Row
from tests.chapter.toy import perform, toy_context
from tests.hardware.machines import facts

SHAPE = {"m": 8192, "n": 4096, "k": 8192, "cache": "cold"}
TIMED = {"notebook": "hw", "n": 30, "limit_source": "no limit: toy", "check": "toy", "check_error": 0.0, "check_tolerance": 1.0}


def product(experiment, variant, tflops, dtype="bf16", clock=1500.0, **params):
    return Row(
        experiment=experiment,
        variant=variant,
        metric="gemm_tflops",
        dtype=dtype,
        value=tflops,
        ci_low=tflops,
        ci_high=tflops,
        clock_mhz=clock,
        params=SHAPE | params,
        **TIMED,
    )


def stream(gb_s):
    return Row(
        experiment="bandwidth",
        variant="copy",
        metric="bandwidth_gb_s",
        dtype="fp32",
        value=gb_s,
        ci_low=gb_s,
        ci_high=gb_s,
        params={"elements": 10**8, "cache": "cold"},
        **TIMED,
    )


def launch(seconds):
    return Row(
        experiment="launch_cost", variant="eager", metric="launch_time_s", value=seconds, ci_low=seconds, ci_high=seconds, **TIMED
    )


def on(machine, monkeypatch):
    device = detect(facts(machine))
    monkeypatch.setattr(Context, "device", property(lambda self: device))


def test_factors_multiply_to_measured_over_peak_in_every_format_and_product(tmp_path, monkeypatch):
    on("H200", monkeypatch)
    rows = [
        product("gemm", "torch.mm", 700.0),
        product("best_products", "fastest found", 780.0),
        product("gemm", "torch.mm", 50.0, "fp32"),
        stream(4300.0),
        launch(5e-6),
    ]
    found = perform(toy_context("gemm_gap", {}, tmp_path, rows), tmp_path).rows
    for dtype, of, tflops in (("bf16", "gemm", 700.0), ("bf16", "best_products", 780.0), ("fp32", "gemm", 50.0)):
        mine = [row for row in found if row.dtype == dtype and row.params["of"] == of]
        whole, *steps = mine
        assert whole.variant == WHOLE and whole.value == pytest.approx(tflops / whole.params["peak_tflops"])
        assert [row.params["step"] for row in mine] == list(range(6)) and steps[-1].variant == "unexplained"
        assert prod(row.value for row in steps if row.value is not None) == pytest.approx(whole.value, rel=1e-12)
        assert all(row.check_error <= 1e-9 == row.check_tolerance for row in mine if row.value is not None)
        clock = steps[0]
        assert clock.variant == "clock" and clock.value < 1 and "1500 MHz measured" in clock.limit_source
        assert steps[3].variant == "launch" and steps[3].value == 1  # a GPU's events time a full queue
    assert len(found) == 3 * 6


def test_a_slow_memory_takes_its_share(tmp_path, monkeypatch):
    on("H200", monkeypatch)
    rows = [product("gemm", "torch.mm", 5.0, m=8192, n=8192, k=16), stream(4000.0)]
    found = perform(toy_context("gemm_gap", {}, tmp_path, rows), tmp_path).rows
    memory = next(row for row in found if row.variant == "memory")
    assert memory.value < 0.1 and "4000 GB/s" in memory.limit_source


def test_on_a_cpu_the_launch_is_in_the_time(tmp_path):
    context = toy_context("gemm_gap", {}, tmp_path, [launch(1e-6)])
    assert gemm_gap._launch_time_s(context) == (1e-6 if context.device.kind == "cpu" else 0.0)
    assert gemm_gap._launch_time_s(replace(context, upstream=[])) == (None if context.device.kind == "cpu" else 0.0)


def test_without_peak_or_product_a_row_says_why(tmp_path, monkeypatch):
    on("RX 9070 XT", monkeypatch)
    absent = Row(
        notebook="hw",
        experiment="gemm",
        variant="torch.mm",
        metric="gemm_tflops",
        dtype="fp8",
        value=None,
        value_reason="unsupported: toy",
        params=SHAPE,
    )
    unknown = product("gemm", "torch.mm", 700.0, "int8")
    found = perform(toy_context("gemm_gap", {}, tmp_path, [absent, unknown, stream(500.0)]), tmp_path).rows
    assert found[0].value is None and found[0].value_reason == "unsupported: toy" and found[0].variant == WHOLE
    warm = [product("gemm", "torch.mm", 1.0, cache="hot")]
    hot = perform(toy_context("gemm_gap", {}, tmp_path / "hot", warm), tmp_path / "hot")
    assert [row.value_reason for row in hot.rows] == ["no product with a cold cache was measured"]


def test_a_run_without_products_has_no_rows(tmp_path):
    assert perform(toy_context("gemm_gap", {}, tmp_path, [stream(10.0)]), tmp_path).rows == []
