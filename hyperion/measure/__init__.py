"""Measure: one timing core, and gemm, bandwidth, steps in their phases, memory and roofline on it."""

from hyperion.measure.bandwidth import OPERATIONS, BandwidthMeasurement, measure_bandwidth
from hyperion.measure.dtypes import FORMATS, NumberFormat, matmul_precision
from hyperion.measure.gemm import Gemm, blas_backend
from hyperion.measure.memory import PeakMemory, PeakMemoryRegion
from hyperion.measure.roofline import Ceilings
from hyperion.measure.step import Phase, StepTiming, time_step
from hyperion.measure.tensor_memory import SavedForBackward, TensorMemory, bytes_of, state_of
from hyperion.measure.timing import Timing, time_function, time_interleaved
from hyperion.measure.verify import Verification, relative_error, verify_elementwise, verify_product

__all__ = [
    "FORMATS", "OPERATIONS", "BandwidthMeasurement", "Ceilings", "Gemm", "NumberFormat", "PeakMemory",
    "PeakMemoryRegion", "Phase", "SavedForBackward", "StepTiming", "TensorMemory", "Timing", "Verification", "blas_backend",
    "bytes_of", "matmul_precision", "measure_bandwidth", "relative_error", "state_of", "time_function", "time_interleaved",
    "time_step", "verify_elementwise", "verify_product",
]  # fmt: skip
