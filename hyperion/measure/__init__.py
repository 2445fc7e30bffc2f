"""Measure: one timing core, and gemm, bandwidth, caches, copies, launches, collectives, steps, memory and roofline on it."""

from hyperion.measure.api.answers import ComparisonAnswer, TimeAnswer
from hyperion.measure.api.counting import FlopsAnswer, MemoryAnswer, Uncounted
from hyperion.measure.api.explain import Explanation, Part, explain
from hyperion.measure.api.functions import compare, flops, memory, time
from hyperion.measure.api.outputs import OutputMismatchError
from hyperion.measure.api.relaunching import SIDES, Launched, Relaunched, relaunch
from hyperion.measure.clock.checks import Drift, HarnessError
from hyperion.measure.clock.dtypes import FORMATS, NumberFormat, format_of, matmul_precision
from hyperion.measure.clock.ranks_clock import RanksClock
from hyperion.measure.clock.repeated import RepeatedCalls
from hyperion.measure.clock.step import Phase, StepTiming, time_step
from hyperion.measure.clock.timing import Energy, Timing, energy_of, time_function, time_interleaved
from hyperion.measure.clock.verify import (
    Verification,
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
    WrongValueError,
    collective_bytes,
    measure_collective,
)
from hyperion.measure.collectives.latency_bandwidth import (
    BucketSize,
    LatencyBandwidth,
    fit_latency_bandwidth,
    half_rate_size,
    recommended_bucket,
)
from hyperion.measure.collectives.overlap import Overlap, measure_overlap
from hyperion.measure.faults.planted_faults import FaultResult, run_self_test
from hyperion.measure.memory_use.allocation import (
    LargestAllocation,
    NoMemoryCap,
    allocator_refusal,
    largest_allocation,
    memory_cap,
)
from hyperion.measure.memory_use.peak import PeakMemory, PeakMemoryRegion
from hyperion.measure.memory_use.tensor_memory import SavedForBackward, TensorMemory, bytes_of, state_of
from hyperion.measure.products.dispatch import shapes_only
from hyperion.measure.products.gap import Gap, NominalPeak, explain_gap, nominal_peak
from hyperion.measure.products.gemm import Gemm, RefusedProduct, blas_backend
from hyperion.measure.products.gemm_search import Finalist, GemmSearch, search_gemm, time_shapes
from hyperion.measure.products.operands import DISTRIBUTIONS, distinct_share, verify_data
from hyperion.measure.products.product_formulas import Ceilings, Product
from hyperion.measure.products.taf import (
    BatchedGemm,
    CapturedGemms,
    Taf,
    TimedProduct,
    capture_gemms,
    measure_products,
    measure_taf,
    taf,
)
from hyperion.measure.steps.launch import LaunchCost, WorthwhileSize, measure_launch, worthwhile_size
from hyperion.measure.steps.operator_cost import BlockCost, OperatorCost, measure_block_cost, measure_operator_cost
from hyperion.measure.steps.step_prediction import (
    CompiledHost,
    MemoryStream,
    ProductRates,
    StepCeilings,
    StepPrediction,
    predict_step,
    training_calls,
)
from hyperion.measure.traffic.bandwidth import OPERATIONS, REDUCTIONS, BandwidthMeasurement, measure_bandwidth
from hyperion.measure.traffic.cache_sweep import (
    SWEEPS,
    CacheCapacity,
    CachePoint,
    cache_capacities,
    cache_level,
    measure_cache_sweep,
    sweep_sizes,
)
from hyperion.measure.traffic.transfer import (
    DIRECTIONS,
    CopyMeasurement,
    measure_between,
    measure_copy,
    measure_transfer,
    peer_pairs,
    peer_refusal,
    transfer_refusal,
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
    "BatchedGemm",
    "BlockCost",
    "BucketSize",
    "CacheCapacity",
    "CachePoint",
    "CapturedGemms",
    "Ceilings",
    "Collective",
    "CollectiveMeasurement",
    "ComparisonAnswer",
    "CompiledHost",
    "CopyMeasurement",
    "Drift",
    "Energy",
    "Explanation",
    "FaultResult",
    "Finalist",
    "FlopsAnswer",
    "Gap",
    "Gemm",
    "GemmSearch",
    "HarnessError",
    "LargestAllocation",
    "LatencyBandwidth",
    "LaunchCost",
    "Launched",
    "MemoryAnswer",
    "MemoryStream",
    "NoMemoryCap",
    "NominalPeak",
    "NumberFormat",
    "OperatorCost",
    "OutputMismatchError",
    "Overlap",
    "Part",
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
    "StepPrediction",
    "StepTiming",
    "Taf",
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
    "capture_gemms",
    "collective_bytes",
    "compare",
    "distinct_share",
    "energy_of",
    "explain",
    "explain_gap",
    "fit_latency_bandwidth",
    "flops",
    "format_of",
    "half_rate_size",
    "largest_allocation",
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
    "measure_taf",
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
    "time_shapes",
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
