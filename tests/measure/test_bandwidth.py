"""Streams do what their names say, count the bytes they name, and are caught when they do not."""

import pytest
import torch

from hyperion.hardware import detect_cpu
from hyperion.measure import OPERATIONS, measure_bandwidth, verify_elementwise


@pytest.mark.parametrize(("operation", "arrays"), [("copy", 2), ("scale", 2), ("add", 3), ("triad", 3)])
def test_bytes_and_result(operation, arrays):
    measured = measure_bandwidth(operation, 10_000, "fp32", detect_cpu(), time_limit_s=0.05)
    assert measured.bytes == arrays * 10_000 * 4
    assert measured.verification.passed
    assert len(measured.timing.samples_s) >= 30


def test_a_copy_must_be_exact():
    measured = measure_bandwidth("copy", 10_000, "bf16", detect_cpu(), time_limit_s=0.05)
    assert measured.verification.error == 0


def test_an_unwritten_tail_is_caught():
    a, b = torch.randn(100_000), torch.randn(100_000)
    output = a + 0.4 * b
    output[-1] = float("nan")
    assert not verify_elementwise(output, OPERATIONS["triad"].reference, (a, b), tolerance=1e-6).passed
