"""Which devices whole steps are compiled for with combined kernels."""

from hyperion.hardware import detect, detect_cpu
from hyperion.training import compile_options
from tests.hardware.machines import facts


def test_kernels_are_combined_on_nvidia_alone():
    assert compile_options(detect(facts("H200"))) == {"combo_kernels": True}
    assert compile_options(detect(facts("MI250X"))) is None, "there PyTorch 2.9 could store wrong scalars"
    assert compile_options(detect_cpu()) is None
