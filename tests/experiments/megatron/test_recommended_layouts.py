"""The layouts of the guide with toy shapes: possible ones, one whose heads cannot be divided, and one that does not fit."""

import pytest

from hyperion.errors import HyperionError
from hyperion.models.llama import LlamaShape
from hyperion.parallel.megatron.layouts import MegatronLayout
from hyperion.parallel.megatron.planner import Batch, training_bytes
from hyperion.results import Row
from tests.chapter.toy import perform, toy_context

TOY = {"like": "toy", "width": 64, "layers": 4, "heads": 4, "key_value_heads": 4, "mlp_width": 96, "ranks": 4}
HUGE = TOY | {"width": 16384, "layers": 128, "heads": 128, "key_value_heads": 128, "mlp_width": 53248}
SIZES = {
    "device": "AMD Instinct MI250X (one GCD)",
    "vocabulary": 128,
    "sequence_length": 64,
    "micro_batch_size": 2,
    "recommendations": [
        TOY | {"name": "fits", "tensor": 2, "pipeline": 2},
        TOY | {"name": "heads", "heads": 5, "key_value_heads": 5, "width": 80, "tensor": 4, "pipeline": 1},
        HUGE | {"name": "huge", "tensor": 2, "pipeline": 2},
    ],
}


def test_layouts_of_the_guide_are_possible_or_rejected_with_a_reason(tmp_path):
    rows = perform(toy_context("recommended_layouts", SIZES, tmp_path), tmp_path).rows
    found = {(row.variant, row.params["what"]): row for row in rows if row.metric != "training_bytes"}
    assert found["fits", "layout of the guide"].params["layout"] == "TP 2 + PP 2"
    assert found["fits", "smallest layout"].params["layout"] == "DP 4 + distributed optimizer"
    assert found["heads", "layout of the guide"].value_reason == "rejected: 5 heads cannot be divided by 4 tensor-parallel ranks"
    assert found["heads", "smallest layout"].value is not None
    assert "exceeds 64 GiB" in found["huge", "layout of the guide"].value_reason
    assert found["huge", "smallest layout"].value_reason == "rejected: no layout of 4 ranks fits"
    assert found["layout of the guide", "layouts of the guide that are possible"].value == 1
    assert all(row.check_error < 1e-12 for row in rows if row.metric == "model_state_bytes" and row.value is not None)


def planned(tmp_path, **changes) -> dict[str, Row]:
    """The rows with state and activations of the first toy model, by what they describe."""
    sizes = SIZES | {"recommendations": SIZES["recommendations"][:1]} | changes
    rows = perform(toy_context("recommended_layouts", sizes, tmp_path), tmp_path).rows
    return {row.params["what"]: row for row in rows if row.metric == "training_bytes"}


def test_activations_are_counted_and_recomputed_only_if_nothing_else_fits(tmp_path):
    of_guide = planned(tmp_path / "short")["layout of the guide"]
    assert of_guide.params["recomputation"] == "none" and of_guide.params["layout"] == "TP 2 + PP 2"
    shape, layout = LlamaShape(64, 4, 4, 4, 96, 128), MegatronLayout(2, 2)
    assert of_guide.value == training_bytes(shape, layout, 4, Batch(64, 2))
    # The scores of a layer take 2 x 4 x 120,000 x 120,000 / TP bytes, which is 54 GiB with TP 2.
    long = planned(tmp_path / "long", sequence_length=120_000, micro_batch_size=1)
    assert long["layout of the guide"].params["recomputation"] == "full"
    assert long["layout of the guide"].value == training_bytes(shape, layout, 4, Batch(120_000, 1, recompute=True))
    assert long["smallest layout"].value is not None
    longest = planned(tmp_path / "longest", sequence_length=1_000_000, micro_batch_size=1)
    assert "GiB with full recomputation, which exceeds 64 GiB" in longest["layout of the guide"].value_reason
    assert longest["smallest layout"].value_reason == "rejected: no layout of 4 ranks fits"


def test_an_unknown_device_is_named(tmp_path):
    with pytest.raises(HyperionError, match="no device is named 'MI9'"):
        perform(toy_context("recommended_layouts", SIZES | {"device": "MI9"}, tmp_path), tmp_path)
