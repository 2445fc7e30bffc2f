"""Rows: every rule refuses by name, and the CSV gives back the same bits."""

import dataclasses
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperion.errors import HyperionError
from hyperion.results import REGISTRY, Row, RowError, rows_from_csv, rows_to_csv
from hyperion.results.rows import COLUMNS

NUMBER = st.floats(allow_nan=False, allow_infinity=False)
# Of a clock in MHz or a power in W: 0 is no reading, and what is larger is in another unit.
READING = st.floats(0, 20_000, exclude_min=True, exclude_max=True)
TEXT = st.text(max_size=20)
NAME = st.text(min_size=1, max_size=20)
STEM = st.from_regex(r"\w[\w -]{0,19}", fullmatch=True)  # becomes a part of a file's name
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
FREE_METRICS = [m.name for m in REGISTRY.values() if not (m.needs_limit or m.needs_interval or m.needs_check)]


@st.composite
def rows(draw):
    low, value, high = sorted(draw(st.tuples(NUMBER, NUMBER, NUMBER)))
    known = draw(st.booleans())
    error, tolerance = sorted(draw(st.tuples(NUMBER, NUMBER)))
    return Row(
        notebook=draw(STEM),
        experiment=draw(STEM),
        variant=draw(NAME),
        dtype=draw(TEXT),
        params=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        rank=draw(st.none() | st.integers(0, 4096)),
        metric="count",
        value=value if known else None,
        value_reason="" if known else draw(NAME),
        n=draw(st.none() | st.integers(1, 10**9)),
        ci_low=low,
        ci_high=high,
        predicted=draw(st.none() | NUMBER),
        limit=draw(st.none() | NUMBER),
        limit_source=draw(TEXT),
        check=draw(TEXT),
        check_error=error,
        check_tolerance=tolerance,
        data_source=draw(TEXT),
        clock_mhz=draw(st.none() | READING),
        power_w=draw(st.none() | READING),
        throttle=draw(st.none() | NAME),
        host_load=draw(st.none() | st.floats(0, 1)),
        host_steal=draw(st.none() | st.floats(0, 1)),
    )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(rows(), max_size=4, unique_by=lambda row: row.key))
def test_csv_gives_back_the_same_rows_bit_for_bit(written):
    read = rows_from_csv(rows_to_csv(written).encode().decode())
    assert read == written
    for before, after in zip(written, read, strict=True):
        for name in ("value", "ci_low", "limit", "predicted", "check_error"):
            if getattr(before, name) is not None:
                # Equality alone would take 0.0 for -0.0.
                assert float.hex(getattr(before, name)) == float.hex(getattr(after, name))


def test_a_carriage_return_survives_and_lines_end_in_newline(row):
    text = rows_to_csv([row(value=None, value_reason='a\rb\r\nc\nd,"e"')])
    assert rows_from_csv(text)[0].value_reason == 'a\rb\r\nc\nd,"e"'
    assert text.splitlines(keepends=True)[0].endswith("throttle,host_load,host_steal\n")


