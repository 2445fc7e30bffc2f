"""Metrics of the hardware experiments, in addition to the metrics that the library shares among all experiments."""

from hyperion.results import Metric

METRICS = (
    Metric("fft_tflops", "TFLOPS", "higher", "complex Fourier transforms, 5·N·log2(N) over the median time", True, True, True),
)
