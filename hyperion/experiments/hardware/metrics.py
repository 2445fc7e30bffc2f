"""Metrics of the hardware that the library does not define elsewhere."""

from hyperion.results import Metric

METRICS = (
    Metric("fft_tflops", "TFLOPS", "higher", "complex Fourier transforms, 5·N·log2(N) over the median time", True, True, True),
)
