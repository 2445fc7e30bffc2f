"""Numbers carry the digits their interval leaves certain."""

import pytest

from hyperion.figures.material import byte_size, interval, items, number, number_within, percent, quoted_value, signed_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0, "0"),
        (782.1234, "782.1"),
        (4363.7, "4,364"),
        (1_146_904.2, "1,146,904"),
        (8192.0, "8,192"),
        (0.37164, "0.3716"),
        (0.00037, "0.0003700"),
        (1.2e-9, "1.20e-09"),
        (-12.5, "-12.50"),
    ],
)
def test_four_significant_digits(value, text):
    assert number(value) == text


def test_the_interval_decides_the_digits():
    assert number_within(782.1234, 780.0, 785.0) == "782.1"
    assert number_within(782.1234, 600.0, 900.0) == "782"
    assert number_within(782.1234, 782.1233, 782.1235) == "782.123"
    assert number_within(0.1032, 0.0028, 0.114) == "0.103" and interval(0.1032, 0.0028, 0.114) == "0.003 – 0.114"
    assert interval(782.1234, 600.0, 900.0) == "600 – 900"
    assert number_within(5.0, 5.0, 5.0) == "5" and interval(5.0, None, None) == ""


def test_percent_and_items():
    assert percent(0.7904) == "79.0" and percent(0.215, signed=True) == "+21.5" and percent(None) == ""
    assert [items(n) for n in (512, 1500, 20_000_000)] == ["512", "1.5 k", "20 M"]


def test_a_number_that_rounds_to_zero_has_no_sign():
    assert [percent(value, signed=True) for value in (-4e-4, -0.0, 4e-4)] == ["0.0"] * 3 and percent(-4e-4) == "0.0"
    assert [signed_number(value, 0) for value in (-0.4, 0.4, -0.6, 0.6)] == ["0", "0", "-1", "+1"]
    assert number(-0.0) == "0" and interval(2000.0, -0.4, 4000.0) == "0 – 4,000"


@pytest.mark.parametrize(
    ("count", "text"),
    [(8, "8 B"), (1023, "1023 B"), (1024, "1 KiB"), (1.5 * 2**20, "1.5 MiB"), (2**30, "1 GiB"), (2**33, "8 GiB")],
)
def test_bytes_are_written_in_binary_units(count, text):
    assert byte_size(count) == text


def test_a_fraction_too_small_for_percent_keeps_its_digits():
    fractions = (0.0, 0.25, 3.6e-4, 1.2e-6)
    assert [quoted_value(value, "fraction") for value in fractions] == ["0.0 %", "25.0 %", "0.036 %", "1.2e-06"]
    assert [quoted_value(value, "B") for value in (229_440, 1_338_368)] == ["229,440 B", "1.338 MB"]
    assert [quoted_value(value, "items") for value in (0, 1, 17)] == ["0 items", "1 item", "17 items"]
