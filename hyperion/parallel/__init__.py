"""One model on many devices: `parallelize(model, plan, world)`, LoRA, and checks that ranks agree."""

from hyperion.parallel.invariants import (
    DesyncError,
    assert_ranks_agree,
    differing_parameters,
    fsdp_units,
    full_parameter_bytes,
    local_parameter_bytes,
)
from hyperion.parallel.lora import add_lora, expected_lora_parameters, trainable_parameter_count
from hyperion.parallel.parallelize import parallelize
from hyperion.parallel.plan import ParallelPlan
from hyperion.parallel.reductions import (
    average_statistics,
    clip_gradients,
    is_replicated,
    is_sharded,
    local_gradient_norm,
    ranks_of,
    reshard,
    start_sum,
    without_exchange,
)

__all__ = [
    "DesyncError",
    "ParallelPlan",
    "add_lora",
    "assert_ranks_agree",
    "average_statistics",
    "clip_gradients",
    "differing_parameters",
    "expected_lora_parameters",
    "fsdp_units",
    "full_parameter_bytes",
    "is_replicated",
    "is_sharded",
    "local_gradient_norm",
    "local_parameter_bytes",
    "parallelize",
    "ranks_of",
    "reshard",
    "start_sum",
    "trainable_parameter_count",
    "without_exchange",
]