def test_rows_of_versions_without_the_load_of_the_host_are_read(row):
    written = rows_to_csv([row(throttle="none", host_load=0.2, host_steal=0.0), row(variant="other", throttle="busy")])
    older = "".join(line.rsplit(",", 2)[0] + "\n" for line in written.splitlines())
    read = rows_from_csv(older)
    assert [r.throttle for r in read] == ["none", "busy"] and all(r.host_load is None and r.host_steal is None for r in read)
    with pytest.raises(RowError, match="header is not that of schema"):
        rows_from_csv("".join(line.rsplit(",", 1)[0] + "\n" for line in written.splitlines()))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"notebook": ""}, "notebook is empty"),
        ({"experiment": ""}, "experiment is empty"),
        ({"variant": ""}, "variant is empty"),
        ({"data_source": math.nan}, "data_source is nan, which is not a text"),
        ({"value": math.nan}, "value is nan"),
        ({"ci_high": math.inf}, "ci_high is inf"),
        ({"predicted": -math.inf}, "predicted is -inf"),
        ({"params": {"m": math.nan}}, "params that are not a JSON"),
        ({"params": {"m": {1, 2}}}, "params that are not a JSON"),
        ({"params": {1: "a key that JSON would turn into a string"}}, "params that are not a JSON"),
        ({"value": None}, "null without a reason"),
        ({"value_reason": "unsupported"}, "both a value and a reason"),
        ({"limit": None, "limit_source": ""}, "neither a limit nor the reason why"),
        ({"n": None}, "lacks n or the 95 % confidence interval"),
        ({"ci_low": None}, "lacks n or the 95 % confidence interval"),
        ({"ci_high": 99.5, "ci_low": 99.0}, "outside its own interval"),
        ({"check": "", "check_error": None, "check_tolerance": None}, "lacks its check"),
        ({"check_error": None}, "lacks its error or tolerance"),
        ({"check_tolerance": None}, "lacks its error or tolerance"),
        ({"check_error": 0.02}, "failed its check 'slice against float64': error 0.02 above tolerance 0.01"),
        ({"limit": 10**400}, "limit is 1000"),
        ({"n": 2**63}, "n is 9223372036854775808"),
        ({"rank": -1}, "rank is -1"),
        ({"params": {"m": 10**400}}, "beyond the range of a float"),
        ({"params": [1]}, "params that are not a JSON object"),
        ({"notebook": "../up"}, "notebook is '../up', which cannot be a part of a file's name"),
        ({"notebook": ".hidden"}, "cannot be a part of a file's name"),
        ({"experiment": "a/b"}, "experiment is 'a/b', which cannot be a part of a file's name"),
        ({"experiment": "a.b"}, "cannot be a part of a file's name"),
        ({"experiment": "x" * 81}, "cannot be a part of a file's name"),
        ({"limit": 99.0}, "beyond its limit 99 (MI250X GCD datasheet)"),
    ],
)
def test_each_rule_refuses_by_name(row, changes, fault):
    row().validate()
    with pytest.raises(RowError) as refusal:
        row(**changes).validate()
    assert fault in str(refusal.value)
    assert "gemm_tflops" in str(refusal.value) or "file's name" in fault
    assert refusal.value.next_step


@pytest.mark.parametrize("column", ["value", "predicted", "n"])
@pytest.mark.parametrize("other", [torch.tensor(1.5, requires_grad=True), np.ones(1), "1", True, 1j, Decimal(1)], ids=repr)
def test_what_could_not_be_read_again_as_a_number_is_refused_before_it_is_stored(row, column, other):
    for check in (Row.validate, Row.without_failed_value):
        with pytest.raises(RowError, match=f"{column} is .* of type {type(other).__name__}, which is not a (whole )?number"):
            check(row(**{column: other}))


def test_a_count_is_whole(row):
    with pytest.raises(RowError, match="n is 30.0 of type float, which is not a whole number"):
        row(n=30.0).validate()


def test_numbers_of_numpy_and_fractions_are_stored_bit_for_bit(row):
    for number in (np.float32(0.1), np.float64(0.1), np.int64(7), Fraction(1, 3)):
        given = row(value=number, ci_low=number, ci_high=number, n=np.int64(30))
        given.validate()
        (read,) = rows_from_csv(rows_to_csv([given]))
        assert (read.value, read.n) == (float(number), 30)


def test_a_lower_is_better_metric_is_bounded_from_below():
    loss = {"notebook": "02", "experiment": "language_model", "variant": "lm", "metric": "validation_loss"}
    Row(**loss, value=3.0, limit=2.5, limit_source="entropy floor").validate()
    with pytest.raises(RowError, match="beyond its limit"):
        Row(**loss, value=2.4, limit=2.5, limit_source="entropy floor").validate()
    assert Row(**loss, value=5.0, limit=2.5, limit_source="entropy floor").fraction_of_limit == 0.5


def test_unknown_metric_is_refused_with_the_names_there_are(row):
    with pytest.raises(HyperionError, match=r"unknown metric 'speed'") as refusal:
        row(metric="speed").validate()
    assert "gemm_tflops" in refusal.value.next_step


