"""A plan that makes no sense is refused where it is written down."""

import json
from dataclasses import asdict

import pytest

from hyperion.errors import HyperionError
from hyperion.parallel import ParallelPlan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "zero3"}, "strategy is 'zero3'"),
        ({"strategy": "fsdp", "param_dtype": "fp8"}, "param_dtype is 'fp8'"),
        ({"strategy": "ddp", "param_dtype": "bf16"}, "belong to strategy 'fsdp', not to 'ddp'"),
        ({"reshard_after_forward": False}, "belong to strategy 'fsdp', not to 'single'"),
        ({"checkpointing": "all"}, "checkpointing is 'all'"),
        ({"checkpointing": "budget"}, "checkpointing 'budget' with checkpointed_blocks None"),
        ({"checkpointing": "selective", "checkpointed_blocks": 3}, "'selective' with checkpointed_blocks 3"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(HyperionError, match=message):
        ParallelPlan(**options)


def test_a_plan_travels_as_json():
    plan = ParallelPlan("fsdp", "bf16", "budget", 3, True, False)
    assert ParallelPlan(**json.loads(json.dumps(asdict(plan)))) == plan
