"""Sentences about readings that differ between machines say what the rows say, and explain a difference by the rows alone."""

import pytest

from hyperion.experiments.hardware.figures import explanations
from hyperion.experiments.hardware.sentences import (
    copies_of_one_size,
    faster_at_equal_clock,
    formats_of_one_peak,
    memory_levels,
    square_beside_search,
)
from hyperion.paths import reference_folder
from hyperion.results import Row, Run

MIB, LAUNCHING = 2**20, "no limit: mostly launching (one element takes 1 of these 2 us)"


def row(experiment, variant, metric, value, dtype="", **columns):
    common = {"notebook": "nb", "experiment": experiment, "variant": variant, "metric": metric}
    return Row(**common, value=value, dtype=dtype, **columns)


def product(experiment, variant, value, clock_mhz=None, side=4096, dtype="bf16", **columns):
    params = {"m": side, "n": side, "k": side, "cache": "cold"}
    return row(experiment, variant, "gemm_tflops", value, dtype, params=params, clock_mhz=clock_mhz, **columns)


def squares_and_search(square, found, *finalists):
    return [product("gemm", "torch.mm", *square), product("best_products", "fastest found", *found, side=7168), *finalists]


def test_a_search_that_is_as_fast_as_the_square_product_needs_no_explanation():
    again = product("best_products", "finalist", 740.0)
    text = square_beside_search(squares_and_search((772.0, 1965.0), (769.0, 1620.0), again), "bf16")
    assert "M = N = K = 4,096" in text and "the same product reaches 740 TFLOPS" in text
    assert text.endswith("The search found 769 TFLOPS, 0.4 % less. Two measurements can differ by this much.")
    assert square_beside_search(squares_and_search((772.0,), (780.0,)), "bf16").endswith("The search found 780 TFLOPS.")


@pytest.mark.parametrize(
    ("clocks", "says"),
    [
        ((1965.0, 1880.0), "So the clock explains the difference."),
        ((1965.0, 1960.0), "does not explain the difference, or not all of it."),
        ((1965.0, 1515.0), "does not explain the difference, or not all of it."),
        ((None, 1515.0), "The clock was not read"),
    ],
)
def test_a_slower_search_is_explained_by_the_clock_or_not(clocks, says):
    text = square_beside_search(squares_and_search((756.0, clocks[0]), (723.0, clocks[1])), "bf16")
    assert "723 TFLOPS, 4.4 % less." in text and says in text


@pytest.mark.parametrize(
    ("best_clock", "clock", "value", "is_faster"),
    [
        (1680.0, 1965.0, 57.5, False),  # measured on an H200 in fp64: 14 % less for each GHz than the search's 55.1
        (1680.0, 1680.0, 57.5, True),
        (1680.0, 1680.0, 56.5, False),  # within 3 %
        (1965.0, 1680.0, 50.0, True),
        (None, 1965.0, 57.5, True),
        (1680.0, None, 57.5, True),
    ],
)
def test_a_given_shape_is_compared_with_the_search_at_equal_clock(best_clock, clock, value, is_faster):
    best = product("best_products", "fastest found", 55.1, best_clock, ci_low=54.9, ci_high=55.4)
    given = product("best_products", "given shape", value, clock, ci_low=value - 0.04, ci_high=value + 0.04)
    unmeasured = product("best_products", "given shape", None, clock)
    assert faster_at_equal_clock([given, unmeasured], best) == ([given] if is_faster else [])


def test_without_one_of_the_two_chapters_nothing_is_compared():
    assert square_beside_search([product("gemm", "torch.mm", 756.0)], "bf16") == ""
    assert square_beside_search(squares_and_search((756.0,), (723.0,)), "fp16") == ""


def level(operation, mib, value, launching=False, timed="in a graph, on the device's clock", experiment="memory_levels"):
    params = {"working_set_bytes": mib * MIB, "cache": "hot", "timed": timed}
    source = LAUNCHING if launching else "no limit: another level"
    limit = 4800.0 if mib > 1024 else None
    return row(experiment, operation, "bandwidth_gb_s", value, "fp32", params=params, limit=limit, limit_source=source)


CACHE = row("memory_levels", "last-level cache", "cache_bytes", 60 * MIB, params={"caches": 1})


def test_a_curve_that_falls_shows_the_end_of_the_caches():
    (text,) = memory_levels([CACHE, level("copy", 32, 5872.0), level("copy", 2048, 4200.0)])
    assert "5,872 GB/s, with a working set of 32 MiB" in text and "With the largest, 2 GiB, it is 4,200 GB/s" in text
    assert text.endswith("so the curve shows their end.")