def test_fraction_of_limit_is_null_without_a_limit(row):
    assert row().fraction_of_limit == pytest.approx(100 / 191.5)
    assert row(limit=None).fraction_of_limit is None
    assert row(value=None, value_reason="unsupported").fraction_of_limit is None


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda text: text.replace("notebook,", "note,", 1), "header is not that of schema"),
        (lambda text: text.rsplit(",", 1)[0] + "\n", "cells instead of"),
        (lambda text: text.replace("TFLOPS", "GFLOPS"), "the unit is 'GFLOPS', but the unit of gemm_tflops is 'TFLOPS'"),
        (lambda text: text.replace("191.5", "fast"), "unreadable cell"),
        (lambda text: text.replace('"{""k', '"[{""k').replace('64}"', '64}]"'), "params is not a JSON object"),
        (lambda text: text.replace("100.0,", "300.0,", 1), "outside its own interval"),
    ],
)
def test_an_unreadable_csv_is_refused_naming_row_and_fault(row, edit, fault):
    text = rows_to_csv([row()])
    assert edit(text) != text
    with pytest.raises(RowError) as refusal:
        rows_from_csv(edit(text), where="some/rows.csv")
    assert fault in str(refusal.value)


def changed(text, old, new):
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda text: text + text.splitlines(keepends=True)[1], "rows 1 and 2 have the same key"),
        (lambda text: changed(text, ",100.0,", ",1e999,"), "value is inf"),
        (lambda text: changed(text, ",30,", f",{10**30},"), "n is 1000"),
        (lambda text: changed(text, '""k"": 64', '""k"": 64, ""k"": 65'), "occurs twice"),
        (lambda text: changed(text, '""k"": 64', '""k"": ' + "[" * 5000 + "]" * 5000), "nested too deeply"),
        (lambda text: changed(text, '""k"": 64', '""k"": ' + "9" * 400), "beyond the range of a float"),
        (lambda text: text + '"' + "x" * 200_000, "invalid CSV after row 1"),
        (lambda text: changed(text, ",TFLOPS,", ",GFLOPS,"), "the unit is 'GFLOPS'"),
    ],
)
def test_a_csv_that_we_never_write_is_refused(row, change, fault):
    text = rows_to_csv([row()])
    assert rows_from_csv(text) == [row()]
    with pytest.raises(RowError, match=fault):
        rows_from_csv(change(text))


@pytest.mark.parametrize(
    ("changes", "reason", "error"),
    [
        ({"check_error": 0.02}, "TFLOPS failed its check 'slice against float64': error 0.02 above tolerance 0.01", 0.02),
        ({"check_error": math.nan}, "failed its check 'slice against float64': error nan above tolerance 0.01", None),
        ({"limit": 99.0, "check_error": 0.0}, "lies beyond its limit 99 (MI250X GCD datasheet)", 0.0),
        ({"value": math.nan, "check_error": 0.0}, "unexpected: nan TFLOPS is not finite", 0.0),
        ({"value": math.inf, "check_error": math.inf}, "unexpected: inf TFLOPS is not finite", None),
    ],
)
def test_a_row_that_fails_is_kept_without_its_value_and_with_its_numbers(row, changes, reason, error):
    assert row().without_failed_value() == row()
    assert not row().is_unexpected and not row(value=None, value_reason="unsupported").is_unexpected
    refused = row(**changes).without_failed_value()
    refused.validate()
    assert refused.is_unexpected and reason in refused.value_reason
    assert refused.key == row().key and (refused.value, refused.n, refused.ci_low, refused.ci_high) == (None,) * 4
    assert (refused.check, refused.check_tolerance) == (row().check, row().check_tolerance)
    assert refused.check_error == error
    (stored,) = rows_from_csv(rows_to_csv([refused]))
    assert stored == refused


def test_a_row_that_is_malformed_is_an_error_even_where_its_check_failed(row):
    with pytest.raises(RowError, match="neither a limit nor the reason why"):
        row(check_error=0.02, limit=None, limit_source="").without_failed_value()
    with pytest.raises(RowError, match="lacks n or"):
        row(check_error=0.02, n=None).without_failed_value()


def test_rows_on_their_way_from_a_worker_are_not_held_against_their_checks(row):
    failed = row(check_error=0.02)
    assert rows_from_csv(rows_to_csv([failed]), validated=False) == [failed]
    with pytest.raises(RowError, match="failed its check"):
        rows_from_csv(rows_to_csv([failed]))


def test_the_file_has_a_column_for_each_field_of_a_row():
    assert set(COLUMNS) == {field.name for field in dataclasses.fields(Row)} - {"own_metric"} | {"unit"}
