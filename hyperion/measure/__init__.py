"""Measure: one timing core, and gemm, bandwidth, collectives, steps in their phases, memory and roofline on it."""

from hyperion.measure.bandwidth import OPERATIONS, REDUCTIONS, BandwidthMeasurement, measure_bandwidth
from hyperion.measure.collectives import (
    COLLECTIVES,
    Collective,
    CollectiveMeasurement,
    WrongValueError,
    collective_bytes,
    measure_collective,
)
from hyperion.measure.dtypes import FORMATS, NumberFormat, format_of, matmul_precision
from hyperion.measure.energy import Energy, energy_of
from hyperion.measure.gemm import Gemm, RefusedProduct, blas_backend
from hyperion.measure.latency_bandwidth import LatencyBandwidth, fit_latency_bandwidth, half_rate_size
from hyperion.measure.memory import PeakMemory, PeakMemoryRegion
from hyperion.measure.memory_cap import NoMemoryCap, allocator_refusal, memory_cap
from hyperion.measure.operands import DISTRIBUTIONS, distinct_share, verify_data
from hyperion.measure.ranks_clock import RanksClock
from hyperion.measure.roofline import Ceilings
from hyperion.measure.step import Phase, StepTiming, time_step
from hyperion.measure.tensor_memory import SavedForBackward, TensorMemory, bytes_of, state_of
from hyperion.measure.timing import Timing, time_function, time_interleaved
from hyperion.measure.verify import Verification, relative_error, verify_elementwise, verify_product
from hyperion.measure.verify_whole import verify_bits, verify_sum

__all__ = [
    "COLLECTIVES", "DISTRIBUTIONS", "FORMATS", "OPERATIONS", "REDUCTIONS", "BandwidthMeasurement", "Ceilings",
    "Collective", "CollectiveMeasurement", "Energy", "Gemm", "LatencyBandwidth", "NoMemoryCap", "NumberFormat",
    "PeakMemory", "PeakMemoryRegion", "Phase", "RanksClock", "RefusedProduct", "SavedForBackward", "StepTiming",
    "TensorMemory", "Timing", "Verification", "WrongValueError", "allocator_refusal", "blas_backend", "bytes_of",
    "collective_bytes", "distinct_share", "energy_of", "fit_latency_bandwidth", "format_of", "half_rate_size",
    "matmul_precision", "measure_bandwidth", "measure_collective", "memory_cap", "relative_error", "state_of",
    "time_function", "time_interleaved", "time_step", "verify_bits", "verify_data", "verify_elementwise",
    "verify_product", "verify_sum",
]  # fmt: skip
