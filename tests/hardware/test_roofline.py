"""The roofline: the least time of a workload on given ceilings."""

import pytest

from hyperion.hardware.specs import Ceilings


def test_least_time_is_the_larger_of_arithmetic_and_traffic():
    ceilings = Ceilings(tflops=100.0, bandwidth_gb_s=1000.0, source="hand example")
    assert ceilings.ridge_flop_per_byte == 100.0
    assert ceilings.least_time_s(flops=1e12, traffic_bytes=1e9) == pytest.approx(0.01)
    assert ceilings.least_time_s(flops=1e12, traffic_bytes=1e11) == pytest.approx(0.1)
    assert Ceilings(100.0, None, "").least_time_s(1e12, 1e11) == pytest.approx(0.01)
