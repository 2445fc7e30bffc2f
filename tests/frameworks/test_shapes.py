"""The documented models have their published numbers of parameters, counted on the meta device."""

import pytest
import torch

from hyperion.frameworks.shapes import MODELS, build, count_parameters, family, is_tiny


@pytest.mark.parametrize(("model", "published"), [("llama", 8_030_261_248), ("qwen", 7_615_616_512)])
def test_the_full_models_have_the_published_numbers_of_parameters(model, published):
    assert MODELS[model].parameters == published
    assert count_parameters(model) == (published, published)


@pytest.mark.parametrize("model", ["llama_tiny", "qwen_tiny"])
def test_a_twin_has_the_architecture_and_the_ratios_of_its_model(model):
    twin, full = MODELS[model], MODELS[family(model)]
    assert is_tiny(model) and not is_tiny(family(model))
    assert count_parameters(model)[0] == twin.parameters
    assert twin.architecture == full.architecture and twin.options == full.options
    assert twin.shape.intermediate_size / twin.shape.hidden_size == full.shape.intermediate_size / full.shape.hidden_size
    grouped = [entry.shape.num_attention_heads / entry.shape.num_key_value_heads for entry in (twin, full)]
    assert grouped[0] == grouped[1]
    torch.manual_seed(0)
    logits = build(model)(input_ids=torch.arange(8)[None]).logits
    assert logits.shape == (1, 8, 256) and logits.isfinite().all()


def test_only_qwen_has_biases_and_only_on_q_k_and_v():
    biases = {
        model: {name.split(".")[-2] for name, _ in build(model).named_parameters() if name.endswith(".bias")}
        for model in ("llama_tiny", "qwen_tiny")
    }
    assert biases == {"llama_tiny": set(), "qwen_tiny": {"q_proj", "k_proj", "v_proj"}}
