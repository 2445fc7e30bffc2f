"""The parts of all ranks are the whole Llama, in the order that megatron-core expects."""

import pytest
import torch

from hyperion.models.llama import LlamaShape, build_random_llama, llama_parameter_count, random_llama_shape
from hyperion.parallel.megatron.layouts import (
    MegatronLayout,
    interleaved_qkv,
    joined_weights,
    rank_parameters,
    rank_state_bytes,
    rank_weights,
)

NAME, VOCABULARY = "random_llama_d64_l2", 64


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(build_random_llama(NAME, VOCABULARY).state_dict())


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_the_parts_of_all_ranks_are_the_whole_llama(tensor, pipeline, weights):
    shape, layout = random_llama_shape(NAME, VOCABULARY), MegatronLayout(tensor, pipeline)
    places = [(stage, rank) for stage in range(pipeline) for rank in range(tensor)]
    parts = {place: rank_weights(weights, shape, layout, *place) for place in places}
    joined = joined_weights(parts, shape, layout)
    assert joined.keys() == weights.keys()
    assert all(torch.equal(joined[name], weights[name]) for name in weights)
    for (stage, _), part in parts.items():
        assert sum(tensor.numel() for tensor in part.values()) == rank_parameters(shape, layout, stage)


def test_biases_of_queries_keys_and_values_are_divided_with_their_rows():
    from hyperion.frameworks.shapes import MODELS, build

    whole, shape = build("qwen_tiny").state_dict(), MODELS["qwen_tiny"].shape
    biases = {name: torch.randn(tensor.shape) for name, tensor in whole.items() if name.endswith("bias")}  # they start as zeros
    whole |= biases
    layout = MegatronLayout(2, 2)
    parts = {(stage, rank): rank_weights(whole, shape, layout, stage, rank) for stage in range(2) for rank in range(2)}
    joined = joined_weights(parts, shape, layout)
    assert len(biases) == 6 and joined.keys() == whole.keys()
    assert all(torch.equal(joined[name], whole[name]) for name in whole)


def test_a_rank_has_whole_heads(weights):
    shape, layout = random_llama_shape(NAME, VOCABULARY), MegatronLayout(tensor=2)
    part = rank_weights(weights, shape, layout, 0, 1)["decoder.layers.0.self_attention.linear_qkv.weight"]
    second = {name: weights[f"model.layers.0.self_attn.{name}_proj.weight"].chunk(2)[1] for name in "qkv"}
    assert torch.equal(part, torch.cat([second["q"], second["k"], second["v"]]))  # two key-value heads, one for each rank
    whole = interleaved_qkv(weights, "model.layers.0.self_attn.", 2)
    assert torch.equal(whole.chunk(2)[1], part)


def test_the_state_of_a_stage_is_counted_from_its_shape():
    shape = LlamaShape(8, 4, 2, 1, 16, 32)
    # Queries 64, keys and values 32 each, output 64, three matrices of the MLP with 128 each; two norms of 8.
    layer, end = 64 + 64 + 64 + 3 * 128 + 16, 32 * 8
    assert rank_parameters(shape, MegatronLayout(), 0) == 4 * layer + 2 * end + 8 == llama_parameter_count(shape)
    assert rank_parameters(shape, MegatronLayout(pipeline=2), 0) == 2 * layer + end
    assert rank_parameters(shape, MegatronLayout(pipeline=2), 1) == 2 * layer + end + 8
    assert rank_parameters(shape, MegatronLayout(tensor=2), 0) == 4 * ((layer - 16) / 2 + 16) + end + 8
    assert rank_state_bytes(shape, MegatronLayout(distributed_optimizer=True), 0, 4) == 10 * (4 * layer + 2 * end + 8)


def test_names_of_layouts():
    assert MegatronLayout().name(1) == "one rank" and MegatronLayout().name(2) == "DP 2"
    assert MegatronLayout(2, 2, sequence=True).name(8) == "TP 2 + PP 2 + DP 2 + SP"
