"""The roofline: the intensity at which both ceilings limit a workload equally."""

from hyperion.hardware.specs import Ceilings


def test_the_ridge_is_the_quotient_of_both_ceilings():
    assert Ceilings(tflops=100.0, bandwidth_gb_s=1000.0, source="hand example").ridge_flop_per_byte == 100.0
    assert Ceilings(100.0, None, "").ridge_flop_per_byte is None
