"""Parallel training: distribute a model over several devices with `parallelize`, and check that the ranks agree."""

from hyperion.parallel.collectives import (
    DesyncError,
    assert_ranks_agree,
    average_statistics,
    clip_gradients,
    differing_parameters,
    fsdp_units,
    full_parameter_bytes,
    is_replicated,
    is_sharded,
    local_gradient_norm,
    local_parameter_bytes,
    ranks_of,
    reshard,
    start_sum,
    without_exchange,
)
from hyperion.parallel.memory_format import convolution_memory_format, image_memory_format
from hyperion.parallel.parallelize import ParallelPlan, parallelize

__all__ = [
    "DesyncError",
    "ParallelPlan",
    "assert_ranks_agree",
    "average_statistics",
    "clip_gradients",
    "convolution_memory_format",
    "differing_parameters",
    "fsdp_units",
    "full_parameter_bytes",
    "image_memory_format",
    "is_replicated",
    "is_sharded",
    "local_gradient_norm",
    "local_parameter_bytes",
    "parallelize",
    "ranks_of",
    "reshard",
    "start_sum",
    "without_exchange",
]
