"""Measure the time, the memory and the FLOPs of functions, and the speed of hardware.

This package exports the public names of its subpackages. The functions `time`, `compare`, `memory`, `flops`, `explain` and
`relaunch` measure your own code. The other functions measure matrix products (GEMMs), bandwidth, caches, copies, kernel launches,
collectives and training steps.

No subpackage may have the same name as a function in this file, because importing the subpackage would replace the function.
"""

from hyperion.hardware.specs import Ceilings
from hyperion.measure.api.answers import TimeAnswer
from hyperion.measure.api.counting import Uncounted
from hyperion.measure.api.explain import explain
from hyperion.measure.api.functions import compare, flops, memory, time
from hyperion.measure.api.relaunching import SIDES, Launched, Relaunched, relaunch
from hyperion.measure.clock.clocks import RanksClock
from hyperion.measure.clock.energy import Energy, energy_of
from hyperion.measure.clock.timing import HarnessError, Timing, time_function, time_interleaved
from hyperion.measure.clock.verify import (
    FORMATS,
    NumberFormat,
    OutputMismatchError,
    Verification,
    error_of_rows,
    format_of,
    largest_error,
    matmul_precision,
    relative_error,
    verify_bits,
    verify_elementwise,
    verify_product,
    verify_sum,
)
from hyperion.measure.collectives.collectives import (
    ALL_COLLECTIVES,
    COLLECTIVES,
    Collective,
    CollectiveMeasurement,
    CollectiveOverlap,
    WrongValueError,
    collective_bytes,
    measure_collective,
    measure_overlap,
)
from hyperion.measure.collectives.latency_bandwidth import fit_latency_bandwidth, half_rate_size, recommended_bucket
from hyperion.measure.memory_use.allocation import NoMemoryCap, allocator_refusal, largest_allocation, memory_cap
from hyperion.measure.memory_use.tensor_memory import (
    PeakMemory,
    PeakMemoryRegion,
    SavedForBackward,
    TensorMemory,
    bytes_of,
    state_of,
)
from hyperion.measure.planted_faults import run_self_test
from hyperion.measure.products.dispatch import Product, shapes_only
from hyperion.measure.products.gap import Gap, explain_gap, nominal_peak
from hyperion.measure.products.gemm import DISTRIBUTIONS, Gemm, RefusedProduct, blas_backend, distinct_share, verify_data
from hyperion.measure.products.gemm_search import Finalist, GemmSearch, search_gemm
from hyperion.measure.products.taf import CapturedGemms, TimedProduct, measure_products, taf
from hyperion.measure.steps.operator_cost import (
    LaunchCost,
    WorthwhileSize,
    measure_block_cost,
    measure_launch,
    measure_operator_cost,
    worthwhile_size,
)
from hyperion.measure.steps.step_prediction import (
    CompiledHost,
    MemoryStream,
    ProductRates,
    StepCeilings,
    predict_step,
    training_calls,
)
from hyperion.measure.steps.trace import Phase, StepTiming, time_step
from hyperion.measure.traffic.bandwidth import (
    DIRECTIONS,
    OPERATIONS,
    REDUCTIONS,
    BandwidthMeasurement,
    CopyMeasurement,
    measure_bandwidth,
    measure_between,
    measure_copy,
    measure_transfer,
    peer_pairs,
    peer_refusal,
    transfer_refusal,
)
from hyperion.measure.traffic.cache_sweep import (
    SWEEPS,
    CacheCapacity,
    CachePoint,
    RepeatedCalls,
    cache_capacities,
    cache_level,
    measure_cache_sweep,
    sweep_sizes,
)

__all__ = [
    "ALL_COLLECTIVES",
    "COLLECTIVES",
    "DIRECTIONS",
    "DISTRIBUTIONS",
    "FORMATS",
    "OPERATIONS",
    "REDUCTIONS",
    "SIDES",
    "SWEEPS",
    "BandwidthMeasurement",
    "CacheCapacity",
    "CachePoint",
    "CapturedGemms",
    "Ceilings",
    "Collective",
    "CollectiveMeasurement",
    "CollectiveOverlap",
    "CompiledHost",
    "CopyMeasurement",
    "Energy",
    "Finalist",
    "Gap",
    "Gemm",
    "GemmSearch",
    "HarnessError",
    "LaunchCost",
    "Launched",
    "MemoryStream",
    "NoMemoryCap",
    "NumberFormat",
    "OutputMismatchError",
    "PeakMemory",
    "PeakMemoryRegion",
    "Phase",
    "Product",
    "ProductRates",
    "RanksClock",
    "RefusedProduct",
    "Relaunched",
    "RepeatedCalls",
    "SavedForBackward",
    "StepCeilings",
    "StepTiming",
    "TensorMemory",
    "TimeAnswer",
    "TimedProduct",
    "Timing",
    "Uncounted",
    "Verification",
    "WorthwhileSize",
    "WrongValueError",
    "allocator_refusal",
    "blas_backend",
    "bytes_of",
    "cache_capacities",
    "cache_level",
    "collective_bytes",
    "compare",
    "distinct_share",
    "energy_of",
    "error_of_rows",
    "explain",
    "explain_gap",
    "fit_latency_bandwidth",
    "flops",
    "format_of",
    "half_rate_size",
    "largest_allocation",
    "largest_error",
    "matmul_precision",
    "measure_bandwidth",
    "measure_between",
    "measure_block_cost",
    "measure_cache_sweep",
    "measure_collective",
    "measure_copy",
    "measure_launch",
    "measure_operator_cost",
    "measure_overlap",
    "measure_products",
    "measure_transfer",
    "memory",
    "memory_cap",
    "nominal_peak",
    "peer_pairs",
    "peer_refusal",
    "predict_step",
    "recommended_bucket",
    "relative_error",
    "relaunch",
    "run_self_test",
    "search_gemm",
    "shapes_only",
    "state_of",
    "sweep_sizes",
    "taf",
    "time",
    "time_function",
    "time_interleaved",
    "time_step",
    "training_calls",
    "transfer_refusal",
    "verify_bits",
    "verify_data",
    "verify_elementwise",
    "verify_product",
    "verify_sum",
    "worthwhile_size",
]