@pytest.mark.parametrize(("launching", "why"), [(False, "the kernel, which has too little work"), (True, "so launches must be")])
def test_a_curve_that_rises_shows_no_cache_and_says_why(launching, why):
    (text,) = memory_levels([CACHE, level("read", 32, 2817.0, launching), level("read", 2048, 4392.0)])
    assert "2 GiB, which fits into no cache" in text and "2,817 GB/s at most, with 32 MiB" in text and why in text
    assert text.endswith("does not show the bandwidth of the caches.")


def test_without_known_caches_no_end_is_claimed():
    (text,) = memory_levels([level("read", 1, 90.0), level("read", 64, 20.0)])
    assert "sizes of the caches are not known" in text and "end" not in text


def stream(value, limit=4800.0):
    params = {"elements": 2**28, "cache": "cold"}
    return row("stream_formats", "copy", "bandwidth_gb_s", value, "fp32", params=params, limit=limit)


def test_copies_of_two_experiments_agree_or_their_difference_is_explained():
    assert copies_of_one_size([stream(4268.0), level("copy", 2048, 4200.0)]).endswith("The two agree.")
    text = copies_of_one_size([stream(4268.0), level("copy", 512, 4218.0), level("copy", 2048, 2766.0)])
    assert "With 512 MiB, the repeated copy still reaches 4,218 GB/s" in text and "not the reason, but the graph" in text
    alone = copies_of_one_size([stream(4268.0), level("copy", 2048, 2766.0, timed="call by call, on the device's clock")])
    assert "graph" not in alone and "differ" in alone and copies_of_one_size([stream(4268.0)]) == ""


def test_copies_that_a_cache_may_serve_are_not_compared():
    assert copies_of_one_size([stream(1.0, limit=None), level("copy", 2048, 5.0)]) == ""
    assert copies_of_one_size([stream(4268.0), level("copy", 64, 9000.0)]) == ""


def test_the_reference_of_two_gpus_explains_its_contradictions():
    rows = Run.open(reference_folder() / "h200x2").rows()
    assert "For each GHz of clock" in square_beside_search(rows, "fp16")
    assert "not the reason, but the graph" in copies_of_one_size(rows)
    read, copied = memory_levels([row for row in rows if row.experiment == "memory_levels"])
    assert "does not show the bandwidth of the caches" in read and "so the curve shows their end" in copied


@pytest.mark.parametrize(
    ("fp16", "clock_mhz", "says"),
    [
        (745.0, 1980.0, "Two measurements can differ by this much."),
        (600.0, 1584.0, "So the clock explains the difference."),
        # Measured on an H100: the recorded clock of a short series would explain more than the whole difference.
        (678.0, 1455.0, "the reading may be from another moment."),
        (600.0, 1980.0, "the reading may be from another moment."),
        (600.0, None, "The clock was not read."),
    ],
)
def test_two_formats_of_one_peak_are_explained_by_their_clocks_or_not(fp16, clock_mhz, says):
    limited = {"limit": 1071.0, "limit_source": "16-bit: 132 x 4096 ops/clock x 1980 MHz; a paper"}
    rows = [
        product("gemm", "torch.mm", 750.0, 1980.0, dtype="bf16", power_w=500.0, **limited),
        product("gemm", "torch.mm", 100.0, 1980.0, dtype="bf16", side=512, **limited),
        product("gemm", "torch.mm", fp16, clock_mhz, dtype="fp16", throttle="sw_power_cap", **limited),
        product("gemm", "torch.mm", 1300.0, 1980.0, dtype="fp8_e4m3fn", limit=2141.0),
    ]
    one, accumulation = formats_of_one_peak(rows)
    assert (
        "bf16 product reaches 750 TFLOPS at 1,980 MHz and 500 W, and" in one
        and ("at the power limit" in one) == (clock_mhz is not None and clock_mhz < 1980)
        and one.endswith(says)
    )
    assert "float32" in accumulation and formats_of_one_peak(rows[:1]) == []


def test_the_pages_of_a_run_explain_its_contradictions():
    rows = [row for row in Run.open(reference_folder() / "h200x2").rows() if row.value is not None]
    assert "bf16 and fp16" in explanations("gemm", rows)[0] and "bf16" in explanations("best_products", rows)[0]
    assert "fp8_e4m3fn and int8" in explanations("best_products", rows)[-2] and "fp8" in explanations("best_products", rows)[-1]
    assert any("copy" in text for text in explanations("memory_levels", rows))
    assert "The two differ" in explanations("stream_formats", rows)[0] and explanations("transfers", rows) == []
