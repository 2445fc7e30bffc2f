"""Rows of a context: with an estimate's interval, without a value, with an error as value; and contexts for other processes."""

import json
from dataclasses import replace

import pytest

from hyperion.chapter.rows import CACHE_MULTIPLE, bandwidth_limit, wrong_product
from hyperion.chapter.variants import packed, restored
from hyperion.hardware import DTYPES, ROW_DTYPES, detect
from hyperion.measure import Verification
from hyperion.results import Estimate, Metric, RowError
from hyperion.results.places import stored_references
from tests.chapter.toy import toy_context
from tests.hardware.machines import facts


def test_an_estimate_gives_its_interval_and_an_absent_value_its_reason(tmp_path):
    context = toy_context("toy", {}, tmp_path)
    row = context.row("model", "accuracy", Estimate(0.5, 0.4, 0.6, 30), dtype="fp32")
    assert (row.value, row.n, row.ci_low, row.ci_high, row.dtype) == (0.5, 30, 0.4, 0.6, "fp32")
    absent = context.absent_row("model", "accuracy", "no images")
    assert (absent.value, absent.value_reason, absent.experiment) == (None, "no images", "toy")


def test_the_value_of_an_error_is_what_its_check_judges(tmp_path):
    row = toy_context("toy", {}, tmp_path).error_row("model", "relative_difference", 0.2, "losses of one device", 0.1)
    assert (row.value, row.check, row.check_error, row.check_tolerance) == (0.2, "losses of one device", 0.2, 0.1)
    assert row.without_failed_value().value is None


@pytest.mark.parametrize("make", ["row", "absent_row", "error_row"])
def test_a_dtype_that_is_no_known_number_format_is_refused_with_the_known_ones(tmp_path, make):
    context = toy_context("toy", {}, tmp_path)
    arguments = {"row": (1.0,), "absent_row": ("no memory",), "error_row": (0.1, "losses of one device", 0.2)}[make]
    with pytest.raises(RowError, match="dtype is 'floaty', which is no known number format") as refused:
        getattr(context, make)("model", "count", *arguments, dtype="floaty")
    assert all(name in refused.value.next_step for name in ("bf16", "nf4", "params"))
    with pytest.raises(RowError, match="'bfloat16'") as refused:
        context.row("model", "count", 1.0, dtype="bfloat16")
    assert "bf16 (similar)" in refused.value.next_step
    for dtype in ("", *ROW_DTYPES):
        assert context.row("model", "count", 1.0, dtype=dtype).dtype == dtype


def test_every_dtype_of_the_references_is_a_known_number_format():
    found = {row.dtype for run in stored_references() for row in run.rows()}
    assert len(found) > 10 and found <= {"", *ROW_DTYPES} and set(DTYPES) <= set(ROW_DTYPES)


@pytest.mark.parametrize("error", [2e-5, float("inf"), float("nan")])
def test_a_product_with_a_wrong_output_has_no_rate(error):
    assert "wrong output" in wrong_product("fp32", Verification("float64 slice", error, 1e-5))
    assert wrong_product("fp32", Verification("float64 slice", 1e-6, 1e-5)) == ""


def test_a_context_travels_with_its_upstream_rows_and_the_definitions_of_their_metrics(tmp_path):
    own = Metric("marks", "points", "higher", "marks of an exam")
    row = toy_context("exam", {}, tmp_path).row("pupil", "count", 3.0, params={"subjects": ["art"]})
    context = toy_context("toy", {"sizes": [1, 2.5]}, tmp_path, upstream=[replace(row, metric="marks", own_metric=own)])
    again = restored(json.loads(json.dumps(packed(context))))
    assert again == context and again.upstream[0].definition == own


def test_traffic_that_a_cache_may_hold_in_part_has_no_limit():
    h100 = detect(facts("H100 SXM"))
    enough = CACHE_MULTIPLE * h100.last_level_cache_bytes
    for traffic_bytes in (enough // 2, enough - 1):
        limit, reason = bandwidth_limit(h100, traffic_bytes)
        assert limit is None and "50 MiB of last-level cache" in reason
    limit, source = bandwidth_limit(h100, enough)
    assert limit > 3000 and source.startswith("device memory")
