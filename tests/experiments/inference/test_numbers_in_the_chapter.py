"""The text of the chapter states numbers that a guess needs. They must be those of the experiments."""

import json
from pathlib import Path

import pytest

import hyperion
from hyperion.chapter import load_profile
from hyperion.experiments.coverage.architectures import ARCHITECTURES
from hyperion.experiments.coverage.operator_suite import KIND_OF, LAYERS
from hyperion.experiments.quantization.decode_speed import VOCABULARY, DecodeSpeedOptions
from hyperion.experiments.quantization.qlora import _parameter_sizes
from hyperion.models.llama import layer_shapes, llama_parameter_count, random_llama_shape
from hyperion.workloads.trained_models import LANGUAGE_MODELS

NOTEBOOK = Path(hyperion.__file__).resolve().parent.parent / "phase2_development" / "12_inference_and_quantization.ipynb"


@pytest.fixture(scope="module")
def text() -> str:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def test_counts_of_operators_and_architectures(text):
    assert f"How many of the {len(KIND_OF)} operators and {len(LAYERS)} layers pass" in text
    chosen = load_profile("smoke").sizes("architectures")["names"]
    assert f"There are {len(ARCHITECTURES)} in the profile `full`, and {len(chosen)} of them in the profile `smoke`" in text


@pytest.mark.parametrize("profile", ["smoke", "full"])
def test_sizes_of_the_trained_models(text, profile):
    sizes = {name: load_profile(profile).sizes(name) for name in ("quantization", "decode_speed", "qlora")}
    shape = LANGUAGE_MODELS[sizes["quantization"]["language_model"]].shape
    layers = shape.num_hidden_layers * list(layer_shapes(shape).values())
    weights, outputs = sum(n * k for k, n in layers), sum(n for _, n in layers)
    assert f"{weights:,} weights and {outputs:,} outputs in the profile `{profile}`" in text
    shape = LANGUAGE_MODELS[sizes["qlora"]["trained_model"]].shape
    parameters = sum(_parameter_sizes(shape))
    assert parameters == llama_parameter_count(shape)
    assert f"{parameters:,} " in text[text.index("optimizer state of 8-bit AdamW have") :]
    assert profile == "full" or f"{parameters:,} fp32 weights" in text


def test_size_of_the_random_model(text):
    options = DecodeSpeedOptions.parse(load_profile("full").sizes("decode_speed"), "decode_speed")
    shape = random_llama_shape(options.random_model, VOCABULARY)
    linear = shape.num_hidden_layers * sum(n * k for k, n in layer_shapes(shape).values())
    cache = 2 * shape.num_hidden_layers * options.positions * shape.hidden_size * 2
    assert f"{linear / 1e9:.1f} billion weights in NF4" in text and f"a cache of {cache / 1e9:.2f} GB" in text
    assert f"a head of {VOCABULARY * shape.hidden_size / 1e6:.0f} million weights in bf16" in text
